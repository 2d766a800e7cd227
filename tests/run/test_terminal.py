"""If the output is not a terminal, progress is printed as lines instead of bars."""

import time

import datasets
import pytest
from huggingface_hub.utils import tqdm as of_the_hub
from transformers.utils import logging

from lowmem.run import terminal


@pytest.fixture
def seconds(monkeypatch):
    """Sets the minimum time between two lines of a bar."""
    monkeypatch.setattr(terminal.err, "width", 200)
    with terminal.progress_in_lines(0.3):
        yield 0.3


def test_a_long_stage_prints_lines_with_its_rows(seconds, capsys):
    started = time.monotonic()
    datasets.Dataset.from_dict({"n": [*range(40)]}).map(
        lambda row: time.sleep(0.03), desc="Tokenizing", new_fingerprint="1"
    )
    lines = capsys.readouterr().err.splitlines()
    assert 0 < len(lines) <= (time.monotonic() - started) / seconds
    assert all(line.startswith("Tokenizing") and "/40 [" in line for line in lines)


@pytest.mark.parametrize("library", [of_the_hub, logging.tqdm])
def test_bars_of_downloads_and_of_weights(library, seconds, capsys):
    """Some bars refresh at every update, and others are shown depending on their output file."""
    with library(total=4000, desc="model.safetensors", unit="B", unit_scale=True, disable=None) as bar:
        for _ in range(40):
            time.sleep(0.02)
            bar.update(100)
            bar.refresh()
    lines = capsys.readouterr().err.splitlines()
    assert 0 < len(lines) <= 3
    assert all(line.startswith("model.safetensors") and "/4.00k" in line for line in lines)
