"""Trainers whose gradients stop being finite, and ranks of a trainer that were not started alike."""

import json
import math
import os

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import TrainingArguments

import lowmem
from lowmem.errors import ConfigError, StepError
from lowmem.hf import agreement
from lowmem.layers.config import LayersConfig
from lowmem.options import FusedConfig

# -- gradients that are not finite -------------------------------------------------------------------------------------


def spoiling(trainer, spoilt):
    """The trainer, whose loss is NaN in the steps for which `spoilt` is true."""
    compute = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        loss = compute(*args, **kwargs)
        return loss * math.nan if spoilt(trainer.state.global_step + 1) else loss

    trainer.compute_loss = compute_loss
    return trainer


def steps_saved(folder):
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "save_only_model": False}


def test_nan_ends_the_run_and_keeps_the_good_checkpoints(make, tmp_path, caplog):
    fused = FusedConfig(rule="adamw", max_nonfinite_steps=3)
    trainer = spoiling(make(fused=fused, **SAVING), lambda step: step >= 4)
    with pytest.raises(StepError, match=r"the last 3 steps had gradients that are not finite.*the loss is not finite"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert steps_saved(tmp_path / "run") == [2, 3, 4, 5, 6]  # 2 and 3 are from before
    assert not (tmp_path / "run" / ".saving").exists()
    assert "no older checkpoint was removed when step 4 was saved: the last 1 step(s)" in caplog.text
    good = make(fused=fused, run="run", **SAVING)
    good.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert good.state.global_step == 8
    assert all(param.isfinite().all() for param in good.model.parameters())


def test_one_nan_is_a_skipped_step_and_old_checkpoints_go(make, tmp_path):
    trainer = spoiling(make(fused=FusedConfig(rule="adamw", max_nonfinite_steps=3), **SAVING), lambda step: step == 4)
    trainer.train()
    assert trainer.optimizer.nonfinite_steps == 1
    assert steps_saved(tmp_path / "run") == [7, 8]


def test_weights_alone_are_kept_too(make, tmp_path):
    """Without the optimizer's state nothing else asks how the last step ended."""
    options = {**SAVING, "save_only_model": True, "max_steps": 5}
    spoiling(make(**options), lambda step: step >= 4).train()
    assert steps_saved(tmp_path / "run") == [2, 3, 4, 5]


# -- ranks that were not started alike ---------------------------------------------------------------------------------


def started(rank, other, folder):
    """What rank 0 and rank 1 say of the facts of each, where rank 1 has `other` in place of its own."""
    arguments = {"output_dir": folder, "report_to": "none", "use_cpu": True, **other.get("arguments", {})}
    config = FusedConfig(**{"rule": "adamw", **other.get("fused", {})})
    samples, layers = [0] * other.get("samples", 40), LayersConfig(**other.get("layers", {}))
    facts = agreement.facts(TrainingArguments(**arguments), config, layers, samples, other.get("checkpoint"))
    try:
        agreement.check({**facts, **other.get("facts", {})})
    except ConfigError as error:
        return str(error)
    return None


def differently(rank, other, folder):
    with ranks_of_accelerate(rank):
        return started(rank, other if rank else {}, folder)


class ranks_of_accelerate:
    """The environment of a rank, in which Accelerate finds the group that exists."""

    def __init__(self, rank):
        self.variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        self.variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}

    def __enter__(self):
        self.before = dict(os.environ)
        os.environ |= self.variables

    def __exit__(self, *_):
        os.environ.clear()
        os.environ |= self.before
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


DIFFERENCES = {
    "samples": ({"samples": 41}, "number of training samples is 41 on rank 1 and 40 on rank 0"),
    "steps": ({"arguments": {"max_steps": 7}}, "max_steps is 7 on rank 1 and -1 on rank 0"),
    "batches": ({"arguments": {"per_device_train_batch_size": 3}}, "per_device_train_batch_size is 3 on rank 1"),
    "rule": ({"fused": {"rule": "lion"}}, r"optimizer\.rule is lion on rank 1 and adamw on rank 0"),
    "class": ({"fused": {"rule": torch.optim.SGD}}, r"optimizer\.rule is torch\.optim\.sgd\.SGD on rank 1"),
    "hyper": ({"fused": {"betas": (0.8, 0.9)}}, r"optimizer\.hyper is \{betas: \[0\.8, 0\.9\]\} on rank 1"),
    "layers": ({"layers": {"mlp_tile": 64}}, r"layers\.mlp_tile is 64 on rank 1 and None on rank 0"),
    "version": ({"facts": {"version of torch": "2.12"}}, "version of torch is 2.12 on rank 1"),
    "a fact of a later version": ({"facts": {"new": "1"}}, "new is 1 on rank 1 and nothing on rank 0"),
    "checkpoint": ({"checkpoint": "run/checkpoint-4"}, "checkpoint is checkpoint-4 on rank 1 and none on rank 0"),
    "many": ({"arguments": {"max_steps": 7, "seed": 1, "logging_steps": 3, "save_steps": 2}}, "; and 1 more"),
}


@pytest.mark.parametrize(("other", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_differs_is_named_on_every_rank(two, other, message, tmp_path):
    first, second = two.run(differently, other, str(tmp_path))
    assert first == second and len(first) < 600
    with pytest.raises(ConfigError, match="the ranks were not started alike: .*" + message):
        raise ConfigError(first)


@pytest.mark.parametrize(
    "other", [{}, {"fused": {"store": "disk", "store_dir": "/tmp"}, "facts": {"optimizer.store": "None"}}]
)
def test_what_may_differ(two, other, tmp_path):
    """Each node has directories of its own."""
    assert two.run(differently, other, str(tmp_path)) == [None, None]


def test_the_step_of_a_checkpoint_counts(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    facts = agreement.facts(args, FusedConfig(), LayersConfig(), iter([]), str(tmp_path))
    assert (facts["step of the checkpoint"], facts["number of training samples"]) == ("4", "unknown")


def test_rules_that_are_objects_are_compared_without_addresses(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    configs = [FusedConfig(rule=lowmem.rules.resolve("adamw")) for _ in range(2)]
    one, other = (agreement.facts(args, config, LayersConfig(), [], None) for config in configs)
    assert one == other and "0x" not in str(one)


def train_on(rank, folder, samples):
    """The error of a trainer's `train`, and how many steps it has taken; rank 1 has `samples` samples."""
    from builders import build

    with ranks_of_accelerate(rank):
        rows = build("causal language model", folder, True, use_cpu=True).train_dataset
        rows = (rows * 4)[: samples if rank else 12]
        keywords = {"train_dataset": rows}
        trainer = build("causal language model", folder, True, keywords, use_cpu=True, max_steps=2)
        try:
            trainer.train()
        except ConfigError as error:
            return str(error), trainer.state.global_step, trainer.optimizer
    return None, trainer.state.global_step, None


def test_trainers_with_other_data_take_no_step(two, tmp_path):
    for message, steps, last in two.run(train_on, str(tmp_path), 11):
        assert "number of training samples is 11 on rank 1 and 12 on rank 0" in message
        assert (steps, last) == (0, None)


def test_trainers_with_the_same_data_train(two, tmp_path):
    assert two.run(train_on, str(tmp_path), 12) == [(None, 2, None)] * 2
