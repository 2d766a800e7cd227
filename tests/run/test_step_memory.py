"""A step accounted for: tensors without data tell the same as real ones, and a tracker of PyTorch's agrees."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig

import lowmem
from lowmem.run.memory import ACTIVATIONS, GRADIENTS, STATES, WEIGHTS, step_memory

ROWS, TOKENS, VOCABULARY = 2, 24, 600

SETTINGS = {
    "adalomo": {"rule": "adalomo"},
    "adamw, float32": {"rule": "adamw", "dtype": torch.float32},
    "compensated": {"rule": "adalomo", "rounding": "compensated"},
    "clipped by norm": {"rule": "adalomo", "clip_norm": 1.0, "policy": "deferred"},
    "two passes": {"rule": "lomo", "clip_norm": 1.0, "policy": "two_pass"},
    "three micro-batches": {"rule": "adalomo", "micro_batches": 3},
    "tied": {"rule": "adalomo", "tied": True},
    "recomputed": {"rule": "adalomo", "recomputed": True},
}


def prepared(rule, *, dtype=torch.bfloat16, tied=False, recomputed=False, micro_batches=1, **settings):
    """The arguments of `step_memory` for a small Llama, made in the mode that is active."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if recomputed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    named = list(model.named_parameters())

    def optimizer():
        return lowmem.FusedOptimizer(named, rule=rule, lr=1e-3, compile=False, **settings)

    def loss():
        return model(input_ids=ids, labels=ids).loss

    return model, optimizer, [loss] * micro_batches, [ids]


@pytest.mark.parametrize("name", SETTINGS)
def test_without_data_as_with_it(name):
    """The peak, and what it consists of."""
    real = step_memory(*prepared(**SETTINGS[name]))
    with FakeTensorMode():
        dry = step_memory(*prepared(**SETTINGS[name]))
    assert dry.peak == pytest.approx(real.peak, rel=0.01)  # scalars come and go in other ways
    for kind in (WEIGHTS, STATES, GRADIENTS):
        assert dry.items[kind] == pytest.approx(real.items[kind], abs=64)
    assert dry.floor == pytest.approx(real.floor, abs=64)
    assert dry.items[ACTIVATIONS] == pytest.approx(real.items[ACTIVATIONS], rel=0.01, abs=64)


def test_as_mem_tracker_counts():
    """The peak of a second step, when states are there from its beginning."""
    told = step_memory(*prepared(**SETTINGS["adalomo"]))
    model, optimizer, (loss,), _ = prepared(**SETTINGS["adalomo"])
    opt, tracker = optimizer(), MemTracker()
    opt.backward(loss())
    tracker.track_external(model)
    with tracker:
        opt.backward(loss())
        tracker.reset_mod_stats()
        opt.backward(loss())
    counted = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert told.peak == pytest.approx(counted, rel=0.02)  # it rounds each storage up to 512 bytes


def test_items_are_the_peak():
    step = step_memory(*prepared(**SETTINGS["adamw, float32"]))
    weights = step.items[WEIGHTS]
    assert sum(step.items.values()) == step.peak
    assert step.items[STATES] == pytest.approx(2 * weights, rel=0.01)
    assert step.largest_gradient == VOCABULARY * 64 * 4
    assert step.during in ("forward", "backward")
    assert step.figures()["peak"] == step.peak


def test_recomputing_keeps_less():
    kept = step_memory(*prepared(**SETTINGS["adalomo"]))
    recomputed = step_memory(*prepared(**SETTINGS["recomputed"]))
    assert recomputed.items[ACTIVATIONS] < kept.items[ACTIVATIONS]
