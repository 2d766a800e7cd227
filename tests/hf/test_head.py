"""The loss from tiles of logits, activations recomputed or offloaded: the same gradients, less memory, or a message.

Trainers and runs use TRL's head; loops can use PyTorch's `linear_cross_entropy`.
"""

import sys
from contextlib import nullcontext
from itertools import product

import peft
import pytest
import torch
import trl
from datasets import Dataset
from support.nets import Memory
from support.trl_on_cpus import TRAINS_ON_GPUS_ALONE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from trl.models.activation_offloading import get_act_offloading_ctx_manager

import lowmem
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.layers.config import LayersConfig
from lowmem.trainer import FusedSFTTrainer, FusedTrainer, FusedTrainerMixin
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
add_fused_lm_head = getattr(trl.trainer.utils, "add_fused_lm_head", None)
needs_trls_head = pytest.mark.skipif(add_fused_lm_head is None, reason="this TRL has no fused head")
TILED = [
    pytest.param(trl_loss, id="trl", marks=needs_trls_head),
    pytest.param(torch_loss, id="torch", marks=needs_torch_head),
]


@pytest.fixture
def model(tiny_llama):
    """A factory of small Llamas with TRL's head, as its trainers add it."""

    def make(dtype=torch.float32, checkpointing=False, **config):
        model = tiny_llama(dtype, checkpointing, **config)
        if add_fused_lm_head is not None:
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


@needs_trls_head
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
        try:
            trainer.train()
        except ValueError as error:
            pytest.skip(f"this TRL: {error}")
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
    peaks = []
    for tiled in (False, True):
        net = tiny_llama(vocab_size=vocabulary)
        trainer = make(model=net, layers=LayersConfig(head_memory="16MiB")) if tiled else None
        opt = trainer.create_optimizer() if tiled else lowmem.FusedOptimizer(net.named_parameters(), lr=1e-2)
        for _ in range(2):  # the first one makes states
            inputs = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
            with Memory(net, opt) as memory:
                opt.backward(trainer.compute_loss(net, inputs) if tiled else own_loss(net, **batch))
        peaks.append(memory.above)
    own, tiles = peaks
    assert own >= 3 * logits
    assert tiles <= logits


# --- Heads of all kinds -------------------------------------------------------------------------------------------

TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "sep_token_id": 1, "bos_token_id": 2, "cls_token_id": 2}
ONE_MATRIX = {
    "llama": {},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 4.0},
    "granite": {"logits_scaling": 8.0},
    "opt": {},
    "phi": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}
# Heads that TRL's fused head gets wrong: a layer before the matrix, or a cap under a name of its own.
MORE = {
    "modernbert-decoder": TOKENS,
    "bert": {"is_decoder": True},
    "electra": {"is_decoder": True, "embedding_size": 16},
    "recurrent_gemma": {"lru_width": 32, "num_hidden_layers": 3},
    "xlstm": {"num_heads": 4, "num_blocks": 1},
    "falcon": {"num_attention_heads": 4},
}
CONVOLVES = {"recurrent_gemma": pytest.mark.cpu_only("the simulated GPU has no depthwise convolution")}
KINDS = {**ONE_MATRIX, **MORE}


def small(kind, **config):
    """A small model of a type."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    widths = {"ffn_dim": 48, "word_embed_proj_dim": 16} if kind == "opt" else {"intermediate_size": 48}
    dropout = dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout"), 0.0
    )
    options = {**sizes, **widths, **dropout, **KINDS[kind], **config}
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    except Exception as error:  # some versions check the types of a configuration against its own defaults
        if "rope_parameters" not in str(error):
            raise
        pytest.skip(f"this version of transformers refuses its own configuration of {kind}")


class Doubled(torch.nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=CONVOLVES.get(kind, ())) for kind in KINDS])
def test_a_model_is_trained_by_its_own_logits(kind, make, matrices):
    """Whatever it does before and after the matrix, and where the output embedding is of another class."""
    weights = []
    for cls in (FusedSFTTrainer, FusedTrainer):
        net = small(kind)
        if kind == "falcon":
            net.lm_head.__class__ = Doubled
        try:
            trainer = make(cls, net, lowmem.FusedConfig(rule="lomo"), learning_rate=0.1)
            trainer.train()
        except Exception as error:
            if "a second time" not in str(error) and "rope_parameters" not in str(error):
                raise
            pytest.skip(f"this transformers cannot train or save a {kind}: {error}")
        weights.append([param.detach() for param in trainer.model.parameters()])
    for actual, expected in zip(*weights, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert not matrices or add_fused_lm_head is None  # for the entropy


LORA = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "LoRA and a trained head": peft.LoraConfig(modules_to_save=["lm_head"], **LORA),
    "LoRA on the head": peft.LoraConfig(**{**LORA, "target_modules": ["lm_head"]}),
    "rows of a tied head": peft.LoraConfig(trainable_token_indices=[1, 5], **LORA),
    "prompts": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "a prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_loss_of_adapters_is_that_of_the_model(name, make, tiny_llama):
    """Prompts come before the first layer, and a head with an adapter is left as it is."""
    net = peft.get_peft_model(tiny_llama(tie_word_embeddings=name == "rows of a tied head"), ADAPTERS[name])
    for param in net.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.1)
    try:
        trainer = make(model=net, loss_type="nll")  # TRL has another loss that does not train some of these
    except ValueError as error:
        pytest.skip(f"TRL: {error}")
    ids = torch.randint(97, (2, 16)).to(net.device)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    results = []
    for compute in (trainer.compute_loss, lambda net, inputs: net(**inputs).loss):
        net.zero_grad()
        loss = compute(net, dict(batch))
        loss.backward()
        results.append((loss.detach(), [param.grad for param in net.parameters() if param.requires_grad]))
    (loss, grads), (own_loss, own_grads) = results
    torch.testing.assert_close(loss, own_loss)
    for grad, own_grad in zip(grads, own_grads, strict=True):
        torch.testing.assert_close(grad, own_grad, rtol=1e-4, atol=1e-6)


# --- Every trainer, as without the mixin --------------------------------------------------------------------------

VOCABULARY = 1000
PARTS = ("the old", "a new", "one"), ("cat", "dog", "hen"), ("sat", "ran", "ate", "hid")
LINES = [" ".join(parts) for parts in product(*PARTS)]
ROWS = {
    "SFT": [{"prompt": "once upon a time " * 3, "completion": line} for line in LINES],
    "DPO": [{"prompt": "who? ", "chosen": line, "rejected": f"{line} too"} for line in LINES],
    "KTO": [{"prompt": "who? ", "completion": line, "label": n % 2 == 0} for n, line in enumerate(LINES)],
}
TRAINERS = {
    "SFT": ("SFT", {}),
    "SFT, with a loss of the model": ("SFT", {"loss_type": "nll"}),
    "SFT, dft": ("SFT", {"loss_type": "dft"}),
    "SFT, accumulated": ("SFT", {"gradient_accumulation_steps": 2}),
    "SFT, packed": ("SFT", {"packing": True, "max_length": 32}),
    "SFT, gemma2": ("SFT", {"kind": "gemma2"}),
    "SFT, granite": ("SFT", {"kind": "granite", "loss_type": "nll"}),  # TRL 1.9's own loss omits the scale
    "SFT, LoRA": ("SFT", {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM")}),
    "DPO": ("DPO", {}),
    "DPO, padding-free": ("DPO", {"padding_free": True, "max_length": None}),
    "DPO, smoothed": ("DPO", {"label_smoothing": 0.1, "gradient_accumulation_steps": 2}),
    "DPO, two losses": ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "DPO, gemma2": ("DPO", {"kind": "gemma2"}),
    "DPO, LoRA": ("DPO", {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM")}),
    "KTO": ("KTO", {}),
    "KTO, tied": ("KTO", {"tied": True}),
}


class Rows(TorchDispatchMode):
    """The most rows of a matrix of logits that exist at a time."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.shape[-1:] == (VOCABULARY,) and not tensor.is_meta:
                self.most = max(self.most, tensor.untyped_storage().nbytes() // (4 * VOCABULARY))
        return result


@pytest.mark.parametrize("case", TRAINERS)
def test_a_trainer_logs_and_learns_what_it_does_without_the_mixin(case, tokenizer, tmp_path):
    name, options = TRAINERS[case]
    try:
        cls, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    except RuntimeError as error:
        pytest.skip(f"TRL has no {name} trainer here: {str(error).splitlines()[-1]}")
    options = dict(options)
    kind, tied, peft_config = options.pop("kind", "llama"), options.pop("tied", False), options.pop("peft_config", None)
    if unknown := options.keys() - config.__dataclass_fields__:
        pytest.skip(f"this TRL has no {unknown}")
    runs = []
    for mixin in (False, True):
        args = config(
            **{
                "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 12, "learning_rate": 1e-2,
                "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": False,
                "adam_epsilon": 1e-2, "max_grad_norm": 0.0, "dataloader_pin_memory": False, **options,
            }
        )  # fmt: skip
        sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "pad_token_id": 0}
        keywords = {"layers": LayersConfig(head_memory="64KiB")} if mixin else {}
        if name != "SFT" and peft_config is None:
            keywords["ref_model"] = small(kind, **sizes)
        try:
            trainer = (type("Fused", (FusedTrainerMixin, cls), {}) if mixin else cls)(
                small(kind, **sizes), args=args, train_dataset=Dataset.from_list(ROWS[name]),
                processing_class=tokenizer, peft_config=peft_config, **keywords,
            )  # fmt: skip
        except AttributeError as error:
            pytest.skip(f"this TRL cannot train a model of this transformers: {error}")
        with Rows() as rows:
            trainer.train()
        logs = [{k: v for k, v in entry.items() if "time" not in k} for entry in trainer.state.log_history[:3]]
        runs.append((logs, [*trainer.model.parameters()], rows.most))
    (theirs, ordinary, all_rows), (mine, fused, some_rows) = runs
    for one, other in zip(fused, ordinary, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for entry, own in zip(mine, theirs, strict=True):
        rounded = 1.1e-4 if own["loss"] == round(own["loss"], 4) else 1e-5  # transformers 4 logs four digits
        assert {k: entry[k] for k in own} == pytest.approx(own, rel=1e-5, abs=rounded)
    assert some_rows <= 128  # of which TRL before 1.15 computes the entropy
    assert all_rows > 128 or cls is trl.SFTTrainer  # whose own loss may be computed in chunks


def test_logits_are_ordinary_tensors_wherever_a_trainer_returns_them(make, matrices):
    """As metrics and generation read them."""
    trainer, seen = make(max_steps=1, loss_type="nll", per_device_eval_batch_size=4), []
    trainer.preprocess_logits_for_metrics = lambda logits, labels: (seen.append(logits), logits)[1]
    trainer.compute_metrics = lambda found: {"shape": found.predictions.shape[0]}
    trainer.train()
    read = len(matrices)
    assert trainer.evaluate(trainer.train_dataset)["eval_shape"] == len(trainer.train_dataset)
    ids = torch.tensor([[5, 6, 7]], device=trainer.model.device)
    logits = trainer.model(input_ids=ids).logits
    assert {type(value) for value in (*seen, logits)} == {torch.Tensor}
    assert trainer.model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 6)
    assert len(matrices) == read
    assert type(trainer.model.lm_head) is torch.nn.Linear


# --- What is refused ----------------------------------------------------------------------------------------------

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
