"""Files and Hub data sets into checked rows: each record is read, recognised and converted, or named in an error."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowmem.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

Record = dict[str, Any]

# `datasets` knows functions by name alone, so what it caches is made to depend on the code that wrote it.
CODE = (Path(__file__), Path(__file__).with_name("data.py"))

ROLES = {role: role for role in ("system", "user", "assistant")}
SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
# Fields that would change what is trained on are refused; any other extra field is metadata and is left out.
REFUSED_IN_RECORDS = ("tools", "images", "image")
REFUSED_IN_MESSAGES = ("tool_calls", "reasoning_content", "thinking", "weight")


def _from_messages(record: Record, place: str) -> Record:
    return {"messages": _messages(record["messages"], "messages", place)}


def _from_sharegpt(record: Record, place: str) -> Record:
    turns = _messages(record["conversations"], "conversations", place, ("from", "value"), SHAREGPT_ROLES)
    return {"messages": turns}


def _from_prompt_completion(record: Record, place: str) -> Record:
    if isinstance(record["prompt"], str):
        return {name: _string(record[name], name, place) for name in ("prompt", "completion")}
    prompt = _messages(record["prompt"], "prompt", place)
    completion = _messages(record["completion"], "completion", place)
    if any(message["role"] != "assistant" for message in completion):
        raise DataError(f"{place}: 'completion' holds more than answers. Use kind messages for several turns.")
    return {"prompt": prompt, "completion": completion}


def _from_instruction(record: Record, place: str) -> Record:
    question = _string(record["instruction"], "instruction", place)
    if record.get("input") not in (None, ""):
        question += "\n\n" + _string(record["input"], "input", place)
    answer = _string(record["output"], "output", place)
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def _from_text(record: Record, place: str) -> Record:
    return {"text": _string(record["text"], "text", place)}


class Kind(NamedTuple):
    """What a record of one kind must hold, and how it becomes a row."""

    needs: tuple[str, ...]
    convert: Callable[[Record, str], Record]


KINDS = {
    "messages": Kind(("messages",), _from_messages),
    "prompt_completion": Kind(("prompt", "completion"), _from_prompt_completion),
    "instruction": Kind(("instruction", "output"), _from_instruction),
    "sharegpt": Kind(("conversations",), _from_sharegpt),
    "text": Kind(("text",), _from_text),
}
FIELDS = {name for kind in KINDS.values() for name in kind.needs} | {"input"}


def _matching(record: Record) -> list[str]:
    return [name for name, kind in KINDS.items() if all(need in record for need in kind.needs)]


def _recognise(record: Record, place: str) -> str:
    match _matching(record):
        case [kind]:
            return kind
        case []:
            needs = "; ".join(f"{name}: {', '.join(kind.needs)}" for name, kind in KINDS.items())
            raise DataError(
                f"{place}: no kind fits the fields {', '.join(record)}. The kinds need {needs}. "
                "Name what corresponds in data.columns."
            )
        case several:
            raise DataError(f"{place}: the fields fit the kinds {', '.join(several)}. Set data.kind to one of them.")


def _check_fields(record: Record, kind: str, place: str) -> None:
    _refuse(record, REFUSED_IN_RECORDS, place)
    needs = KINDS[kind].needs
    missing = [name for name in needs if name not in record]
    if missing and (other := _matching(record)):
        raise DataError(f"{place}: is of kind {other[0]!r} amid records of kind {kind!r}. Keep one kind per data set.")
    if missing:
        raise DataError(
            f"{place}: the field {missing[0]!r} is missing; kind {kind!r} needs {' and '.join(needs)} "
            f"(found: {', '.join(record)})."
        )


def _messages(
    value: Any,
    name: str,
    place: str,
    keys: tuple[str, str] = ("role", "content"),
    roles: Mapping[str, str] = ROLES,
) -> list[Record]:
    """A list of messages as `{"role": …, "content": …}`, every part of it checked."""
    if not isinstance(value, list):
        raise DataError(f"{place}: {name!r} is {_type(value)}; it must be a list of messages.")
    if not value:
        raise DataError(f"{place}: {name!r} holds no message. Delete the record.")
    messages = []
    for number, message in enumerate(value, 1):
        where = f"{place}, message {number}"
        if not isinstance(message, dict):
            raise DataError(f"{where}: is {_type(message)}; it must be an object with {keys[0]!r} and {keys[1]!r}.")
        for key in keys:
            if key not in message:
                raise DataError(f"{where}: {key!r} is missing (found: {', '.join(message)}).")
        _refuse(message, REFUSED_IN_MESSAGES, where)
        role, content = (_string(message[key], key, where) for key in keys)
        if role not in roles:
            hint = did_you_mean(role, roles)
            raise DataError(f"{where}: the role {role!r} is unknown; known: {', '.join(roles)}.{hint}")
        messages.append({"role": roles[role], "content": content})
    return messages


def _refuse(record: Record, names: tuple[str, ...], place: str) -> None:
    for name in names:
        if record.get(name) not in (None, "", []):
            raise DataError(f"{place}: {name!r} is not supported. Delete it where it is not needed.")


def _string(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {name!r} is {_type(value)}; it must be a string.")
    return value


def _type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def read_rows(
    path: str, key: str, split: str, kind: str, columns: Mapping[str, str], limit: int | None, need_answers: bool
) -> "Dataset":
    """All rows of `path`, each with its `source`; `key` is the configuration's name for `path`, for messages.

    Rows are written once to the cache of `datasets`, which sees by time and size when a file has changed.
    Raises `DataError` for the first file or record that cannot be used.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    files = _files(path, key)
    arguments = {
        "name": path,
        "source": _from_hub(path, key, split) if files is None else files,
        "stamps": tuple(_stamp(file) for file in (*CODE, *(files or ()))),
        "kind": kind,
        "columns": tuple(columns.items()),
        "limit": limit,
        "need_answers": need_answers,
    }
    try:
        return Dataset.from_generator(_rows, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None


def _stamp(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_mtime_ns


def _rows(
    name: str,
    source: "tuple[Path, ...] | Dataset",
    stamps: tuple[tuple[str, int, int], ...],
    kind: str,
    columns: tuple[tuple[str, str], ...],
    limit: int | None,
    need_answers: bool,
) -> Iterator[Record]:
    """Checked rows, one a record. `stamps` is here for the cache's sake."""
    form = None
    for place, record in islice(_records(name, source), limit):
        if not isinstance(record, dict):
            raise DataError(f"{place}: is {_type(record)}; it must be an object with named fields.")
        record = _renamed(record, columns, place)
        kind = _recognise(record, place) if kind == "auto" else kind
        _check_fields(record, kind, place)
        row = KINDS[kind].convert(record, place)
        if need_answers and "messages" in row and all(message["role"] != "assistant" for message in row["messages"]):
            raise DataError(f"{place}: no message is from the assistant, so there is no answer to train on. Delete it.")
        form = form or [type(value) for value in row.values()]
        if form != [type(value) for value in row.values()]:
            raise DataError(f"{place}: prompts are strings in some records and messages in others. Keep one of them.")
        yield {**row, "source": place}
    if form is None:
        raise DataError(f"{name}: holds no record. Give data with at least one.")


def _renamed(record: Record, columns: tuple[tuple[str, str], ...], place: str) -> Record:
    for ours, theirs in columns:
        if theirs not in record:
            hint = did_you_mean(theirs, record)
            raise DataError(
                f"{place}: data.columns takes {ours!r} from {theirs!r}, which is missing "
                f"(found: {', '.join(record)}).{hint}"
            )
    kept = {name: value for name, value in record.items() if name not in dict(columns).values()}
    return kept | {ours: record[theirs] for ours, theirs in columns}


def _records(name: str, source: "tuple[Path, ...] | Dataset") -> Iterator[tuple[str, Any]]:
    """Every record with its place, "data/x.jsonl, record 12", counted from 1 in each file."""
    if not isinstance(source, tuple):
        yield from ((f"{name}, record {number}", record) for number, record in enumerate(source, 1))
        return
    for file in source:
        number = 0
        try:
            for number, record in enumerate(READERS[file.suffix.lower()](file), 1):
                yield f"{file}, record {number}", record
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 text (byte {error.start}). Convert the file to UTF-8.") from error
        if number == 0:
            raise DataError(f"{file}: the file is empty. Fill it or take it away.")


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno}). "
                        "Fix or delete the line."
                    ) from error


def _read_json(path: Path) -> Iterator[Any]:
    """A list of records; or, as many a .json file is, one record a line."""
    with path.open(encoding="utf-8-sig") as file:
        if not next((line for line in file if line.strip()), "").lstrip().startswith("["):
            yield from _read_jsonl(path)
            return
        file.seek(0)
        try:
            yield from json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {error.lineno}: not valid JSON ({error.msg} at column {error.colno}). Fix the file."
            ) from error


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # a text may be longer than the 128 KiB that a field is allowed by default
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            for row in rows:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, line {rows.reader.line_num}: more or fewer fields than the header's "
                        f"{len(rows.fieldnames or ())}. Fix or quote the line."
                    )
                yield row
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.reader.line_num}: not valid CSV ({error}). Fix the line.") from error


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file ({error}). Write it anew.") from error
    for batch in file.iter_batches(batch_size=1000):
        yield from batch.to_pylist()


def _read_txt(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig") as lines:
        for blank, paragraph in groupby(lines, key=lambda line: not line.strip()):
            if not blank:
                yield {"text": "".join(paragraph).rstrip("\n")}


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


def _files(path: str, key: str) -> tuple[Path, ...] | None:
    """The files that `path` names, or None where it can only be a Hub name."""
    target = Path(path).expanduser()
    known = ", ".join(READERS)
    if target.is_dir():
        files = tuple(file for file in sorted(target.iterdir()) if file.suffix.lower() in READERS)
        if not files:
            raise DataError(f"{key}: the folder {path} holds no file that can be read ({known}).")
        return files
    if target.is_file():
        if target.suffix.lower() not in READERS:
            raise DataError(f"{key}: {path} is of an unknown type {target.suffix!r}; known: {known}.")
        return (target,)
    if target.suffix.lower() in READERS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", path):
        raise DataError(f"{key}: there is no {path}.{_nearest(target)}")
    return None


def _from_hub(path: str, key: str, split: str) -> "Dataset":
    from datasets import load_dataset

    name, _, subset = path.partition(":")
    try:
        return load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{key}: {path!r} is no file here, and the Hub did not give it as a data set with the split {split!r} "
            f"({error}).{_nearest(Path(path))} Check the name and the network; without one, fetch it elsewhere with "
            f"`hf download --repo-type dataset {name}` and name its folder."
        ) from error


def _nearest(target: Path) -> str:
    if not target.parent.is_dir():
        return f" There is no folder {target.parent} either."
    return did_you_mean(str(target), map(str, target.parent.iterdir()))
