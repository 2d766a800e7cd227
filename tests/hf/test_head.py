"""Trainers compute logits in tiles. Losses and weights are the same as with the model's own logits."""

from itertools import product

import peft
import pytest
import torch
import trl
from datasets import Dataset
from support.nets import weights
from support.products import FULL
from support.trainers import both, fused, losses, quiet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import lowmem
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.options import LayersConfig
from lowmem.trainer import FusedSFTTrainer, FusedTrainer
from scripts.make_model import train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Expected a tensor")

add_fused_lm_head = getattr(trl.trainer.utils, "add_fused_lm_head", None)
needs_trls_head = pytest.mark.skipif(add_fused_lm_head is None, reason="this TRL has no fused head")

# --- In TRL's trainer ---------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer():
    return train_tokenizer(["some words to learn from, and some more of them"], 270)


@pytest.fixture
def make(tiny_llama, tokenizer, tmp_path):
    """Returns a factory of trainers on rows of equal length. Keyword arguments are training arguments."""
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 97, (24, 12)).tolist()])

    def factory(cls=FusedSFTTrainer, model=None, fused=None, layers=None, **arguments):
        options = {"processing_class": tokenizer} if cls is FusedSFTTrainer else {}
        usual = quiet(
            tmp_path, max_steps=3, per_device_train_batch_size=4, max_grad_norm=0.0, gradient_checkpointing=False
        )
        net = model or tiny_llama(tie_word_embeddings=True)
        args = trl.SFTConfig(**usual | arguments)
        return cls(net, args=args, train_dataset=rows, fused=fused, layers=layers, **options)

    return factory


# --- Heads of all kinds -------------------------------------------------------------------------------------------

VOCABULARY = 1024
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "sep_token_id": 1, "bos_token_id": 2, "cls_token_id": 2}
GROUPED, TIED = {"num_key_value_heads": 4}, {"tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
KINDS = {
    "llama": {},
    "gemma2": TIED | {"head_dim": 8, "final_logit_softcapping": 5.0},
    "mixtral": GROUPED | EXPERTS | {"num_local_experts": 4},
    "cohere": TIED | {"logit_scale": 4.0},
    # TRL's fused head ignores a layer before the matrix and logit caps with unusual names
    "modernbert-decoder": TOKENS,
    "xlstm": {"num_heads": 4, "num_blocks": 1},
    "falcon": {},
}


def small(kind):
    """Creates a small model of the given type."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "pad_token_id": 0}
    dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout")
    options = {**sizes, **dict.fromkeys(dropout, 0.0), **KINDS[kind]}
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    except Exception as error:  # some versions reject the defaults of a configuration
        if "rope_parameters" not in str(error):
            raise
        pytest.skip(f"this version of transformers refuses its own configuration of {kind}")


class Doubled(torch.nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_models_train_the_same_with_computed_logits(kind, make, matrices):
    """The models differ before and after the matrix. With SGD, weights differ by as much as their gradients."""
    trainers = []
    kinds = (FusedTrainer, LayersConfig(computed_gradients=False)), (FusedSFTTrainer, None)
    for cls, layers in kinds:
        assert not matrices or add_fused_lm_head is None
        net = small(kind)
        if kind == "falcon":
            net.lm_head.__class__ = Doubled
        try:
            trainer = make(cls, net, lowmem.FusedConfig(rule="lomo"), layers, learning_rate=0.1)
            trainer.train()
        except Exception as error:
            if "a second time" not in str(error) and "rope_parameters" not in str(error):
                raise
            pytest.skip(f"this transformers cannot train or save a {kind}: {error}")
        trainers.append(trainer)
    ordinary, tiled = trainers
    assert losses(tiled) == pytest.approx(losses(ordinary), rel=1e-4)
    torch.testing.assert_close(weights(tiled.model), weights(ordinary.model), rtol=1e-4, atol=1e-5)
    assert not matrices or add_fused_lm_head is None  # the matrix is computed for the entropy


LORA = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "LoRA and a trained head": peft.LoraConfig(modules_to_save=["lm_head"], **LORA),
    "LoRA on the head": peft.LoraConfig(**{**LORA, "target_modules": ["lm_head"]}),
    "rows of a tied head": peft.LoraConfig(trainable_token_indices=[1, 5], **LORA),
    "prompts": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_loss_of_adapters_equals_the_loss_of_the_model(name, make, tiny_llama):
    """Prompts come before the first layer. A head with an adapter is not changed."""
    net = peft.get_peft_model(tiny_llama(tie_word_embeddings=name == "rows of a tied head"), ADAPTERS[name])
    for param in net.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.1)
    try:
        trainer = make(model=net, loss_type="nll")  # TRL's other loss does not train some of these
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
    (loss, grads), (plain_loss, plain_grads) = results
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(grads, plain_grads, rtol=1e-4, atol=1e-6)


# --- Every trainer, as without the mixin --------------------------------------------------------------------------

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
    "SFT, clipped in two passes": ("SFT", {"max_grad_norm": 0.5}),
    "SFT, clipped and accumulated": ("SFT", {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}),
    "SFT, selective checkpointing": ("SFT", {"gradient_checkpointing_kwargs": {"selective": True}}),
    "SFT, packed": ("SFT", {"packing": True, "max_length": 32}),
    "SFT, LoRA": ("SFT", {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM")}),
    "DPO": ("DPO", {}),
    "DPO, padding-free": ("DPO", {"padding_free": True, "max_length": None}),
    "DPO, smoothed": ("DPO", {"label_smoothing": 0.1, "gradient_accumulation_steps": 2}),
    "DPO, two losses": ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "KTO": ("KTO", {}),
}
RARE = {
    "SFT, with a loss of the model", "SFT, clipped in two passes", "SFT, selective checkpointing", "DPO, padding-free",
    "DPO, smoothed",
}  # fmt: skip


class Rows(TorchDispatchMode):
    """Records the largest number of rows of logits that exist at the same time."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.shape[-1:] == (VOCABULARY,) and not tensor.is_meta:
                self.most = max(self.most, tensor.untyped_storage().nbytes() // (4 * VOCABULARY))
        return result


@pytest.mark.parametrize("case", [case for case in TRAINERS if FULL or case not in RARE])
def test_a_trainer_logs_and_learns_as_without_the_mixin(case, tokenizer, tmp_path):
    name, options = TRAINERS[case]
    try:
        cls, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    except RuntimeError as error:
        pytest.skip(f"TRL has no {name} trainer here: {str(error).splitlines()[-1]}")
    options = dict(options)
    peft_config = options.pop("peft_config", None)
    if unknown := options.keys() - config.__dataclass_fields__:
        pytest.skip(f"this TRL has no {unknown}")
    args = quiet(tmp_path, max_steps=2, per_device_train_batch_size=12, adam_epsilon=1e-2, max_grad_norm=0.0) | options
    keywords = {"processing_class": tokenizer, "peft_config": peft_config}
    rows = []

    def make(mixin):
        parts = {"layers": LayersConfig(head_memory="64KiB")} if mixin else {}
        if name != "SFT" and peft_config is None:
            parts["ref_model"] = small("llama")
        make_trainer = fused(cls) if mixin else cls
        data = Dataset.from_list(ROWS[name])
        try:
            trainer = make_trainer(small("llama"), args=config(**args), train_dataset=data, **keywords, **parts)
        except (AttributeError, ValueError) as error:
            if mixin:
                raise
            pytest.skip(f"this TRL cannot train a model of this transformers: {error}")
        train = trainer.train

        def counted():
            with Rows() as counter:
                try:
                    train()
                except ValueError as error:
                    if mixin:
                        raise
                    pytest.skip(f"this transformers does not have the option: {error}")
            rows.append(counter.most)

        trainer.train = counted
        return trainer

    ordinary, ours = both(make)
    torch.testing.assert_close(weights(ours.model), weights(ordinary.model), rtol=1e-5, atol=1e-6)
    for entry, plain in zip(ours.state.log_history[:2], ordinary.state.log_history[:2], strict=True):
        expected = {key: value for key, value in plain.items() if "time" not in key}
        assert {key: entry[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    all_rows, some_rows = rows
    assert some_rows <= 128  # TRL before 1.15 computes the entropy of these rows
    assert all_rows > 128 or cls is trl.SFTTrainer  # its own loss may be computed in chunks


SMOOTHED = {"label_smoothing_factor": 0.2, "learning_rate": 0.1, "loss_type": "nll"}


def test_smoothed_labels_equal_the_full_logits(make):
    """Hugging Face's LabelSmoother needs the full logits."""
    rule = lowmem.FusedConfig(rule="lomo")
    tensors, computed, plain = (
        make(model=small("llama"), fused=rule, layers=layers, **SMOOTHED | changes)
        for layers, changes in (
            (LayersConfig(computed_gradients=False), {}),
            (None, {}),
            (None, {"label_smoothing_factor": 0.0}),
        )
    )
    for trainer in (tensors, computed, plain):
        trainer.train()
    assert losses(computed) == pytest.approx(losses(tensors), rel=1e-4, abs=1e-6)
    scores = [trainer.evaluate(trainer.train_dataset)["eval_loss"] for trainer in (tensors, computed)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    torch.testing.assert_close(weights(computed.model), weights(tensors.model), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain.model.lm_head.weight, computed.model.lm_head.weight, rtol=1e-3, atol=1e-4)


@needs_trls_head
def test_an_entropy_loss_keeps_the_head_of_trl(tokenizer, tmp_path):
    """An entropy bonus needs a gradient of the entropy, which this package's head does not compute."""
    args = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none", max_completion_length=4)
    rows = Dataset.from_list([{"prompt": "some words"}] * 8)
    trainer = fused(trl.GRPOTrainer)(
        small("llama"), reward_funcs=len, args=args, train_dataset=rows, processing_class=tokenizer
    )
    ids = torch.randint(3, VOCABULARY, (1, 8)).to(trainer.model.device)
    output = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert output.entropy.requires_grad and output.log_probs.requires_grad


def test_logits_returned_by_a_trainer_are_ordinary_tensors(make, matrices):
    """Metrics and generation read the logits."""
    trainer, seen = make(max_steps=1, loss_type="nll", per_device_eval_batch_size=4), []
    trainer.preprocess_logits_for_metrics = lambda logits, labels: (seen.append(logits), logits)[1]
    trainer.compute_metrics = lambda prediction: {"shape": prediction.predictions.shape[0]}
    trainer.train()
    read = len(matrices)
    assert trainer.evaluate(trainer.train_dataset)["eval_shape"] == len(trainer.train_dataset)
    ids = torch.tensor([[5, 6, 7]], device=trainer.model.device)
    logits = trainer.model(input_ids=ids).logits
    assert {type(value) for value in (*seen, logits)} == {torch.Tensor}
    assert trainer.model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 6)
    assert len(matrices) == read
    assert type(trainer.model.lm_head) is torch.nn.Linear


# --- Unsupported options ------------------------------------------------------------------------------------------

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
def test_unsupported_options_raise_before_the_first_step(arguments, error, message, make):
    with pytest.raises(error, match=message):
        make(**arguments).create_optimizer()


@pytest.mark.parametrize(
    ("name", "value"), [("activation_offloading", True), ("gradient_checkpointing_kwargs", {"selective": True})]
)
def test_what_allows_one_backward_pass_raises_with_two(name, value, make):
    trainer = make(fused=TWICE)
    setattr(trainer.args, name, value)  # as on a GPU
    with pytest.raises(UnsupportedError, match=r"two_pass.*policy='deferred' or max_grad_norm=0, or offload with"):
        trainer.create_optimizer()
