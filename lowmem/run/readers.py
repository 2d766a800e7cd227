"""Data files become records; each record has a place, as in "data/x.jsonl, record 12", and each error too.

The readers of datasets 5.2 turn a missing field into null and the text "007" of a CSV file into the number 7, fill
short lines of a CSV file, take the last of two equal keys, and don't name the line of an error.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet  # type: ignore[import-untyped]

from lowmem.errors import DataError

Record = dict[str, Any]

_SPACE, _SURROGATE = re.compile(r"[ \t\n\r]*"), re.compile(r"\\u[dD]")


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields each record of a file and its place; every file counts from 1.

    Raises:
        DataError: the file cannot be read, is damaged, or has no record.
    """
    number = 0
    try:
        for number, record in enumerate(READERS[path.suffix.lower()](path), 1):
            yield f"{shown(path)}, record {number}", record
    except UnicodeDecodeError as error:
        with path.open("rb") as lines:  # a decoder reads ahead and doesn't know the line
            number = next(n for n, line in enumerate(lines, 1) if line.decode(errors="ignore").encode() != line)
        raise DataError(f"{shown(path)}, line {number}: not UTF-8 text. Convert the file to UTF-8.") from error
    except OSError as error:
        raise DataError(f"{shown(path)} cannot be read: {error.strerror}.") from error
    if number == 0:
        raise DataError(f"{shown(path)}: the file has no records. Fill it or delete it.")


def shown(path: Path | str) -> str:
    """A path for messages; names of files need not be Unicode."""
    return str(path).encode(errors="backslashreplace").decode()


def listed(names: Iterable[str]) -> str:
    """Names for messages, such as "a, b and 9 more"."""
    names = list(names)
    plain = [name if name.isprintable() else repr(name) for name in names[:10]]
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(name if len(name) <= 40 else f"{name[:40]} ..." for name in plain) + more


def _lines(path: Path, newline: str | None = None) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", newline=newline) as text:
        for number, line in enumerate(text, 1):
            if "\0" in line:  # so has UTF-16 without a mark, where it is not invalid UTF-8
                raise DataError(f"{shown(path)}, line {number}: has a NUL byte, which no text has. Convert the file to "
                                "UTF-8.")  # fmt: skip
            yield line


# ------------------------------------------------------------------------------------------------------------- JSON


def _read_jsonl(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_lines(path)):
        if line.strip():
            record, end = _decode(line, 0, path, number)
            if line[end:].strip():
                raise _invalid("Extra data", line, end, path, number)
            yield record


def _read_json(path: Path) -> Iterator[Any]:
    """A list of records, or, as in many .json files, one record per line."""
    text = path.read_text(encoding="utf-8-sig")
    end = _skip_space(text, 0)
    if text[end : end + 1] != "[":
        yield from _read_jsonl(path)
        return
    following = _skip_space(text, end + 1)
    if text[following : following + 1] == "]":
        end = following
    while text[end] != "]":
        record, end = _decode(text, end + 1, path)
        yield record
        end = _skip_space(text, end)
        if text[end : end + 1] not in (",", "]"):
            raise _invalid("Expecting ',' or ']'", text, end, path)
    if text[end + 1 :].strip():
        raise _invalid("Extra data", text, end + 1, path)


def _skip_space(text: str, start: int) -> int:
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]


def _decode(text: str, start: int, path: Path, lines_before: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends."""
    start = _skip_space(text, start)
    try:
        record, end = _DECODER.raw_decode(text, start)
        if _SURROGATE.search(text, start, end):
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _invalid(error.msg, text, error.pos, path, lines_before) from error
    except RecursionError as error:
        raise _invalid("Nested too deeply", text, start, path, lines_before) from error
    except UnicodeEncodeError as error:
        half = f"Half a character, {error.object[error.start]!r},"
        raise _invalid(half, text, start, path, lines_before) from error
    except ValueError as error:  # of `_unique`, or an integer of thousands of digits
        raise _invalid(str(error).partition(";")[0], text, start, path, lines_before) from error
    return record, end


def _unique(pairs: list[tuple[str, Any]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError(f"Two values of {listed(map(repr, _repeated(name for name, _ in pairs)))}")
    return record


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _invalid(reason: str, text: str, position: int, path: Path, lines_before: int = 0) -> DataError:
    line = lines_before + text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return DataError(f"{shown(path)}, line {line}: not valid JSON ({reason} at column {column}). Fix or delete it.")


# ---------------------------------------------------------------------------------------------------- other formats


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default limit of a field is 128 KiB
    rows, line, header = csv.reader(_lines(path, newline=""), strict=True), 1, None
    try:
        for row in rows:
            place = f"{shown(path)}, line {line}"
            if header is not None and row and len(row) != len(header):
                raise DataError(
                    f"{place}: {len(row)} fields, unlike the header's {len(header)}. Fix or quote the line."
                )
            if header is not None and row:
                yield dict(zip(header, row, strict=True))
            elif row:
                header = row
                if repeated := _repeated(header):
                    names = listed(map(repr, repeated))
                    raise DataError(f"{place}: the header has several columns {names}. Rename or delete them.")
            line = rows.line_num + 1  # in which the next row begins
    except csv.Error as error:
        raise DataError(f"{shown(path)}, line {line}: not valid CSV ({error}). Fix the line.") from error


def _read_parquet(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        try:
            parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
            if repeated := _repeated(parquet.schema_arrow.names):
                names = listed(map(repr, repeated))
                raise DataError(f"{shown(path)}: it has several columns {names}. Rename or delete them.")
            for batch in parquet.iter_batches(batch_size=1000):
                yield from batch.to_pylist()
        except DataError:
            raise
        except Exception as error:  # damage shows as errors of many types, in Arrow and in conversions to Python
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{shown(path)}: not a Parquet file that can be read ({reason}). Write it again."
            ) from error


def _read_txt(path: Path) -> Iterator[Record]:
    paragraphs = groupby(_lines(path), key=lambda line: not line.strip())
    yield from ({"text": "".join(paragraph).rstrip("\n")} for blank, paragraph in paragraphs if not blank)


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet, ".txt": _read_txt,
}  # fmt: skip
