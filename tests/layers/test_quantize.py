"""Quantized models train on one device with every rule and policy."""

import copy
import itertools

import pytest
import torch
from support.compiled import compiles
from support.products import FULL, in_turn
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import lowmem
from lowmem.hf import checkpoint, weights
from lowmem.run.memory import step_memory
from lowmem.tiles import quantized, stored
from lowmem.tiles.quantized import QuantizedWeight, tensors_of

RULES = {
    "adalomo": {"rule": "adalomo"},
    "lion": {"rule": "lion"},
    "lans": {"rule": "lans"},
    "scaled_adam": {"rule": "scaled_adam", "size_update_period": 2},
    "adafactor": {"rule": "adafactor"},
    "adafactor_t2t": {"rule": "adafactor_t2t"},
    "8-bit states": {"rule": "adamw", "state_storage": "8bit"},
    "two rules": {"rule": "adalomo", "groups": [{"match": "mlp", "rule": "lion"}]},
}


@pytest.fixture
def llama(tiny_llama):
    """Returns a factory of small models. Matrices have at least 4,096 elements and rows of complete groups."""

    def make(weight_format=None, **config):
        sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, **config}
        model = tiny_llama(torch.bfloat16, num_key_value_heads=4, **sizes)
        return model if weight_format is None else lowmem.quantize_(model, weight_format)

    return make


def train(model, batches, accumulation=1, **options):
    opt = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-2, **options)
    for n, batch in enumerate(batches):
        if (n + 1) % accumulation:
            with opt.accumulate():
                opt.backward(model(**batch).loss)
        else:
            opt.backward(model(**batch).loss)
    return opt


def assert_same(model, other):
    for (name, param), again in zip(model.named_parameters(), other.parameters(), strict=True):
        for mine, theirs in zip(tensors_of(param), tensors_of(again), strict=True):
            assert torch.equal(mine, theirs), name


def changed_weights(model, like):
    return sum(
        not torch.equal(a.parts[0], b.parts[0])
        for a, b in zip(model.parameters(), like.parameters(), strict=True)
        if isinstance(a, QuantizedWeight)
    )


@pytest.mark.parametrize("options", RULES.values(), ids=RULES)
def test_every_rule_updates_all_quantized_weights_and_the_loss_falls(llama, token_batches, options):
    model = llama("int10")
    batch = token_batches(1)[0]
    before = model(**batch).loss.item()
    opt = train(model, [batch] * 4, **options)
    assert model(**batch).loss.item() < before
    assert changed_weights(model, llama("int10")) == 2 + 2 * 7
    assert 0 < opt.last_step.changed_share <= 1


def test_a_weight_stays_tied_to_an_attribute_of_another_module():
    net = nn.Module()
    net.embedding, net.loss = nn.Embedding(97, 64), nn.Module()
    net.loss.head = net.embedding.weight
    lowmem.quantize_(net, "int8")
    assert isinstance(net.embedding.weight, QuantizedWeight)
    assert net.loss.head is net.embedding.weight
    lowmem.dequantize_(net)
    assert net.loss.head is net.embedding.weight


@pytest.mark.parametrize("tokens", [(4, 16), (2, 5)], ids=str)  # first: as many as a weight has rows and columns
def test_activation_checkpointing_measures_the_gradients_of_ordinary_weights(llama, token_batches, tokens):
    norms = []
    for reentrant, model in (
        (False, lowmem.dequantize_(llama("int12"))),
        (False, llama("int12")),
        (True, llama("int12")),
    ):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        norms.append(train(model, token_batches(1, tokens), rule="lomo", clip_norm=0.1).last_step.grad_norm)
    torch.testing.assert_close(norms[1:], norms[:1] * 2, rtol=1e-5, atol=0)


@compiles
@pytest.mark.parametrize(("weight_format", "rule"), [("int10", "lion"), *([("int12", "adalomo")] if FULL else [])])
def test_compiled_code_gives_the_same_bits(weight_format, rule):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = lowmem.quantize_(nn.Linear(192, 160, bias=False).bfloat16(), weight_format)
        opt = lowmem.FusedOptimizer(model.named_parameters(), rule, lr=1e-2, compile=compiled)
        for n in range(3):
            torch.manual_seed(n)
            opt.backward(model(torch.randn(8, 192).bfloat16()).float().square().mean())
        results.append(model)
    assert_same(*results)


@pytest.mark.parametrize(("options", "tied"), [(RULES["8-bit states"], False), (RULES["adalomo"], True)], ids=str)
def test_resumed_bit_for_bit_from_files_that_transformers_reads(llama, token_batches, options, tied, tmp_path):
    batches = token_batches(6)
    model = llama("int12", tie_word_embeddings=tied)
    opt = train(model, batches[:3], **options)
    weights.save_weights(model, tmp_path)
    checkpoint.save_optimizer(opt, tmp_path / "optimizer.safetensors")
    other = llama("int12", tie_word_embeddings=tied)
    weights.load_weights(other, tmp_path)
    resumed = lowmem.FusedOptimizer(other.named_parameters(), lr=9.0, **options)
    checkpoint.load_optimizer(resumed, tmp_path / "optimizer.safetensors")
    assert_same(model, other)
    for batch in batches[3:]:
        opt.backward(model(**batch).loss)
        resumed.backward(other(**batch).loss)
    assert_same(model, other)
    shown = type(model).from_pretrained(tmp_path, dtype="auto")  # the model after three steps, in bfloat16
    assert {param.dtype for param in shown.parameters()} == {torch.bfloat16}
    loaded = llama(tie_word_embeddings=tied)
    weights.load_weights(loaded, tmp_path)
    assert_same(shown, loaded)


class Experts(nn.Module):
    """Two experts in the layout of transformers."""

    num_experts = 2

    def __init__(self, size):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(2, size, size) / size**0.5)

    def forward(self, x):
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
        grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch 2.9 has the second
        return grouped_mm(x, self.up_proj.transpose(-2, -1), offs=ends)


@pytest.mark.cpu_only("a GPU has larger tiles")
@pytest.mark.parametrize(
    ("kind", "experts"), in_turn([("int8", 1.07), ("int10", 1.32), ("int12", 1.57)], [True, False])
)
def test_bytes_in_a_real_step(kind, experts, monkeypatch):
    """Checks bytes per parameter of weights and AdaLomo's states. The peak adds no more than one bfloat16 gradient or
    matrix, or for experts one gradient and their dequantized stack.
    """
    torch.manual_seed(0)
    (weight_format, most), block = kind, 1 << 12
    monkeypatch.setattr(stored, "CPU_TILE", block)
    monkeypatch.setattr(quantized, "CPU_BLOCK", block)
    layers = [
        nn.Embedding(512, 256),
        *(nn.Linear(256, 256, bias=False) for _ in range(6)),
        *[Experts(256)] * experts,
        nn.Linear(256, 512, bias=False),
    ]
    model = lowmem.quantize_(nn.Sequential(*layers).bfloat16(), weight_format)
    ids = torch.arange(8)
    memory = step_memory(
        model, lambda: lowmem.FusedOptimizer(model.named_parameters(), lr=1e-2, compile=False),
        [lambda: model(ids).float().square().mean()], [ids],
    )  # fmt: skip
    count = sum(param.numel() for param in model.parameters())
    assert (memory.items["weights"] + memory.items["optimizer states"]) / count <= most
    largest = 512 * 256
    # a gradient or a matrix in bfloat16; some float32 copies of one block; activations
    assert memory.peak <= most * count + (1 + experts) * 2 * largest + 12 * 4 * block + (64 << 10)
    assert memory.largest_gradient == 2 * largest


SMALL = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
FEW = {**SMALL, "num_key_value_heads": 4, "num_experts_per_tok": 2}
MODELS = {
    "experts": lambda how: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**FEW, num_experts=4, moe_intermediate_size=64, experts_implementation=how)
    ),
    "experts by columns": lambda how: GptOssForCausalLM(
        GptOssConfig(**FEW, num_local_experts=4, intermediate_size=64, experts_implementation=how)
    ),
    "experts in a batch": lambda how: Llama4ForCausalLM(
        Llama4TextConfig(**FEW, num_local_experts=4, intermediate_size=64, intermediate_size_mlp=128, pad_token_id=0)
    ),
    "Conv1D": lambda how: GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    ),
}


@pytest.mark.parametrize(
    ("model", "how"),
    [
        *itertools.product(["experts", "experts by columns"], ["grouped_mm", "eager"]),
        *itertools.product(["experts in a batch", "Conv1D"], [None]),
    ],
)
def test_experts_and_layers_of_other_models(model, how, tmp_path):
    torch.manual_seed(0)
    net = MODELS[model](how).bfloat16().eval()
    every = {name for name, param in net.named_parameters() if param.ndim > 1 and param.numel() >= 4096}
    lowmem.quantize_(net, "int12")
    assert {name for name, param in net.named_parameters() if isinstance(param, QuantizedWeight)} == every
    plain = lowmem.dequantize_(copy.deepcopy(net))
    batch = {"input_ids": torch.arange(32).view(1, -1), "labels": torch.arange(32).view(1, -1)}
    assert torch.equal(net(**batch).loss, plain(**batch).loss)
    before = net(**batch).loss.item()
    train(net, [batch] * 6)
    assert net(**batch).loss.item() < before - 0.2
    weights.save_weights(net, str(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(lowmem.dequantize_(net), again)


def test_only_large_trained_matrices_are_quantized(llama):
    names = [name for name, p in llama("int8").named_parameters() if isinstance(p, QuantizedWeight)]
    assert len(names) == 2 + 2 * 7
    model = lowmem.quantize_(llama(), "int8", skip=["lm_head", "model.layers.0", "*.up_proj"])
    names = [name for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)]
    assert len(names) == 1 + 6
    assert not any("layers.0." in name or "up_proj" in name for name in names)
    tied = lowmem.quantize_(llama(tie_word_embeddings=True), "int8", skip=["lm_head"])
    assert not isinstance(tied.model.embed_tokens.weight, QuantizedWeight)
    small = lowmem.quantize_(nn.Linear(64, 32), "int8")
    assert not isinstance(small.weight, QuantizedWeight)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weight_format": "int11"}, "Did you mean 'int12'"),
        ({"weight_format": "int8", "group": 48}, "power of two"),
        ({"weight_format": "int8", "group": 128}, "embed_tokens.weight of shape \\[97, 64\\]"),
        ({"weight_format": "int8", "skip": ["lm_heads"]}, "Did you mean 'lm_head'"),
    ],
)
def test_a_wrong_argument_raises_and_changes_nothing(llama, arguments, words):
    model = llama()
    with pytest.raises(lowmem.LowmemError, match=words):
        lowmem.quantize_(model, **arguments)
    assert not any(isinstance(param, QuantizedWeight) for param in model.parameters())


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_hooks_raises(llama, register):
    """The hooks would no longer be called."""
    model = llama()
    getattr(model.lm_head.weight, register)(lambda _: None)
    with pytest.raises(lowmem.LowmemError, match=r"lm_head\.weight has hooks.*after quantize_"):
        lowmem.quantize_(model, "int12")
    lowmem.quantize_(model, "int12", skip=["lm_head"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounding": "nearest"}, "would lose most updates.*Omit rounding"),
        ({"rounding": "compensated"}, "Omit rounding"),
        ({"rule": torch.optim.AdamW}, "Use a rule of lowmem"),
        ({"weight_format": "int8"}, "lowmem.quantize_\\(model, 'int8'\\)"),
    ],
)
def test_options_that_cannot_update_quantized_weights_raise(llama, options, words):
    with pytest.raises(lowmem.LowmemError, match=words):
        lowmem.FusedOptimizer(llama("int8").named_parameters(), **options)


def test_loading_a_different_format_raises(llama, token_batches):
    opt = train(llama("int12"), token_batches(1))
    for model in (llama("int8"), llama()):
        other = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-2)
        with pytest.raises(lowmem.LowmemError, match="codes"):
            other.load_state_dict(opt.state_dict())
