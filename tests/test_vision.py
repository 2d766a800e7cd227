"""Tests vision-language models on the command line: training, generation, inspection and plans."""

import re
import shlex

import pytest
import torch
from support import runs, vision
from support.products import FULL

from lowmem.run import fake, plan
from lowmem.run.recipe import parse


@pytest.fixture(scope="module", params=vision.KINDS if FULL else ["llava"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory):
    return vision.save(tmp_path_factory.mktemp("model") / kind, kind)


@pytest.fixture
def write(model, tmp_path):
    """Returns a function that writes a YAML file with the model, and rows with or without images."""

    def write_config(command="sft", rows=None, **changes):
        file = runs.write_rows(tmp_path / "rows.jsonl", rows or vision.rows(tmp_path, command=command))
        data = [{"path": "json", "data_files": str(file)}]
        return runs.write(tmp_path, command, model_name_or_path=str(model), datasets=data, **changes)

    return write_config


def test_the_printed_generate_command_answers_with_and_without_an_image(write, tmp_path):
    ended = runs.train(tmp_path, "sft", "--config", write())
    assert ended.status == 0, ended.err
    words = [*shlex.split(ended.out.partition("try it")[2])[1:], "--max-new-tokens", 4, "--system", "be brief"]
    for image in ([], ["--image", tmp_path / "1.png"], ["--image", tmp_path / "1.png", "--image", tmp_path / "2.png"]):
        answer = runs.lowmem(*words, *image)
        assert (answer.status, answer.err) == (0, ""), answer
    nothing = runs.lowmem(*words, "--image", tmp_path / "none.png")
    assert nothing.status == 2 and "--image: " in nothing.err and "none.png" in nothing.err


def test_only_models_that_generate_are_asked(tmp_path):
    scores = runs.lowmem("generate", runs.assets() / "scores", "hello")
    assert scores.status == 2 and "its model, LlamaForSequenceClassification, does not generate text" in scores.err
    text = runs.lowmem("generate", runs.assets() / "model", "hello", "--image", tmp_path)
    assert text.status == 2 and "no chat template with images. Omit --image" in text.err


@pytest.mark.parametrize("kind", ["llava"], indirect=True)
def test_rows_with_images_are_counted_and_shown(write, tmp_path):
    rows = vision.rows(tmp_path)
    rows[0]["messages"] = runs.user("where 0") + runs.assistant(runs.SENTENCES[0] + " the old cat sat" * 3)
    whole = runs.lowmem("inspect", "sft", "--config", write(rows=rows), "--samples", 8).out
    lengths = [int(length) for length in re.findall(r"row \d+: (\d+) tokens", whole)]
    assert len(lengths) == 8 and lengths[0] > 26 == max(lengths[1:])
    path = write(rows=rows, max_length=26)
    shown = runs.lowmem("inspect", "sft", "--config", path)
    assert "row 1: 26 tokens, trained on 25" in shown.out and "<image> x 16 where 0" in shown.out, shown
    full, tokens = sum(length >= 26 for length in lengths), 26 + sum(lengths[1:])
    cut = f"{full} have max_length=26 tokens or more (longer ones are truncated)"
    counts = f"8 rows, {cut}, {tokens} tokens, loss on {tokens - 8} "
    trained = runs.train(tmp_path, "sft", "--config", path)
    assert counts in shown.out and counts in trained.out, (counts, shown.out)
    for command in ("inspect sft", "sft"):
        ended = runs.lowmem(*command.split(), "--config", path, "--max_length", 12, "--output_dir", tmp_path / "other")
        assert ended.status == 2 and "row 1 of the data: max_length=12 cuts off tokens of its images" in ended.err


@pytest.mark.parametrize("kind", ["llava"], indirect=True)
def test_pairs_with_images_are_shown(write):
    shown = runs.lowmem("inspect", "dpo", "--config", write("dpo"), "--samples", 1)
    assert shown.out.count("<image> x 16 where 0<|assistant|>⟦") == 2 and "row 1: 49 tokens, trained on 7" in shown.out


MEMORY = {"max_length": 128, "dtype": "bfloat16", "bf16": False}


@pytest.mark.parametrize(
    ("kind", "command", "rows"),
    [("idefics3", "dpo", None), *([("llava", "sft", runs.FILES["texts.jsonl"])] if FULL else [])],
    indirect=["kind"],
)
def test_a_plan_is_the_memory_of_real_steps(write, command, rows):
    """The plan includes the vision tower and uses the largest images of the data."""
    recipe = parse(command, ["--config", str(write(command, rows, **MEMORY))], device="cpu")
    planned = plan.plan(recipe)
    words = "2 x 128 tokens, with images of 88 x 40 pixels" if rows is None else "2 x 128 tokens, without images"
    assert planned.summary["step"] == words and "ForConditionalGeneration" in planned.summary["model"]
    with fake.running(recipe, torch.device("cpu"), real=True) as run:
        measured = run.step()
    assert planned.step.items["weights"] == measured.items["weights"]
    assert planned.step.peak == pytest.approx(measured.peak, rel=0.01)
