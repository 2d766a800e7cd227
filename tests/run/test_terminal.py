"""Progress where the output is not a terminal: lines in place of bars."""

import time

import datasets
import pytest

from lowmem.run import terminal


@pytest.fixture
def seconds(monkeypatch):
    """The least time between two lines of a bar."""
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
