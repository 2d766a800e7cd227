"""8-bit states and residuals on one device: the codes of finished gradients in every loop, and a format per group."""

import pytest
import torch
from support.attack import DYNAMIC, Settings, compare
from support.nets import assert_same, states
from support.products import in_turn

import lowmem

BF16 = torch.bfloat16
EIGHT_BITS = {"rule": "adamw", "state_storage": "8bit", "rounding": "compensated8"}
FORMATS = {
    "8bit": EIGHT_BITS,
    "stochastic": {**EIGHT_BITS, "rounding": "stochastic"},
    "to nearest": {**EIGHT_BITS, "state_storage": "8bit_nearest"},
    "lion": {**EIGHT_BITS, "rule": "lion", "state_storage": "8bit_64"},
    "scaled_adam": {**EIGHT_BITS, "rule": "scaled_adam"},
    "lans": {**EIGHT_BITS, "rule": "lans"},
}
FLOAT32 = {"dtype": torch.float32}  # plain PyTorch rounds 16-bit gradients that are clipped or accumulated
LOOPS = {
    "two passes": {"policy": "two_pass"},
    "on the host": {"policy": "deferred", "store": "host"},
    "on the device": {"policy": "deferred", "store": "device"},
    "frozen and trained again": {"events": ((1, "freeze"), (3, "thaw"))},
    "resumed": {"events": ((2, "save"),)},
    "a group that joins": {"late": True, "events": ((1, "add group"),)},
    "clipped": {**FLOAT32, "clip_norm": 0.5, "policy": "two_pass"},
    "clipped and accumulated": {**FLOAT32, "clip_norm": 0.5, "accumulation": 2},
    "an overflow": {**FLOAT32, "policy": "deferred", "loss_scale": DYNAMIC, "events": ((1, "overflow"),)},
}


@pytest.mark.parametrize(("name", "loop"), in_turn(FORMATS, LOOPS))
def test_loops_have_the_codes_of_finished_gradients(name, loop):
    """As in plain PyTorch, whose gradients are given to the rule one by one: also of a tied weight."""
    usual = {"dtype": BF16, "hidden": 192, "blocks": 2, "tied": True, "steps": 4}
    compare(Settings(**{**usual, **FORMATS[name], **LOOPS[loop]}))


def test_groups_have_separate_formats(give_gradients):
    """Several rules and formats in one optimizer are the optimizers of each."""
    kinds = [
        EIGHT_BITS,
        {"rule": "lion", "lr": 1e-3, "state_storage": "8bit_64", "rounding": "compensated"},
        {"rule": "adalomo", "lr": 1e-2, "rounding": "compensated8"},
        {"rule": "adamw", "lr": 1e-2, "state_storage": "float32", "rounding": "stochastic"},
        {"rule": "adamw", "lr": 1e-2, "state_storage": "8bit_nearest", "rounding": "nearest"},
    ]
    start = [torch.randn(64, 64).to(BF16) for _ in kinds]
    together, apart = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    groups = [{"params": [(f"w{n}", p)], **kind} for n, (p, kind) in enumerate(zip(together, kinds, strict=True))]
    one = lowmem.FusedOptimizer(groups)
    many = [lowmem.FusedOptimizer([(f"w{n}", p)], **kind) for n, (p, kind) in enumerate(zip(apart, kinds, strict=True))]
    for _ in range(3):
        grads = [torch.randn(64, 64).to(BF16) for _ in kinds]
        give_gradients(one, *zip(together, grads, strict=True))
        for opt, *pair in zip(many, apart, grads, strict=True):
            give_gradients(opt, pair)
    assert all(map(torch.equal, together, apart))
    assert_same(states(one), {key: value for opt in many for key, value in states(opt).items()})
    assert states(one)["w0/exp_avg_sq"].dtype == torch.uint8 and states(one)["w3/exp_avg_sq"].dtype == torch.float32
    assert states(one)["w1/exp_avg.scale"].shape == (64, 1)
