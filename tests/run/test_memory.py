"""Fake tensors, real tensors and PyTorch's MemTracker agree on the memory of a step. Also tests bytes of states."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig

import lowmem
from lowmem.run.memory import ACTIVATIONS, GRADIENTS, STATES, WEIGHTS, state_bytes, step_memory

ROWS, TOKENS, VOCABULARY = 2, 24, 600

SETTINGS = {
    "adalomo": {"rule": "adalomo"},
    "adamw, float32": {"rule": "adamw", "dtype": torch.float32},
    "adamw, 8 bits": {"rule": "adamw", "state_storage": "8bit", "rounding": "compensated8"},
    "clipped by norm": {"rule": "adalomo", "clip_norm": 1.0, "policy": "deferred"},
    "two passes": {"rule": "lomo", "clip_norm": 1.0, "policy": "two_pass"},
    "three micro-batches": {"rule": "adalomo", "micro_batches": 3},
    "recomputed": {"rule": "adalomo", "recomputed": True},
}


def step_arguments(rule, *, dtype=torch.bfloat16, recomputed=False, micro_batches=1, **options):
    """Returns arguments of `step_memory` for a small Llama, created under the active mode."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    named = list(model.named_parameters())

    def optimizer():
        return lowmem.FusedOptimizer(named, rule=rule, lr=1e-3, compile=False, **options)

    def loss():
        return model(input_ids=ids, labels=ids).loss

    return model, optimizer, [loss] * micro_batches, [ids]


@pytest.mark.parametrize("name", SETTINGS)
def test_fake_tensors_give_the_memory_of_real_ones(name):
    """Compares the peak and the bytes of each kind at the peak."""
    real = step_memory(*step_arguments(**SETTINGS[name]))
    with FakeTensorMode():
        fake = step_memory(*step_arguments(**SETTINGS[name]))
    assert fake.peak == pytest.approx(real.peak, rel=0.01)  # scalars are allocated differently
    for kind in (WEIGHTS, STATES, GRADIENTS):
        assert fake.items[kind] == pytest.approx(real.items[kind], abs=64)
    assert fake.items[ACTIVATIONS] == pytest.approx(real.items[ACTIVATIONS], rel=0.01, abs=64)


def test_mem_tracker_counts_the_same():
    """Measures the second step, so that the optimizer's states exist from the start."""
    step = step_memory(*step_arguments(**SETTINGS["adalomo"]))
    model, optimizer, (loss,), _ = step_arguments(**SETTINGS["adalomo"])
    opt, tracker = optimizer(), MemTracker()
    opt.backward(loss())
    tracker.track_external(model)
    with tracker:
        opt.backward(loss())
        tracker.reset_mod_stats()
        opt.backward(loss())
    counted = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert step.peak == pytest.approx(counted, rel=0.02)  # MemTracker rounds each storage up to 512 bytes


def test_items_sum_to_the_peak():
    step = step_memory(*step_arguments(**SETTINGS["adamw, float32"]))
    weights = step.items[WEIGHTS]
    assert sum(step.items.values()) == step.peak
    assert step.items[STATES] == pytest.approx(2 * weights, rel=0.01)
    assert step.largest_gradient == VOCABULARY * 64 * 4
    assert step.during in ("forward", "backward")
    assert step.figures()["peak"] == step.peak


@pytest.mark.parametrize(("rounding", "beside"), [("stochastic", 0), ("compensated8", 1), ("master", 4)])
@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("lomo", {}, 0),
        ("adalomo", {}, 2 * 64 * 4 / 64**2),
        (
            "adafactor",
            {"min_dim_size_to_factor": 64, "beta1": 0.9, "dtype_momentum": "bfloat16"},
            2 + 2 * 64 * 4 / 64**2,
        ),
        ("adafactor_t2t", {"beta1": 0.9}, 2 + 2 * 64 * 4 / 64**2),
        ("scaled_adam", {"state_storage": "float32"}, 8 + (8 + 4 + 4 + 4 * 4) / 64**2),
        ("adamw", {"state_storage": "float32"}, 8 + 8 / 64**2),
        ("adamw", {"state_storage": "bfloat16"}, 4 + 8 / 64**2),
        ("lion", {"state_storage": "float16"}, 2),
        ("adamw", {"state_storage": "8bit"}, 2 + 2 * 2 / 32 + 8 / 64**2),
        (torch.optim.SGD, {}, 0),
    ],
)
def test_state_bytes(rule, options, expected, rounding, beside):
    assert state_bytes(rule, rounding, size=64, **options) == expected + beside
