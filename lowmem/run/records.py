"""Data files and Hub data sets become checked rows; what cannot be trained on is named by file and record.

`datasets` holds the rows, but the files are read here: the readers of datasets 5.2 turn a missing field into null and
the text "007" of a CSV file into the number 7, fill short lines of a CSV file, and don't name the line of an error.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
import pyarrow.parquet  # type: ignore[import-untyped]
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from lowmem.errors import DataError, did_you_mean
from lowmem.run.checks import Problem, mapping, problems

Record = dict[str, Any]

# The cache of `datasets` identifies a function by its name alone, so cached rows also depend on these files.
CODE = [Path(__file__).with_name(name) for name in ("checks.py", "data.py", "records.py")]


def _refuse(value: Any) -> Any:
    if value not in (None, "", []):
        raise ValueError("is not supported. Delete it where it is not needed.")
    return value


def _messages(role: str, content: str, roles: Any) -> Any:
    message = mapping({role: roles, content: str}, dict.fromkeys(REFUSED["message"], Refused), extra="ignore")
    convert = AfterValidator(lambda turn: {"role": USUAL_ROLES.get(turn[role], turn[role]), "content": turn[content]})
    return Annotated[list[Annotated[message, convert]], Field(min_length=1)]  # type: ignore[valid-type]


# Fields that would change what is trained on are refused. Any other extra field is metadata and is ignored.
Refused = Annotated[Any, AfterValidator(_refuse)]
REFUSED = {"record": ("tools", "images", "image"), "message": ("tool_calls", "reasoning_content", "thinking", "weight")}
USUAL_ROLES = {"human": "user", "gpt": "assistant"}

MESSAGES = _messages("role", "content", Literal["system", "user", "assistant"])
ANSWERS = _messages("role", "content", Literal["assistant"])
TURNS = _messages("from", "value", Literal["system", "human", "user", "gpt", "assistant"])
KINDS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "prompt_completion": {"prompt": MESSAGES, "completion": ANSWERS},
    "instruction": {"instruction": str, "output": str},
    "sharegpt": {"conversations": TURNS},
    "text": {"text": str},
}
FieldName = Literal["messages", "prompt", "completion", "instruction", "input", "output", "conversations", "text"]


@cache
def _check(kind: str, strings: bool) -> TypeAdapter[Record]:
    optional = dict.fromkeys(REFUSED["record"], Refused) | ({"input": str | None} if kind == "instruction" else {})
    required = {"prompt": str, "completion": str} if strings else KINDS[kind]
    return TypeAdapter(mapping(required, optional, extra="ignore"))


def _matching(record: Record) -> list[str]:
    return [kind for kind, names in KINDS.items() if all(name in record for name in names)]


def _recognise(record: Record, place: str) -> str:
    if not (kinds := _matching(record)):
        needs = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in KINDS.items())
        raise DataError(f"{place}: no kind fits the fields {', '.join(record)}. The kinds need {needs}. Name what "
                        "corresponds in data.columns.")  # fmt: skip
    if len(kinds) > 1:
        raise DataError(f"{place}: the fields fit the kinds {', '.join(kinds)}. Set data.kind to one of them.")
    return kinds[0]


def _row(record: Record, kind: str, place: str) -> Record:
    """Checks a record and converts it to the columns that TRL takes."""
    strings = kind == "prompt_completion" and isinstance(record.get("prompt"), str)
    try:
        row = _check(kind, strings).validate_python(record, strict=True)
    except ValidationError as error:
        raise DataError(_message(record, kind, place, problems(error, record)[0])) from None
    if kind == "instruction":
        question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        turns = {"prompt": ("user", question), "completion": ("assistant", row["output"])}
        return {name: [{"role": role, "content": content}] for name, (role, content) in turns.items()}
    return {"messages": row["conversations"]} if kind == "sharegpt" else {name: row[name] for name in KINDS[kind]}


def _message(record: Record, kind: str, place: str, problem: Problem) -> str:
    field, *deeper = problem.path
    if deeper:  # the index of a message and a field of it
        place, record = f"{place}, message {deeper[0] + 1} of {field!r}", record[field][deeper[0]]
    subject = repr(problem.path[-1]) if len(deeper) != 1 else "it"
    if problem.kind != "missing":
        return f"{place}: {subject} {problem.text}"
    if not deeper and (other := _matching(record)):
        return f"{place}: is of kind {other[0]!r}, expected kind {kind!r}. Keep one kind per data set."
    needs = "" if deeper else f" Kind {kind!r} needs {' and '.join(KINDS[kind])}."
    return f"{place}: {subject} is missing (found: {', '.join(record)}).{needs}"


def read_rows(path: str, key: str, split: str, **options: Any) -> datasets.Dataset:
    """Reads all rows of a file, a directory or a Hub name, each with its `source`; `datasets` caches them.

    `key` is the name of `path` in messages, `options` are those of `_rows`. Raises `DataError` for the first file or
    record that cannot be used.
    """
    files = _files(path, key)
    status = [(str(file.resolve()), file.stat()) for file in (*CODE, *(files or ()))]
    versions = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in status)
    options |= {"name": path, "source": _from_hub(path, key, split) if files is None else files, "_": versions}
    try:
        return datasets.Dataset.from_generator(_rows, gen_kwargs=options)
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None


def _rows(name: str, source: tuple[Path, ...] | datasets.Dataset, kind: str, columns: Mapping[FieldName, str],
          limit: int | None, need_answers: bool, **_: Any) -> Iterator[Record]:  # fmt: skip
    form = None
    for place, record in islice(_records(name, source), limit):
        if not isinstance(record, dict):
            raise DataError(f"{place}: should be an object with named fields, found a {type(record).__name__}.")
        record = _renamed(record, columns, place)
        kind = _recognise(record, place) if kind == "auto" else kind
        row = _row(record, kind, place)
        if need_answers and "messages" in row and all(message["role"] != "assistant" for message in row["messages"]):
            raise DataError(f"{place}: no message is from the assistant, so there is no answer to train on. Delete it.")
        types = {type(value) for value in row.values()}
        if types != (form := form or types):
            raise DataError(f"{place}: prompts are strings in some records and messages in others. Keep one of them.")
        yield {**row, "source": place}
    if form is None:
        raise DataError(f"{name}: there are no records.")


def _renamed(record: Record, columns: Mapping[FieldName, str], place: str) -> Record:
    for field, theirs in columns.items():
        if theirs not in record:
            hint = did_you_mean(theirs, record)
            raise DataError(f"{place}: data.columns takes {field!r} from {theirs!r}, which is missing (found: "
                            f"{', '.join(record)}).{hint}")  # fmt: skip
    others = {name: value for name, value in record.items() if name not in columns.values()}
    return others | {field: record[theirs] for field, theirs in columns.items()}


def _records(name: str, source: tuple[Path, ...] | datasets.Dataset) -> Iterator[tuple[str, Any]]:
    """Each record of files or a data set and where it is, as in "data/x.jsonl, record 12"; every file counts from 1."""
    if not isinstance(source, tuple):
        yield from ((f"{name}, record {number}", record) for number, record in enumerate(source, 1))
    for file in source if isinstance(source, tuple) else ():
        number = 0
        try:
            for number, record in enumerate(READERS[file.suffix.lower()](file), 1):
                yield f"{file}, record {number}", record
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 text (byte {error.start}). Convert the file to UTF-8.") from error
        if number == 0:
            raise DataError(f"{file}: the file is empty. Fill it or delete it.")


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as lines:
        yield from (_parse(line, path, number) for number, line in enumerate(lines) if line.strip())


def _read_json(path: Path) -> Iterator[Any]:
    """A list of records, or, as in many .json files, one record per line."""
    text = path.read_text(encoding="utf-8-sig")
    yield from _parse(text, path) if text.lstrip().startswith("[") else _read_jsonl(path)


def _parse(text: str, path: Path, lines_before: int = 0) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"{path}, line {lines_before + error.lineno}"
        raise DataError(f"{line}: not valid JSON ({error.msg} at column {error.colno}). Fix or delete it.") from error


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default limit of a field is 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            for row in rows:
                if None in row or None in row.values():
                    raise DataError(f"{path}, line {rows.reader.line_num}: more or fewer fields than the header's "
                                    f"{len(rows.fieldnames or ())}. Fix or quote the line.")  # fmt: skip
                yield row
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.reader.line_num}: not valid CSV ({error}). Fix the line.") from error


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file ({error}). Write it again.") from error
    for batch in file.iter_batches(batch_size=1000):
        yield from batch.to_pylist()


def _read_txt(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig") as lines:
        paragraphs = groupby(lines, key=lambda line: not line.strip())
        yield from ({"text": "".join(paragraph).rstrip("\n")} for blank, paragraph in paragraphs if not blank)


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet, ".txt": _read_txt,
}  # fmt: skip


def _files(path: str, key: str) -> tuple[Path, ...] | None:
    """The files at `path`, or None where it can only be a Hub name."""
    target, known = Path(path).expanduser(), ", ".join(READERS)
    entries = sorted(target.iterdir()) if target.is_dir() else [target] if target.is_file() else []
    if files := tuple(file for file in entries if file.suffix.lower() in READERS):
        return files
    if target.is_dir():
        raise DataError(f"{key}: the directory {path} has no file of a known type ({known}).")
    if target.is_file():
        raise DataError(f"{key}: {path} is of an unknown type {target.suffix!r}; known: {known}.")
    if target.suffix.lower() in READERS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", path):
        raise DataError(f"{key}: {path} does not exist.{_nearest(target)}")
    return None


def _from_hub(path: str, key: str, split: str) -> datasets.Dataset:
    name, _, subset = path.partition(":")
    try:
        return datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{key}: {path!r} is not a local file, and the Hub gave no data set with the split {split!r} "
                        f"({error}).{_nearest(Path(path))} Check the name and the network, or download the data "
                        f"elsewhere (hf download --repo-type dataset {name}) and name it.") from error  # fmt: skip


def _nearest(target: Path) -> str:
    if not target.parent.is_dir():
        return f" The directory {target.parent} does not exist either."
    return did_you_mean(str(target), map(str, target.parent.iterdir()))
