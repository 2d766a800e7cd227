"""Progress where the output is not a terminal."""

import time

import pytest
from huggingface_hub.utils import tqdm as of_the_hub
from tqdm import tqdm
from transformers.utils import logging

from lowmem.run import terminal


@pytest.mark.parametrize("library", [tqdm, logging.tqdm, of_the_hub])
def test_bars_are_seldom_updated(library, capsys):
    with terminal.seldom_progress(0.3), library(total=4000, desc="model.safetensors") as bar:
        for _ in range(40):
            time.sleep(0.02)
            bar.update(100)
    assert 0 < capsys.readouterr().err.count("/4000") <= 4


def test_a_short_stage_prints_nothing(capsys):
    with terminal.seldom_progress():
        for _ in tqdm(range(3), desc="short"):
            pass
    assert capsys.readouterr() == ("", "")
