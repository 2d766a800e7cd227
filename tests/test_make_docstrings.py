"""The scripts that make the quickstart's data and model: the same files each time, and no partial ones."""

import json
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import make_docstrings, make_model


@pytest.fixture
def run(monkeypatch):
    """A function: runs a script with arguments."""

    def of(script, *words):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        script.main()

    return of


def test_a_limited_file_is_the_start_of_the_full_one(run, tmp_path):
    run(make_docstrings, "--out", tmp_path / "new" / "all.jsonl", "--seed", 3)
    run(make_docstrings, "--out", tmp_path / "new" / "some.jsonl", "--seed", 3, "--limit", 50)
    lines = (tmp_path / "new" / "all.jsonl").read_text().splitlines()
    assert (tmp_path / "new" / "some.jsonl").read_text().splitlines() == lines[:50]
    assert len(list(tmp_path.rglob("*"))) == 3 and len({*lines}) == len(lines) > 2000
    for chat in map(json.loads, lines):
        (question,), (answer,) = chat["prompt"], chat["completion"]
        assert (question["role"], answer["role"], answer["content"].isascii()) == ("user", "assistant", True)
        assert " of test." not in question["content"]


def test_a_model_is_reproducible_and_its_tokenizer_is_lossless(run, tmp_path):
    rows = [{"text": "a few words"}, {"messages": [{"role": "user", "content": "and others"}]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ("--vocab-size", 280, "--hidden-size", 16, "--layers", 1)
    for name in "ab":
        run(make_model, "--data", tmp_path / "data.jsonl", "--out", tmp_path / name, *sizes)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "a").config
    assert config.vocab_size == len(tokenizer) <= 280 and config.num_hidden_layers == 1
    text = "a few others: <b> é 漢\n\t"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    ids = tokenizer.apply_chat_template(rows[1]["messages"], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|begin|><|user|>and others<|assistant|>"
