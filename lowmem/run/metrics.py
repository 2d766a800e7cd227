"""metrics.jsonl: what a run has logged, one JSON object per line."""

import json
import math
import sys
from numbers import Real
from pathlib import Path
from typing import Any

from lowmem.errors import LowmemError
from lowmem.files import write_file

Record = dict[str, Any]

METRICS = "metrics.jsonl"

# What every line has.
_ALWAYS = ("step", "tokens", "memory", "peak_memory", "weight_bytes")

# The only logged text: the parameter that contributes most to the model's norm (`scaled_adam`).
DOMINANT = "dominant_parameter"


def json_line(record: Record) -> str:
    """One line of metrics.jsonl. JSON has no NaN and no infinity: they become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"


def cut_metrics(path: Path, step: int) -> int:
    """Removes what was logged after `step`, which a resumed run logs again, and lines that cannot be read.

    Returns:
        The number of lines that could not be read.
    """
    if not path.exists():
        return 0
    records, damaged = _read(path)
    write_file(path, "".join(json_line(record) for record in records if record["step"] <= step).encode())
    return damaged


def read_metrics(run_dir: str | Path) -> list[Record]:
    """The records in a run's metrics.jsonl, without lines that are damaged or were not written completely."""
    return _read(Path(run_dir) / METRICS)[0]


def _read(path: Path) -> tuple[list[Record], int]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = [_record(line) for line in file if line.endswith("\n")]
    except OSError as error:
        raise LowmemError(f"{path}: can't be read: {error.strerror}. It is written while a run trains.") from error
    records = [record for record in lines if record is not None]
    return records, len(lines) - len(records)


def _record(line: str) -> Record | None:
    """A record whose names, hundreds where norms of parameters are logged, are shared by all records."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(type(record.get(name)) is int for name in _ALWAYS):
        return None
    if not all(isinstance(value, str if name == DOMINANT else Real | None) for name, value in record.items()):
        return None
    return {sys.intern(name): value for name, value in record.items()}


def nonfinite(record: Record) -> str:
    """What a step with a non-finite gradient is called: with a loss scale it is skipped as a matter of course."""
    return "skipped steps" if "loss_scale" in record else "non-finite steps"
