"""Every trainer of transformers and TRL with the mixin: the losses and weights of the trainer without it."""

import pytest
import torch
import transformers
import trl
from support import trainers as builders
from support.products import FULL
from support.trl_on_cpus import TRAINS_ON_GPUS_ALONE

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
def test_training_is_the_trainers_own_to_the_last_bit(row, policy, tmp_path):
    if row == "Distillation" and TRAINS_ON_GPUS_ALONE:
        pytest.skip("this TRL distills on a GPU alone")
    runs = []
    for mixin in (False, True):
        trainer = builders.build(row, tmp_path, mixin, **WAYS[policy])
        start = [param.detach().clone() for param in trainer.model.parameters()]
        trainer.train()
        runs.append(([entry for entry in trainer.state.log_history if "loss" in entry], [*trainer.model.parameters()]))
    (expected, ordinary), (logs, fused) = runs
    replays = "reentrant" not in trainer.optimizer.policy_reason  # the default of activation checkpointing, before 5.0
    assert trainer.optimizer.policy == (policy if replays or policy != "two_pass" else "deferred")
    assert all(torch.equal(a, b) for a, b in zip(ordinary, fused, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(start, fused, strict=True))
    for actual, entry in zip(logs, expected, strict=True):
        timed = {name for name in entry if "time" in name}
        norm = {"grad_norm"} if policy == "immediate" else set()  # summed over tiles, and over full tensors
        assert {k: actual[k] for k in entry.keys() - timed - norm} == {k: entry[k] for k in entry.keys() - timed - norm}
        if "grad_norm" in entry:  # before transformers 5 it is logged where it is clipped
            assert actual["grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("policy", ["immediate", "deferred"])
@pytest.mark.parametrize("row", ["SFT", "SFT, dft loss", "DPO", "KTO", "GRPO"])
def test_training_with_computed_gradients_is_the_trainers_own(row, policy, tmp_path):
    """The head's own sums: losses to 1e-5, and weights as near as AdamW keeps them, which divides by small numbers."""
    runs = []
    for mixin in (False, True):
        keywords = {"layers": LayersConfig()} if mixin else {}
        trainer = builders.build(row, tmp_path, mixin, keywords, max_steps=2, **WAYS[policy])
        trainer.train()
        logs = [{k: v for k, v in entry.items() if "time" not in k} for entry in trainer.state.log_history[:2]]
        runs.append((logs, [*trainer.model.parameters()]))
    (expected, ordinary), (logs, fused) = runs
    for one, other in zip(fused, ordinary, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    for entry, own in zip(logs, expected, strict=True):
        assert {k: entry[k] for k in own} == pytest.approx(own, rel=1e-4, abs=1e-5)


def test_no_trainer_is_left_out():
    if not hasattr(trl, "DistillationTrainer"):
        pytest.skip("this TRL has other trainers")
    built = {builders.ROWS[row]()[0] for row in builders.ROWS}
    assert {name for name in dir(trl) if name.endswith("Trainer")} == {
        c.__name__ for c in built if hasattr(trl, c.__name__)
    }
    assert {transformers.Trainer, transformers.Seq2SeqTrainer} <= built
