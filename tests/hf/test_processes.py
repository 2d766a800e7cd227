"""Ranks with different settings or without a shared disk raise an error before the first step."""

import re
from pathlib import Path

import pytest
from support.trainers import build, joined
from transformers import TrainerCallback, TrainingArguments

from lowmem import FusedConfig, LayersConfig
from lowmem.errors import ConfigError
from lowmem.hf import processes, version
from lowmem.step import report

CAUSAL = "causal language model"
DIFFERENCES = {  # the settings of rank 1 that differ from rank 0, and the message
    "samples": ({"samples": 41}, "the number of training samples is 40 on rank 0 and 41 on rank 1"),
    "steps": ({"arguments": {"max_steps": 7}}, "max_steps is -1 on rank 0 and 7 on rank 1"),
    "rule": ({"fused": {"rule": "lion"}}, "fused.rule is 'adamw' on rank 0 and 'lion' on rank 1"),
    "layers": ({"layers": {"mlp_tile": 64}}, "layers.mlp_tile is None on rank 0 and 64 on rank 1"),
    "version": ({"version": "5.0"}, f"the version of torch is '{version('torch')}' on rank 0 and '5.0'"),
    "data": ({"data": "5a"}, "the fingerprint of the tokenized training data is None on rank 0 and '5a' on rank 1"),
    "checkpoint": ({"checkpoint": "run/checkpoint-4"}, "the checkpoint is None on rank 0 and 'checkpoint-4' on rank 1"),
    "nothing": ({}, None),
}


def started(rank, other, folder):
    other = other if rank else {}
    arguments = {"output_dir": folder, "report_to": "none", "use_cpu": True, **other.get("arguments", {})}
    config = FusedConfig(**{"rule": "adamw", **other.get("fused", {})})
    samples, layers = other.get("samples", 40), LayersConfig(**other.get("layers", {}))
    checkpoint = Path(other["checkpoint"]) if "checkpoint" in other else None
    processes.version = lambda name: other.get("version", version(name))
    try:
        with joined(rank):
            processes.require_alike(
                TrainingArguments(**arguments), config, layers, samples, other.get("data"), checkpoint
            )
    except ConfigError as error:
        return str(error)
    finally:
        processes.version = version
    return None


@pytest.mark.parametrize(("other", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_every_rank_names_the_differences(two, other, message, tmp_path):
    first, second = two.run(started, other, str(tmp_path))
    assert first == second
    assert first is None if message is None else first.startswith(message)


def trained(rank, folder, samples, apart=False, save="no", order=1):
    """Returns the error of a trainer's `train` and the number of steps. Rank 1 has `samples` samples in `order`."""
    with joined(rank):
        rows = build(CAUSAL, folder, True, use_cpu=True).train_dataset
        rows = rows[:samples][::order] if rank else rows[:12]
        folder = f"{folder}/{rank}" if apart else folder
        options = {"use_cpu": True, "max_steps": 2, "save_strategy": save}
        trainer = build(CAUSAL, folder, True, {"train_dataset": rows}, **options)
        try:
            trainer.train()
        except ConfigError as error:
            return str(error), trainer.state.global_step
    return None, trainer.state.global_step


def test_trainers_with_different_data_take_no_step(two, tmp_path):
    for message, steps in two.run(trained, str(tmp_path), 11):
        assert re.match("the number of training samples is 12 on rank 0 and 11 on rank 1", message)
        assert steps == 0
    for message, steps in two.run(trained, str(tmp_path), 12, False, "no", -1):
        assert message.startswith("the fingerprint of the tokenized training data is ") and steps == 0
    assert two.run(trained, str(tmp_path), 12) == [(None, 2)] * 2


def test_machines_without_a_shared_disk_raise_if_they_save(two, tmp_path):
    """Rank 0 writes the checkpoints, and each rank reads them."""
    for message, steps in two.run(trained, str(tmp_path), 12, True, "steps"):
        assert message.startswith(
            "output_dir: the machines do not share this directory. Every rank resumes from the files"
        )
        assert steps == 0
    assert [*tmp_path.glob("*/.rank-*")] == []
    assert two.run(trained, str(tmp_path), 12, True) == [(None, 2)] * 2


class Nudge(TrainerCallback):
    """Changes one rank's weights slightly between two steps."""

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            model.lm_head.weight.data[3] *= 1.0001


def drifting(rank, folder, nudged):
    """Returns warnings about weights that differ between ranks."""
    with joined(rank), pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(report.logger, "warning", lambda message, *words: said.append(message % words))
        trainer = build(CAUSAL, folder, True, use_cpu=True, max_steps=5, logging_steps=1)
        if rank and nudged:
            trainer.add_callback(Nudge())
        trainer.train()
    return [message for message in said if "differ between ranks" in message]


@pytest.mark.parametrize("nudged", [False, True])
def test_weights_that_differ_between_replicas_are_noticed(two, tmp_path, nudged):
    """Every rank warns once."""
    for said in two.run(drifting, str(tmp_path), nudged):
        assert len(said) == nudged
        assert not nudged or said[0].startswith("after step 3, weights of 'lm_head.weight' differ between ranks")
