"""Every trainer of transformers and TRL with the mixin: the losses and weights of the trainer without it."""

import pytest
import torch
import transformers
import trl
from support import trainers as builders
from support.products import FULL
from support.trainers import assert_same_run, both, losses

from lowmem.layers.config import LayersConfig

# Each row in one of these ways, in turn; with LOWMEM_FULL in all of them.
WAYS = {
    "two_pass": {"max_grad_norm": 0.1},
    "deferred": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2},
    "immediate": {"max_grad_norm": 0.0},
}
ON_A_CPU = pytest.mark.cpu_only("auto takes two passes on a CPU only")
CASES = [
    pytest.param(row, way, marks=ON_A_CPU if way == "two_pass" else ())
    for n, row in enumerate(builders.ROWS)
    for m, way in enumerate(WAYS)
    if FULL or n % len(WAYS) == m
]


@pytest.mark.parametrize(("row", "policy"), CASES)
def test_training_equals_the_plain_trainer_bit_for_bit(row, policy, tmp_path):
    start = [param.detach().clone() for param in builders.build(row, tmp_path, True).model.parameters()]
    ordinary, fused = both(lambda mixin: builders.build(row, tmp_path, mixin, **WAYS[policy]))
    replays = "reentrant" not in fused.optimizer.policy_reason  # the default of activation checkpointing, before 5.0
    assert fused.optimizer.policy == (policy if replays or policy != "two_pass" else "deferred")
    assert not all(map(torch.equal, start, fused.model.parameters()))
    for trainer in (ordinary, fused):
        trainer.state.log_history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert_same_run(fused, ordinary, ("grad_norm",) if policy == "immediate" else ())  # summed over tiles


@pytest.mark.parametrize("policy", ["immediate", "deferred"])
@pytest.mark.parametrize("row", ["SFT, dft loss", "GRPO"])
def test_training_with_computed_gradients_equals_the_plain_trainer(row, policy, tmp_path):
    """The head's own sums: losses to 1e-5, and weights as near as AdamW keeps them, which divides by small numbers."""

    def make(mixin):
        keywords = {"layers": LayersConfig()} if mixin else {}
        return builders.build(row, tmp_path, mixin, keywords, max_steps=2, **WAYS[policy])

    ordinary, fused = both(make)
    for one, other in zip(fused.model.parameters(), ordinary.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert losses(fused) == pytest.approx(losses(ordinary), rel=1e-4, abs=1e-5)


def test_no_trainer_is_left_out():
    if not hasattr(trl, "DistillationTrainer"):
        pytest.skip("this TRL has other trainers")
    built = {builders.ROWS[row]()[0] for row in builders.ROWS}
    assert {name for name in dir(trl) if name.endswith("Trainer")} == {
        c.__name__ for c in built if hasattr(trl, c.__name__)
    }
    assert {transformers.Trainer, transformers.Seq2SeqTrainer} <= built
