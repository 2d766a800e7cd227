"""Rehearsals: three of `benchmarks.rehearsal` for a few steps, which ones there are, and the page of their results."""

import itertools
import json

import pytest
import torch

from benchmarks import rehearsal
from benchmarks.processes import MeasurementError
from benchmarks.rehearsal import AXES, REFUSED, Outcome, Rehearsal, combinations, rehearse

STEPS = 6
CHOSEN = (
    "SFT, untied, float32, as they come, AdaLomo, one process",
    "SFT, untied, bfloat16, accumulated, AdamW, 8-bit states, one process",
    "SFT, untied, float32, clipped, AdaLomo, FSDP2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    rehearsal.write_inputs(folder, STEPS, ["untied"], longest=96)
    return folder


@pytest.mark.parametrize("name", CHOSEN)
def test_a_real_run_equals_the_run_by_tiles_and_the_resumed_run(folder, name):
    outcome = rehearse(combinations(every=True)[name], STEPS, folder)
    assert outcome.outcome == "passed", outcome


def test_a_combination_that_is_not_supported_is_refused_before_its_first_step(folder):
    outcome = rehearse(combinations()["SFT, untied, int12, as they come, AdaLomo, ZeRO-3"], STEPS, folder)
    assert outcome.outcome == "refused" and "weight_format" in outcome.message


def trained(monkeypatch, weights, losses=(2.0, 1.0), log="compiled the optimizer in 1 s"):
    """Runs that write these weights and losses, in turn, instead of training."""
    runs = iter(zip(weights, losses if isinstance(losses[0], tuple) else [losses] * 3, strict=True))

    def execute(words, log_file, *args, **kwargs):
        run = rehearsal.Path(words[-1 if "--output_dir" in words[-1] else -2].partition("=")[2])
        (run / "checkpoint-2").mkdir(parents=True, exist_ok=True)
        log_file.write_text(log)
        weight, values = next(runs)
        rehearsal.write_file(run / "metrics.jsonl", "".join(json.dumps({"loss": n}) + "\n" for n in values).encode())
        save_file({"w": torch.tensor(weight)}, run / "model.safetensors")

    monkeypatch.setattr(rehearsal, "execute", execute)
