"""The loss from tiles of logits, activations recomputed or offloaded: the same gradients, less memory, or a message.

Trainers and runs use TRL's head; loops can use PyTorch's `linear_cross_entropy`.
"""

import sys
from contextlib import nullcontext

import peft
import pytest
import torch
import trl
from datasets import Dataset
from support.nets import Memory
from support.trl_on_cpus import TRAINS_ON_GPUS_ALONE
from transformers import AutoConfig, AutoModelForCausalLM
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.trainer.utils import add_fused_lm_head

import lowmem
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.hf import dry_runs, head
from lowmem.layers.config import LayersConfig
from lowmem.trainer import FusedSFTTrainer, FusedTrainer
from scripts.make_model import train_tokenizer

MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:Expected a tensor")


def own_loss(model, input_ids, labels):
    return model(input_ids=input_ids, labels=labels).loss


def trl_loss(model, input_ids, labels):
    return model(input_ids=input_ids, labels=labels, fused_lm_head=True).loss


def torch_loss(model, input_ids, labels):
    hidden = model.model(input_ids).last_hidden_state[:, :-1].flatten(0, 1)
    losses = torch.nn.functional.linear_cross_entropy(
        hidden, model.lm_head.weight, labels[:, 1:].flatten(), reduction="none",
        options=torch.nn.LinearCrossEntropyOptions(),
    )  # fmt: skip
    return losses.float().mean()


needs_torch_head = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="this PyTorch has no linear_cross_entropy in tiles"
)
TILED = [pytest.param(trl_loss, id="trl"), pytest.param(torch_loss, id="torch", marks=needs_torch_head)]


@pytest.fixture
def model(tiny_llama):
    """A factory of small Llamas with TRL's head, as its trainers add it."""

    def make(dtype=torch.float32, checkpointing=False, **config):
        model = tiny_llama(dtype, checkpointing, **config)
        add_fused_lm_head(model)
        return model

    return make


# --- In a loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", TILED)
@pytest.mark.parametrize("tied", [False, True])
def test_tiles_give_the_loss_and_gradients_of_the_model(loss, tied, model, token_batches):
    """The order of summation differs: 1e-5 of a gradient in float32."""
    (batch,) = token_batches(1)
    results = []
    for compute in (own_loss, loss):
        net = model(tie_word_embeddings=tied)
        value = compute(net, **batch)
        value.backward()
        results.append((value.detach(), [param.grad for param in net.parameters()]))
    (own_value, own_grads), (value, grads) = results
    torch.testing.assert_close(value, own_value, rtol=1e-6, atol=0)
    for grad, own_grad in zip(grads, own_grads, strict=True):
        assert (grad - own_grad).norm() <= 1e-5 * own_grad.norm()


POLICIES = {
    "immediate": ({}, 1),
    "two_pass": ({"clip_norm": 0.5, "policy": "two_pass"}, 1),
    "deferred": ({"clip_norm": 0.5}, 3),
}


@pytest.mark.parametrize(("options", "micro_batches"), POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("loss", TILED)
@pytest.mark.parametrize("tied", [False, True])
def test_fused_training_on_tiles_is_ordinary_training_to_the_last_bit(
    loss, tied, options, micro_batches, model, token_batches
):
    """A tied weight gets one gradient, the sum of the head's and the embedding's."""
    settings = {"lr": 1e-2, "foreach": False}
    fused, plain = (model(tie_word_embeddings=tied, attention_dropout=0.1, checkpointing=True) for _ in range(2))
    opt = lowmem.FusedOptimizer(fused.named_parameters(), rule=torch.optim.AdamW, **settings, **options)
    adamw = torch.optim.AdamW(plain.parameters(), **settings)
    for step in range(3):
        batches = token_batches(3 * micro_batches)[step::3]
        torch.manual_seed(step)
        for n, batch in enumerate(batches, start=1):
            with opt.accumulate() if n < micro_batches else nullcontext():
                opt.backward(loss(fused, **batch) / micro_batches)
        torch.manual_seed(step)
        for batch in batches:
            (loss(plain, **batch) / micro_batches).backward()
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), options["clip_norm"])
        adamw.step()
        adamw.zero_grad()
    assert opt.policy == options.get("policy", "immediate" if micro_batches == 1 else "deferred")
    assert all(map(torch.equal, fused.parameters(), plain.parameters()))


@pytest.mark.skipif(TRAINS_ON_GPUS_ALONE, reason="this TRL offloads activations of a GPU alone")
@pytest.mark.parametrize("policy", ["immediate", "deferred"])
def test_offloaded_activations_give_the_same_weights(policy, model, token_batches, monkeypatch):
    """TRL's offloading takes the CPU for an accelerator here: every activation is offloaded and loaded."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)  # where it is imported, TRL empties a GPU's cache
    nets = [model(checkpointing=True, tie_word_embeddings=True) for _ in range(2)]
    offloading = get_act_offloading_ctx_manager(nets[0], use_pin_memory=False, use_streams=False, min_offload_size=1)
    for net, context in zip(nets, (offloading, nullcontext()), strict=True):
        opt = lowmem.FusedOptimizer(net.named_parameters(), lr=1e-2, policy=policy)
        for batch in token_batches(3):
            with context:
                loss = trl_loss(net, **batch)
                assert context is not offloading or any(entry[1] for entry in offloading.tracker.values())
                opt.backward(loss)
    assert all(map(torch.equal, *(net.parameters() for net in nets)))


# --- In TRL's trainer ---------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer():
    return train_tokenizer(["some words to learn from, and some more of them"], 270)


@pytest.fixture
def make(tiny_llama, tokenizer, tmp_path):
    """A factory of trainers on rows of equal length; keyword arguments are training arguments."""
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in torch.randint(97, (24, 12)).tolist()])

    def factory(cls=FusedSFTTrainer, model=None, fused=None, layers=None, **arguments):
        options = {"processing_class": tokenizer} if cls is FusedSFTTrainer else {}
        config = trl.SFTConfig(
            **{
                "output_dir": str(tmp_path), "max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
                "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": False, "max_grad_norm": 0.0,
                "dataloader_pin_memory": False, "gradient_checkpointing": False, **arguments,
            }
        )  # fmt: skip
        return cls(
            model or tiny_llama(tie_word_embeddings=True),
            args=config,
            train_dataset=rows,
            fused=fused,
            layers=layers,
            **options,
        )

    return factory


TRAINED = {
    "immediate": {},
    "clipped in two passes": {"max_grad_norm": 0.5},
    "clipped and accumulated": {
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
    },
    "checkpointed": {"gradient_checkpointing": True},
    "every second layer": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "selective": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
}


@pytest.mark.parametrize("arguments", TRAINED.values(), ids=TRAINED)
def test_the_trainer_trains_as_with_the_loss_of_the_model(arguments, make):
    weights = []
    fused = lowmem.FusedConfig(rule="adalomo")  # whose step does not depend on the sign of a gradient that is nearly 0
    for cls, options in ((FusedSFTTrainer, {}), (FusedTrainer, {"gradient_checkpointing_kwargs": None})):
        trainer = make(cls, fused=fused, **{**arguments, **options})
        trainer.train()
        weights.append([param.detach() for param in trainer.model.parameters()])
    for actual, expected in zip(*weights, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [TRAINED["immediate"], TRAINED["clipped and accumulated"]], ids=["one", "more"])
def test_a_tied_head_may_have_a_bias(arguments, make, offers):
    """As Phi's, which is updated before the weight that its gradient was computed with."""
    weights = []
    for cls in (FusedSFTTrainer, FusedTrainer):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "phi", vocab_size=2003, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
            tie_word_embeddings=True, resid_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
        net = AutoModelForCausalLM.from_config(config)
        torch.nn.init.normal_(net.lm_head.bias)
        fused = lowmem.FusedConfig(rule="lomo", lr=1.0, batching=False)
        trainer = make(cls, net, fused, learning_rate=1.0, **arguments)
        trainer.train()
        weights.append([param.detach() for param in trainer.model.parameters()])
    assert ("HeadGradient", True) in offers["model.embed_tokens.weight"]
    for actual, expected in zip(*weights, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only("it counts the memory of a CPU")
def test_logits_exist_only_in_tiles(make, tiny_llama, token_batches):
    """The loss of the model allocates three float32 tensors of their size; tiles allocate less than one."""
    vocabulary, size = 32_000, (4, 128)
    (batch,) = token_batches(1, size, vocabulary)
    logits = size[0] * size[1] * vocabulary * 4
    net = tiny_llama(vocab_size=vocabulary)
    trainer = make(model=net, layers=LayersConfig(head_memory="16MiB"))
    opt = trainer.create_optimizer()
    opt.backward(own_loss(net, **batch))  # makes its states
    peaks = []
    for tiled in (False, True):
        with Memory(net, opt) as memory:
            inputs = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
            opt.backward(trainer.compute_loss(net, inputs) if tiled else own_loss(net, **batch))
        peaks.append(memory.above)
    own, tiles = peaks
    assert own >= 3 * logits
    assert tiles <= logits


# --- What is refused ----------------------------------------------------------------------------------------------

TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "sep_token_id": 1, "bos_token_id": 2, "cls_token_id": 2}
LAYER_BEFORE_THE_HEAD = {
    "modernbert-decoder": TOKENS,
    "bert": {"is_decoder": True},
    "electra": {"is_decoder": True, "embedding_size": 16},
}


def small(kind, **config):
    """A small model of a type."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    widths = {"ffn_dim": 48, "word_embed_proj_dim": 16} if kind == "opt" else {"intermediate_size": 48}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **widths, **config})).eval()


def difference(model):
    """The largest difference between log probabilities of the model's head and of TRL's."""
    ids = torch.randint(97, (1, 16)).to(model.device)
    with torch.no_grad():
        own = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (own - model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs).abs().max()


@pytest.mark.parametrize("kind", LAYER_BEFORE_THE_HEAD)
def test_a_model_whose_head_is_more_than_a_matrix_is_refused(kind, make):
    """TRL would omit a layer, without an error if the shapes fit."""
    net = small(kind, **LAYER_BEFORE_THE_HEAD[kind])
    with pytest.raises(
        UnsupportedError, match=f"{type(net).__name__}: TRL's SFTTrainer .*' is between them.* FusedTrainer"
    ):
        make(model=net)
    if kind != "electra":
        add_fused_lm_head(net)
        assert difference(net) > 0.1


CHANGES_LOGITS = {
    "recurrent_gemma": {"lru_width": 32, "num_hidden_layers": 3},
    "xlstm": {"num_heads": 4, "num_blocks": 1},
    "falcon": {"num_attention_heads": 4},  # which does not, and whose head another object replaces
}
CONVOLVES = {"recurrent_gemma": pytest.mark.cpu_only("the simulated GPU has no depthwise convolution")}


class Doubled(torch.nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=CONVOLVES.get(kind, ())) for kind in CHANGES_LOGITS])
def test_a_model_that_changes_logits_after_the_head_is_refused(kind, dtype, make):
    """By a comparison of losses, for a model of few logits too."""
    net = small(kind, **CHANGES_LOGITS[kind]).to(dtype)
    if kind == "falcon":
        net.lm_head.__class__ = Doubled
    trainer = make(model=net)
    with pytest.raises(
        UnsupportedError, match=f"{type(net).__name__}: for one row, the model computes a loss of .*FusedT"
    ):
        trainer.create_optimizer()


ONE_MATRIX = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 4.0},
    "granite": {"logits_scaling": 8.0},
    "opt": {},
    "phi": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


@pytest.mark.parametrize("kind", ONE_MATRIX)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_whose_head_is_a_matrix_is_accepted(kind, tied):
    """Also one that scales or caps its logits, or adds a bias, as TRL does."""
    net = small(kind, tie_word_embeddings=tied, **ONE_MATRIX[kind])
    head.check(net)
    add_fused_lm_head(net)
    assert difference(net) < 1e-5
    for model in (net, net.bfloat16()):
        dry_runs.check_loss(model, torch.device("cpu"), 0.0)


LORA = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "LoRA and a trained head": peft.LoraConfig(modules_to_save=["lm_head"], **LORA),
    "prompts": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "a prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("config", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_are_accepted_where_the_head_is_a_matrix(config, tiny_llama):
    """Prompts come before the first layer."""
    net = peft.get_peft_model(tiny_llama(), config).eval()
    for name, param in net.named_parameters():
        if param.requires_grad and "prompt" not in name:
            torch.nn.init.normal_(param, std=0.1)
    head.check(net)
    ids = torch.randint(97, (1, 16))
    with torch.no_grad():
        logits = net(input_ids=ids).logits[:, -16:]
        own = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        add_fused_lm_head(net.get_base_model())
        fused = net(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[:, -15:]
    torch.testing.assert_close(fused, own)


def test_adapters_do_not_hide_a_layer_before_the_head(make):
    net = small("modernbert-decoder", **TOKENS)
    adapted = peft.get_peft_model(net, peft.LoraConfig(**{**LORA, "target_modules": ["Wo"]}))
    with pytest.raises(UnsupportedError, match=r"ModernBertDecoderForCausalLM: .*' is between them"):
        make(model=adapted)


def test_an_adapter_of_rows_of_the_head_is_refused(make, tiny_llama):
    """TRL would fail in the first step."""
    config = peft.LoraConfig(trainable_token_indices=[1, 5], **LORA)
    with pytest.raises(UnsupportedError, match=r"TrainableTokensWrapper changes .*out of trainable_token_indices"):
        make(model=peft.get_peft_model(tiny_llama(tie_word_embeddings=True), config))


TWICE = lowmem.FusedConfig(policy="two_pass")
REFUSED = {
    "offloading on a CPU": (
        {"activation_offloading": True, "use_cpu": True},
        ConfigError,
        "activation_offloading=True: .*omit it",
    ),
    "offloaded checkpoints on a CPU": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}, "use_cpu": True},
        ConfigError,
        "'offload': True.*omit it",
    ),
    "smoothing of dft": (
        {"loss_type": "dft", "label_smoothing_factor": 0.1},
        ConfigError,
        "label_smoothing_factor=0.1 has no effect with loss_type='dft'",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_ignored_or_is_not_supported_is_refused_before_the_first_step(arguments, error, message, make):
    with pytest.raises(error, match=message):
        make(**arguments).create_optimizer()


def test_offloading_and_two_backward_passes_are_refused(make, monkeypatch):
    trainer = make(fused=TWICE)
    trainer.args.activation_offloading = True  # as on a GPU
    with pytest.raises(UnsupportedError, match=r"two_pass.*policy='deferred', or offload with"):
        trainer.create_optimizer()
