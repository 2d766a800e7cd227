"""Runs commands at a small size in this process, with a model and data for each command."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import datasets
import torch
import yaml
from support.processes import CONTEXT, PATIENCE
from transformers import LlamaConfig, LlamaForSequenceClassification

from lowmem import cli
from lowmem.run.folder import RunFolder
from scripts.make_model import make_model, train_tokenizer

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def listed_configs():
    """Returns the table of configs/README.md: file → column → cell."""
    lines = CONFIGS[0].with_name("README.md").read_text().splitlines()
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return {row[0].rpartition("(")[2][:-1]: dict(zip(header, row, strict=True)) for row in rows}


LONGEST = 2_000  # maximum characters of an error message
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SENTENCES = [f"the {a} {b} {c}" for a in ("old", "new") for b in ("cat", "dog") for c in ("sat", "ran", "ate", "hid")]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


# Name of a data file in `assets` → rows
FILES: dict[str, list[dict[str, Any]]] = {
    "chats.jsonl": [{"messages": user(f"where {n}") + assistant(text)} for n, text in enumerate(SENTENCES)],
    "texts.jsonl": [{"text": text} for text in SENTENCES],
    "preferences.jsonl": [
        {"prompt": user("who"), "chosen": assistant(a), "rejected": assistant(f"{b} too")}
        for a, b in zip(SENTENCES, reversed(SENTENCES), strict=True)
    ],
    "kto.jsonl": [
        {"prompt": user("who"), "completion": assistant(text), "label": n % 2 == 0} for n, text in enumerate(SENTENCES)
    ],
    "prompts.jsonl": [{"prompt": user(text)} for text in SENTENCES],
}
DATA = {
    "sft": "chats",
    "dpo": "preferences",
    "kto": "kto",
    "reward": "preferences",
    "grpo": "prompts",
    "rloo": "prompts",
}
GENERATION = {"num_generations": 2, "max_completion_length": 4}

# Configurations of the data set `zen` → rows, one for each command, as in data sets on the Hub
ZEN: dict[str, list[dict[str, Any]]] = {
    "language_modeling": FILES["texts.jsonl"],
    "prompt_completion": [{"prompt": "the", "completion": text[3:]} for text in SENTENCES],
    "preference": [
        {"prompt": "the", "chosen": a[3:], "rejected": b[3:]} for a, b in zip(SENTENCES, SENTENCES[::-1], strict=True)
    ],
    "implicit_prompt_preference": [
        {"chosen": a, "rejected": b} for a, b in zip(SENTENCES, SENTENCES[::-1], strict=True)
    ],
    "unpaired_preference": [
        {"prompt": "the", "completion": text[3:], "label": n % 3 > 0} for n, text in enumerate(SENTENCES)
    ],
}


class Ended(NamedTuple):
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str


@cache
def assets() -> Path:
    """Returns a directory with `model`, a reward model in `scores`, the data files, and the data set `zen`."""
    folder = TemporaryDirectory()
    assets.folder = folder  # type: ignore[attr-defined]  # deleted at exit
    path = Path(folder.name)
    datasets.config.HF_DATASETS_CACHE = path / "cache"
    for name, rows in FILES.items():
        write_rows(path / name, rows)
    (path / "zen").mkdir()
    for name, rows in ZEN.items():
        write_rows(path / "zen" / f"{name}.jsonl", rows)
        write_rows(path / "zen" / f"{name}_test.jsonl", rows[:4])
    files = {name: [("train", f"{name}.jsonl"), ("test", f"{name}_test.jsonl")] for name in ZEN}
    configs = [
        {"config_name": name, "data_files": [{"split": split, "path": file} for split, file in splits]}
        for name, splits in files.items()
    ]
    (path / "zen" / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    tokenizer = train_tokenizer([*SENTENCES, "where who 0123456789"], 300)
    with torch.random.fork_rng():
        make_model(path / "model", tokenizer, **SIZES, max_position_embeddings=64)
        config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1)
        LlamaForSequenceClassification(config).save_pretrained(path / "scores")
    tokenizer.save_pretrained(path / "scores")
    return path


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(folder: Path, command: str = "sft", **changes: Any) -> dict[str, Any]:
    """Returns YAML arguments for two training steps in `folder`/run. changes: replaced arguments; None omits one."""
    usual = {
        "output_dir": str(folder / "run"), "model_name_or_path": str(assets() / "model"),
        "datasets": [{"path": "json", "data_files": str(assets() / f"{DATA[command]}.jsonl")}],
        "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "max_grad_norm": 0.0,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "gradient_checkpointing": False,
    }  # fmt: skip
    if command in ("grpo", "rloo"):
        usual |= GENERATION | {"reward_model_name_or_path": str(assets() / "scores")}
    else:
        usual |= {"fused": {"rule": "adalomo"}}
    return {name: value for name, value in {**usual, **changes}.items() if value is not None}


def write(folder: Path, command: str = "sft", **changes: Any) -> Path:
    """Writes the `arguments` to a YAML file in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{command}.yaml"
    path.write_text(yaml.safe_dump(arguments(folder, command, **changes), sort_keys=False))
    return path


def lowmem(*words: object) -> Ended:
    """Runs a command in this process. Exceptions other than SystemExit propagate."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
    return Ended(int(status or 0), out.getvalue(), err.getvalue())


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Like `contextlib.chdir`, which Python 3.10 does not have."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def train(folder: Path, command: str, *words: object) -> Ended:
    """Runs `lowmem` in `folder`. A user error must print one short message and leave no files behind."""
    before = set(folder.rglob("*"))
    with inside(folder):
        ended = lowmem(command, *words)
    assert ended.status in (0, 2), ended
    if ended.status == 2:
        assert ended.err.startswith("error: ") or "\nerror: " in ended.err, ended.err
        assert len(ended.err) <= LONGEST, (len(ended.err), ended.err[:LONGEST])
        assert not (files := set(folder.rglob("*")) - before), (ended.err, files)
    return ended


def logged(run_dir: Path, name: str = "loss") -> list[float]:
    """Returns the logged values of a metric in order."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """During the context, another process uses a run folder. The process is killed at the end."""
    parent_end, child_end = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_use, args=(folder, child_end), daemon=True)
    process.start()
    child_end.close()
    try:
        parent_end.recv()
        yield
    finally:
        process.kill()
        process.join(PATIENCE)


def _use(folder: Path, end: Any) -> None:
    with RunFolder(folder).opened():
        end.send(None)
        end.recv()
