"""Runs of a model that is large enough for compiled updates, compared with resumed runs and with tiles.

The models of other tests are too small for `compile: auto`.
"""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.processes import Launched
from support.runs import SENTENCES, assistant, user, write, write_rows

from lowmem.step.compiled import has_compiler
from scripts.make_model import make_model, train_tokenizer

SIZES = {
    "vocab_size": 49_152, "hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
STEPS = 4

pytestmark = pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Creates a folder with a model of 38M parameters and chats of various lengths."""
    folder = tmp_path_factory.mktemp("large")
    make_model(folder / "model", train_tokenizer(SENTENCES, 300), **SIZES)
    chats = [{"messages": user("who") + assistant(" ".join(SENTENCES[: 1 + n % 7]))} for n in range(16)]
    write_rows(folder / "chats.jsonl", chats)
    return folder


def test_compiled_resumed_and_by_tiles(model, tmp_path):
    """Resuming is bitwise exact. Tiles are summed in another order."""
    data = [{"path": "json", "data_files": str(model / "chats.jsonl")}]
    path = write(
        tmp_path, model_name_or_path=str(model / "model"), datasets=data, max_steps=STEPS, save_strategy="steps",
        save_steps=STEPS // 2, gradient_checkpointing=True, learning_rate=1e-2,
    )  # fmt: skip

    def run(folder, *more):
        command = ["lowmem", "sft", "--config", str(path), f"--output_dir={folder}", *more]
        done = Launched.ranks(0, *command, environment={**os.environ, "OMP_NUM_THREADS": "1"}).finish()
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses = torch.tensor([line["loss"] for line in lines if "loss" in line])
        return load_file(folder / "model.safetensors"), losses, done.stdout + done.stderr

    weights, losses, output = run(tmp_path / "run")
    assert "compiled in the first step" in output and len(losses) == STEPS
    shutil.rmtree(tmp_path / "run" / f"checkpoint-{STEPS}")
    resumed, same_losses, _ = run(tmp_path / "run", "--resume_from_checkpoint=last")
    assert torch.equal(losses, same_losses)
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())

    by_tiles, their_losses, output = run(tmp_path / "tiles", "--fused.compile=false")
    assert "compiled in the first step" not in output
    torch.testing.assert_close(losses, their_losses, rtol=1e-5, atol=0)
    first = load_file(model / "model" / "model.safetensors")
    for name, weight in by_tiles.items():
        assert (weights[name] - weight).norm() <= 1e-3 * (weight - first[name]).norm(), name
