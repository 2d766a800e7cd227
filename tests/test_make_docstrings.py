"""The scripts that make the quickstart's data and model: the same files each time, and no partial ones."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import make_model

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_docstrings.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_docstrings", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_limited_file_is_the_start_of_the_full_one(tmp_path):
    done = run("--out", tmp_path / "new" / "all.jsonl", "--seed", "3")
    assert done.returncode == 0, done.stderr
    limited = run("--out", tmp_path / "some.jsonl", "--seed", "3", "--limit", "50")
    lines = (tmp_path / "new" / "all.jsonl").read_text().splitlines()
    assert (tmp_path / "some.jsonl").read_text().splitlines() == lines[:50]
    assert f"50 of {len(lines)} pairs from" in limited.stdout and limited.stdout.count("\n") == 1
    assert len(lines) > 2000
    chats = [json.loads(line) for line in lines]
    assert all([*chat] == ["prompt", "completion"] for chat in chats)
    messages = [[(message["role"], message["content"]) for (message,) in chat.values()] for chat in chats]
    assert all([role for role, _ in chat] == ["user", "assistant"] for chat in messages)
    assert all(len({chat[side] for chat in messages}) == len(chats) for side in range(2))
    assert all(answer.isascii() and " of test." not in question for (_, question), (_, answer) in messages)
    assert not list(tmp_path.rglob("*.tmp"))


def test_pairs_of_a_module(script, tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text('def f():\n    """Return what nobody ever wants to read."""\n')
    (tmp_path / "broken.py").write_text("def f(:\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        '''
def plain(a, b=1, *, c: int) -> str:
    """Return the sum of a
    and of b.

    More about it.
    """

def short():
    """Too short."""

def again(a):
    """again(a) -> the signature once more, and then some"""

class Outer:
    class Inner:
        async def method(self):
            """Wait for the thing that was asked for."""

def twice():
    """Return the sum of a and of b."""
'''
    )
    pairs, modules = script.collect(tmp_path)
    assert modules == 1
    assert pairs == [
        {
            "instruction": "Document this function of package:\ndef plain(a, b=1, *, c: int) -> str",
            "output": "Return the sum of a and of b.",
        },
        {
            "instruction": "Document this method of package.Outer.Inner:\nasync def method(self)",
            "output": "Wait for the thing that was asked for.",
        },
    ]


def test_a_long_paragraph_is_cut_at_a_sentence(script):
    sentence = "This is a sentence of the docstring. "
    summary = script.summary(sentence * 20)
    assert summary.endswith("docstring.")
    assert script.LONGEST_OUTPUT - len(sentence) < len(summary) <= script.LONGEST_OUTPUT
    assert script.summary("x" * 1000) == ""


def test_a_limit_below_one_is_refused(tmp_path):
    done = run("--out", tmp_path / "x.jsonl", "--limit", "0")
    assert done.returncode == 2 and "--limit is 0; it must be at least 1" in done.stderr
    assert not (tmp_path / "x.jsonl").exists()


def test_a_model_is_the_same_each_time_and_its_tokenizer_gives_every_text_back(tmp_path, monkeypatch):
    rows = [{"text": "a few words"}, {"messages": [{"role": "user", "content": "and others"}]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ("--vocab-size", "280", "--hidden-size", "16", "--layers", "1")
    for name in "ab":
        words = ["make_model.py", "--data", f"{tmp_path}/data.jsonl", "--out", f"{tmp_path}/{name}", *sizes]
        monkeypatch.setattr(sys, "argv", words)
        make_model.main()
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.vocab_size == len(tokenizer) <= 280 and model.config.num_hidden_layers == 1
    text = "a few others: <b> é 漢\n\t"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    ids = tokenizer.apply_chat_template(rows[1]["messages"], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|begin|><|user|>and others<|assistant|>"
