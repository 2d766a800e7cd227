"""Damaged data files: each is refused with a message, or exactly its texts are trained on."""

import csv
import io
import json
import os
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from unittest.mock import patch

import datasets
import pyarrow
import pyarrow.parquet

from lowmem.errors import LowmemError
from lowmem.run.data import DataConfig, check_tokenized, fingerprint, for_tokenizer, load, sft_arguments
from lowmem.run.tokenizers import train_tokenizer

TEXTS = ("what is it?", "two\nlines", 'a "quoted", word', "Größe → 日本 🙂", " spaces ", "007", "null", "a\tb", "",
         "<|end|>", "x" * 300, "[", "{}", "\u2028", "\x1b[31m", "a\r\nb", "\ufeff", "\x00", "e\u0301")  # fmt: skip
ODD = (None, True, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 10**30, "", [], {}, [[]], [None], {"a": {"b": [1]}},
       "\ud800", ["text"], [{"role": "user"}], {"__class__": "os.system"}, "x" * 5000)  # fmt: skip
NAMES = ("text", "messages", "prompt", "completion", "instruction", "input", "output", "conversations", "role", "from",
         "content", "value", "tools", "input_ids", "labels", "weight", "", "\n", "source", "__class__")  # fmt: skip
BYTES = (b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"\r\n", b'"', b",", b"[", b"{", b"}", b"]", b"\\ud800", b"NaN",
         b"1" * 5000, b"[" * 100_000, b"\xed\xa0\x80", b'"text": "again",', b"\x1a", b"\\", b"null", b":")  # fmt: skip
ROLES = {"human": "user", "gpt": "assistant"}


def run(seed: int, folder: Path) -> str:
    rng = random.Random(seed)
    path = _write(rng, folder / "data")
    kind = rng.choice(["auto"] * 20 + ["text", "messages", "instruction", "prompt_completion", "sharegpt"])
    columns = {rng.choice(NAMES[:8]): rng.choice(NAMES)} if rng.random() < 0.05 else {}
    limit = rng.choice([None] * 5 + [1, 2])
    answer_only = rng.choice([None, None, False])
    cache_folder = folder / "cache"
    datasets.disable_progress_bars()
    with patch("datasets.config.HF_DATASETS_CACHE", cache_folder), patch("datasets.config.IN_MEMORY_MAX_SIZE", 0):
        try:
            config = DataConfig(str(path), kind=kind, columns=columns, max_samples=limit, answer_only=answer_only)
            rows = load(config)[0]
            train = for_tokenizer(rows, config, _tokenizer())
        except LowmemError as error:
            message = str(error)
            message.encode()
            assert len(message) < 2000, f"a message of {len(message)} characters: {message[:200]}"
            assert "data" in message, message
            left = [str(left) for left in cache_folder.rglob("*incomplete*") if left.is_dir()]
            assert not left, left
            return type(error).__name__
        columns = {field: name for field, name in columns.items() if field != name}
        try:
            expected = _expected(path, kind, columns, limit)
        except ValueError:  # whatever follows the records that were asked for is not read
            assert limit is not None
        else:
            _compare(rows.remove_columns("source").to_list(), expected)
        if rng.random() < 0.05:
            _tokenize(train, rows, config, folder)
    return "accepted"


# ------------------------------------------------------------------------------------------------- what is written


def _write(rng: random.Random, path: Path) -> Path:
    """One file, or a directory of some."""
    if rng.random() < 0.75:
        return _write_file(rng, path, rng.choice(list(_WRITERS)))
    path.mkdir()
    kinds = rng.choice([[".jsonl"], [".txt"], list(_WRITERS)])
    for name in ["a", "b", "c"][: rng.randint(1, 3)]:
        file = _write_file(rng, path / name, rng.choice(kinds))
        if rng.random() < 0.05:
            file.unlink()
            rng.choice((Path.mkdir, os.mkfifo, lambda link: link.symlink_to("nowhere")))(file)
    if rng.random() < 0.2:
        (path / "notes.md").write_text("not data")
    return path


def _write_file(rng: random.Random, path: Path, suffix: str) -> Path:
    path = path.with_suffix(suffix)
    kinds = ["text", "instruction", "strings"] if suffix == ".csv" else list(_RECORDS)
    records = [_record(rng, kind) for kind in [rng.choice(kinds)] * rng.randint(1, 5)]
    for _ in range(rng.choice((0, 0, 0, 0, 1, 2))):
        _damage_record(rng, records)
    content = _WRITERS[suffix](rng, records)
    for _ in range(rng.choice((0, 0, 0, 0, 1, 2, 5))):
        content = _damage_bytes(rng, content)
    path.write_bytes(content)
    return path


def _text(rng: random.Random) -> str:
    return " ".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 4)))


def _chat(rng: random.Random, role: str, content: str, roles: tuple[str, str]) -> list[dict[str, str]]:
    turns = [{role: name, content: _text(rng)} for _ in range(rng.randint(1, 2)) for name in roles]
    return [{role: "system", content: _text(rng)}, *turns] if rng.random() < 0.2 else turns


_RECORDS = {
    "text": lambda rng: {"text": _text(rng)},
    "messages": lambda rng: {"messages": _chat(rng, "role", "content", ("user", "assistant"))},
    "sharegpt": lambda rng: {"conversations": _chat(rng, "from", "value", ("human", "gpt"))},
    "instruction": lambda rng: {"instruction": _text(rng), "input": rng.choice(["", _text(rng)]), "output": _text(rng)},
    "strings": lambda rng: {"prompt": _text(rng), "completion": _text(rng)},
    "chats": lambda rng: {
        "prompt": [{"role": "user", "content": _text(rng)}],
        "completion": [{"role": "assistant", "content": _text(rng)}],
    },
}  # fmt: skip


def _record(rng: random.Random, kind: str) -> dict:
    return _RECORDS[kind](rng) | ({"id": rng.randrange(9)} if rng.random() < 0.2 else {})


def _damage_record(rng: random.Random, records: list) -> None:
    """Changes something anywhere in the records."""
    inner, key = records, rng.randrange(len(records))
    while isinstance(inner[key], dict | list) and inner[key] and rng.random() < 0.8:
        inner = inner[key]
        key = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
    what = rng.randrange(5)
    if what == 0 and len(inner) > 1:
        del inner[key]
    elif what == 1 and isinstance(inner, dict):
        inner[rng.choice(NAMES)] = inner.pop(key)
    elif what == 2 and isinstance(inner, dict):
        inner.update({f"field {number}": 0 for number in range(2000)} if rng.random() < 0.1 else {rng.choice(NAMES): 1})
    elif what == 3:
        inner[key] = [inner[key]] if rng.random() < 0.5 else {rng.choice(NAMES): inner[key]}
    else:
        inner[key] = deepcopy(rng.choice(ODD))


def _damage_bytes(rng: random.Random, content: bytes) -> bytes:
    start, end = sorted(rng.randint(0, len(content)) for _ in range(2))
    what = rng.randrange(9)
    if what == 0:
        return content[:start]
    if what == 1:
        return content[:start] + content[min(end, start + rng.choice((1, 5, 100))) :]
    if what == 2:
        return content[:end] + content[start:end] + content[end:]
    if what == 3 and content:
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if what == 4 and rng.random() < 0.3:
        return content.decode(errors="replace").encode(
            rng.choice(("utf-16", "utf-16-le", "utf-32", "cp1252")), "replace"
        )
    if what == 5:
        return content.replace(b"\n", rng.choice((b"\r", b"\r\n", b"\n\n", b"", b" ")))
    if what == 6:
        return content.replace(*rng.sample(BYTES, 2), 1)
    return content[:start] + rng.choice(BYTES) + content[start:]


def _as_jsonl(rng: random.Random, records: list) -> bytes:
    escaped = rng.random() < 0.5
    text = "\n".join(json.dumps(record, ensure_ascii=escaped) for record in records)
    return text.encode(errors="surrogatepass") + b"\n" * rng.randint(0, 2)


def _as_json(rng: random.Random, records: list) -> bytes:
    if rng.random() < 0.2:
        return _as_jsonl(rng, records)
    return json.dumps(records, indent=rng.choice((None, 1))).encode()


def _as_csv(rng: random.Random, records: list) -> bytes:
    records = [record for record in records if isinstance(record, dict)]
    file, names = io.StringIO(), list(records[0]) if records else []
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator=rng.choice(("\n", "\r\n")))
    if rng.random() < 0.95:
        writer.writeheader()
    writer.writerows(records)
    return file.getvalue().encode(errors="surrogatepass")


def _as_parquet(rng: random.Random, records: list) -> bytes:
    file = io.BytesIO()
    try:
        table = pyarrow.Table.from_pylist([record for record in records if isinstance(record, dict)])
        if rng.random() < 0.2 and table.num_columns:
            place = rng.randrange(table.num_columns)
            kinds = (pyarrow.binary(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
                     pyarrow.decimal128(9), pyarrow.timestamp("ns"), pyarrow.string_view())  # fmt: skip
            with suppress(pyarrow.ArrowException):
                column = table.column(place).cast(rng.choice(kinds))
                table = table.set_column(place, table.column_names[place], column)
        if rng.random() < 0.05:
            table = table.append_column(rng.choice(table.column_names), table.column(0))
        options = {"compression": rng.choice(("none", "snappy", "zstd")), "use_dictionary": rng.random() < 0.5}
        pyarrow.parquet.write_table(table, file, write_page_checksum=rng.random() < 0.5, **options)
    except (pyarrow.ArrowException, UnicodeEncodeError, IndexError, TypeError, OverflowError):
        return b"PAR1"  # nothing that Parquet can hold
    return file.getvalue()


def _as_txt(rng: random.Random, records: list) -> bytes:
    return "\n\n".join(str(record) for record in records).encode(errors="surrogatepass")


_WRITERS = {".jsonl": _as_jsonl, ".json": _as_json, ".csv": _as_csv, ".parquet": _as_parquet, ".txt": _as_txt}


# ---------------------------------------------------------------------------------- the same read in another way


def _compare(rows: list, expected: list) -> None:
    assert len(rows) == len(expected), f"{len(rows)} rows, expected {len(expected)}"
    for row, wanted in zip(rows, expected, strict=True):
        assert row == wanted, f"{row}, expected {wanted}"


def _expected(path: Path, kind: str, columns: dict[str, str], limit: int | None) -> list:
    """The rows that an independent reading gives."""
    files = [file for file in sorted(path.iterdir()) if file.suffix in _WRITERS] if path.is_dir() else [path]
    rows = []
    for record in islice(chain.from_iterable(_READERS[file.suffix](file) for file in files), limit):
        renamed = {name: value for name, value in record.items() if name not in columns.values()}
        renamed |= {field: record[theirs] for field, theirs in columns.items()}
        if kind == "auto":
            [kind] = [name for name, needs in _NEEDS.items() if needs <= renamed.keys()]
        rows.append(_ROWS[kind](renamed))
    return rows


def _turns(turns: list | str, role: str = "role", content: str = "content") -> list | str:
    if isinstance(turns, str):
        return turns
    return [{"role": ROLES.get(turn[role], turn[role]), "content": turn[content]} for turn in turns]


_NEEDS = {
    "messages": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "instruction": {"instruction", "output"},
    "sharegpt": {"conversations"},
    "text": {"text"},
}
_ROWS = {
    "messages": lambda record: {"messages": _turns(record["messages"])},
    "prompt_completion": lambda record: {name: _turns(record[name]) for name in ("prompt", "completion")},
    "instruction": lambda record: {
        "prompt": [{"role": "user", "content": _question(record)}],
        "completion": [{"role": "assistant", "content": record["output"]}],
    },
    "sharegpt": lambda record: {"messages": _turns(record["conversations"], "from", "value")},
    "text": lambda record: {"text": record["text"]},
}


def _question(record: dict) -> str:
    parts = [record["instruction"], record.get("input")]
    return "\n\n".join(part for part in parts if part)


def _pairs(pairs: list) -> dict:
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), f"accepted two values of one key: {names}"
    return dict(pairs)


def _split_lines(path: Path) -> Iterator[str]:
    return filter(str.strip, re.split(r"\r\n|\r|\n", path.read_bytes().decode("utf-8-sig")))


def _from_jsonl(path: Path) -> Iterator:
    return (json.loads(line, object_pairs_hook=_pairs) for line in _split_lines(path))


def _from_json(path: Path) -> Iterator:
    text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    if text.lstrip()[0] != "[":
        return _from_jsonl(path)
    return iter(json.loads(text, object_pairs_hook=_pairs))


def _from_csv(path: Path) -> Iterator:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for record in csv.DictReader(file):
            assert None not in record and None not in record.values()
            yield record


def _from_parquet(path: Path) -> Iterator:
    return iter(pyarrow.parquet.read_table(path).to_pylist())


def _from_txt(path: Path) -> Iterator:
    text = re.sub(r"\r\n|\r", "\n", path.read_bytes().decode("utf-8-sig"))
    lines = "\n".join(line if line.strip() else "" for line in text.split("\n"))
    return ({"text": paragraph.strip("\n")} for paragraph in re.split("\n\n+", lines) if paragraph.strip("\n"))


_READERS = {
    ".jsonl": _from_jsonl, ".json": _from_json, ".csv": _from_csv, ".parquet": _from_parquet, ".txt": _from_txt,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- tokens


@cache
def _tokenizer():
    return train_tokenizer([text for text in TEXTS if text.strip()] * 4, 320)


@cache
def _model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(_tokenizer()), **sizes))


def _tokenize(train: datasets.Dataset, rows: datasets.Dataset, config: DataConfig, folder: Path) -> None:
    """Every text is in the tokens, and the loss is on what is asked."""
    from trl import SFTConfig, SFTTrainer

    config = replace(config, max_length=2**20)
    args = SFTConfig(str(folder / "out"), bf16=False, use_cpu=True, report_to="none", **sft_arguments(config, train))
    trainer = SFTTrainer(_model(), args, train_dataset=train, processing_class=_tokenizer())
    tokenized = trainer.train_dataset
    assert check_tokenized(tokenized, rows, config).dropped == ()
    assert fingerprint(tokenized) == fingerprint(datasets.Dataset.from_list(tokenized.to_list()))
    for row, tokens in zip(rows, tokenized, strict=True):
        text = _tokenizer().decode(tokens["input_ids"])
        trained = _tokenizer().decode([label for label in tokens["labels"] if label != -100])
        assert all(label in (-100, token) for label, token in zip(tokens["labels"], tokens["input_ids"], strict=True))
        turns = row.get("messages") or _turns(row.get("prompt", "")) + _turns(row.get("completion", row.get("text")))
        if isinstance(turns, str):
            assert turns in text and (row.get("completion") or row["text"]) in text
        else:
            assert all(turn["content"] in text for turn in turns)
            assert all(turn["content"] in trained for turn in turns if turn["role"] == "assistant")
        if config.answer_only is False:
            assert tokens["labels"] == tokens["input_ids"]
