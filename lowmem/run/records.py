"""Data files and Hub data sets become checked rows; what cannot be trained on is named by file and record."""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from lowmem.errors import DataError, did_you_mean
from lowmem.files import checksum
from lowmem.run import readers
from lowmem.run.checks import Problem, mapping, problems
from lowmem.run.readers import READERS, Record, listed, shown

# The cache of `datasets` identifies a function by its name alone, so cached rows also depend on these files.
CODE = [Path(__file__).with_name(name) for name in ("checks.py", "data.py", "readers.py", "records.py")]

# `datasets` would take a name without a slash for one of its readers of local files, and a first "." for a directory.
_HUB_NAME = r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?"


def _refuse(value: Any) -> Any:
    if value not in (None, "", []):
        raise ValueError("is not supported. Delete it where it is not needed.")
    return value


def _messages(role: str, content: str, roles: Any) -> Any:
    message = mapping({role: roles, content: str}, dict.fromkeys(REFUSED["message"], Refused), extra="ignore")
    convert = AfterValidator(lambda turn: {"role": USUAL_ROLES.get(turn[role], turn[role]), "content": turn[content]})
    turns = list[Annotated[message, convert]]  # type: ignore[valid-type]
    return Annotated[turns, Field(min_length=1, fail_fast=True)]  # type: ignore[valid-type]


# Fields that would change what is trained on are refused. Any other extra field is metadata and is ignored.
Refused = Annotated[Any, AfterValidator(_refuse)]
REFUSED = {
    "record": ("tools", "images", "image", "input_ids", "chat_template_kwargs"),
    "message": ("tool_calls", "reasoning_content", "thinking", "weight"),
}
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
        raise DataError(f"{place}: no kind fits the fields {listed(record) or '(none)'}. The kinds need {needs}. Name "
                        "what corresponds in data.columns.")  # fmt: skip
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
    return f"{place}: {subject} is missing (found: {listed(record)}).{needs}"


def read_rows(path: str, key: str, split: str, **options: Any) -> datasets.Dataset:
    """Reads all rows of a file, a directory or a Hub name, each with its `source`; `datasets` caches them.

    `key` is the name of `path` in messages, `options` are those of `_rows`. Raises `DataError` for the first file or
    record that cannot be used.
    """
    files = _files(path, key)
    source = _from_hub(path, key, split) if files is None else files
    options |= {"name": path, "source": source, "digests": _digests(files or ()), "code": _digests(CODE)}
    try:
        return datasets.Dataset.from_generator(_rows, gen_kwargs=options)
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__ or error
        if isinstance(reason, OSError):
            raise DataError(f"{key}: the rows of {shown(path)} cannot be cached in "
                            f"{datasets.config.HF_DATASETS_CACHE}: {reason}. Name another directory in "
                            "HF_DATASETS_CACHE.") from error  # fmt: skip
        raise reason from None


def _digests(files: Iterable[Path]) -> tuple[str, ...]:
    """Hashes of contents, by which cached rows are found: a file can change and keep its size and time."""
    digests = []
    for path in files:
        try:
            digests.append(checksum(path))
        except OSError as error:
            raise DataError(f"{shown(path)} cannot be read: {error.strerror}.") from error
    return tuple(digests)


def _rows(name: str, source: tuple[Path, ...] | datasets.Dataset, kind: str, columns: Mapping[FieldName, str],
          limit: int | None, need_answers: bool, digests: tuple[str, ...], **_: Any) -> Iterator[Record]:  # fmt: skip
    form = None
    for place, record in islice(_records(name, source), limit):
        if not isinstance(record, dict):
            raise DataError(f"{place}: should be an object with named fields, found a {type(record).__name__}.")
        record = _renamed(record, columns, place)
        kind = _recognise(record, place) if kind == "auto" else kind
        row = _row(record, kind, place)
        if empty := _empty(row):
            raise DataError(
                f"{place}: {empty} is empty, so there is nothing to train on. Fill it or delete the record."
            )
        if need_answers and "messages" in row and all(message["role"] != "assistant" for message in row["messages"]):
            raise DataError(f"{place}: no message is from the assistant, so there is no answer to train on. Delete it.")
        types = {type(value) for value in row.values()}
        if types != (form := form or types):
            raise DataError(f"{place}: prompts are strings in some records and messages in others. Keep one of them.")
        yield {**row, "source": place}
    if form is None:
        raise DataError(f"{name}: there are no records.")
    if isinstance(source, tuple) and _digests(source) != digests:
        raise DataError(f"{shown(name)} was changed while it was read. Start again.")


def _records(name: str, source: tuple[Path, ...] | datasets.Dataset) -> Iterator[tuple[str, Any]]:
    """Each record of files or a data set and where it is, as in "data/x.jsonl, record 12"."""
    if isinstance(source, tuple):
        return chain.from_iterable(map(readers.read, source))
    return ((f"{name}, record {number}", record) for number, record in enumerate(source, 1))


def _empty(row: Record) -> str | None:
    """Which text to train on is blank."""
    if "text" in row:
        return None if row["text"].strip() else "the text"
    turns = row["messages"] if "messages" in row else row["completion"]
    answers = [turns] if isinstance(turns, str) else [turn["content"] for turn in turns if turn["role"] == "assistant"]
    return None if all(answer.strip() for answer in answers) else "an answer"


def _renamed(record: Record, columns: Mapping[FieldName, str], place: str) -> Record:
    for field, theirs in columns.items():
        if theirs not in record:
            hint = did_you_mean(theirs, record)
            raise DataError(f"{place}: data.columns takes {field!r} from {theirs!r}, which is missing (found: "
                            f"{listed(record)}).{hint}")  # fmt: skip
    others = {name: value for name, value in record.items() if name not in columns.values()}
    return others | {field: record[theirs] for field, theirs in columns.items()}


def _files(path: str, key: str) -> tuple[Path, ...] | None:
    """The files at `path`, or None where it can only be a Hub name."""
    known = ", ".join(READERS)
    try:
        target = Path(path).expanduser()
        entries = sorted(target.iterdir()) if target.is_dir() else [target] if os.path.lexists(target) else []
        files = tuple(file for file in entries if file.suffix.lower() in READERS)
        for file in files:
            if not stat.S_ISREG(file.stat().st_mode):  # a pipe or a device may never end
                raise DataError(
                    f"{key}: {shown(file)} is not a file but a directory, a pipe or a device. Move it away."
                )
        if files:
            return files
        if target.is_dir():
            raise DataError(f"{key}: the directory {shown(path)} has no file of a known type ({known}).")
        if entries:
            raise DataError(f"{key}: {shown(path)} is of an unknown type {target.suffix!r}; known: {known}.")
        if target.suffix.lower() in READERS:
            raise DataError(f"{key}: {_shortened(path)} does not exist.{_nearest(target)}")
        if not re.fullmatch(_HUB_NAME, path) or Path(path.partition(":")[0]).exists():
            raise DataError(f"{key}: {_shortened(path)} does not exist, and a name on the Hub is org/name or "
                            f"org/name:config.{_nearest(target)}")  # fmt: skip
    except (OSError, RuntimeError) as error:  # such as a broken link, or ~user of a user that does not exist
        raise DataError(f"{key}: {_shortened(path)} cannot be read: {_shortened(str(error))}.") from error
    return None


def _from_hub(path: str, key: str, split: str) -> datasets.Dataset:
    name, _, subset = path.partition(":")
    try:
        return datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{key}: {path!r} is not a local file, and the Hub gave no data set with the split {split!r} "
                        f"({reason}).{_nearest(Path(path))} Check the name and the network, or download the data "
                        f"elsewhere (hf download --repo-type dataset {name}) and name it.") from error  # fmt: skip


def _nearest(target: Path) -> str:
    if not target.parent.is_dir():
        return f" The directory {_shortened(str(target.parent))} does not exist either."
    return did_you_mean(str(target), map(str, target.parent.iterdir()))


def _shortened(path: str) -> str:
    return shown(path) if len(path) <= 200 else f"{shown(path[:200])} ..."
