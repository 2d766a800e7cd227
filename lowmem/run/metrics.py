"""metrics.jsonl: what a run has logged, one JSON object per line."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from lowmem.errors import LowmemError
from lowmem.files import write_file

Record = dict[str, Any]

METRICS = "metrics.jsonl"

# The only logged text: the parameter that contributes most to the model's norm (`scaled_adam`).
DOMINANT = "dominant_parameter"


def json_line(record: Record) -> str:
    """One line of metrics.jsonl. JSON has no NaN and no infinity: they become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"


def cut_metrics(path: Path, step: int) -> None:
    """Removes what was logged after `step`, which a resumed run logs again."""
    if path.exists():
        records = [record for record in read_metrics(path.parent) if record["step"] <= step]
        write_file(path, "".join(map(json_line, records)).encode())


def read_metrics(run_dir: str | Path) -> list[Record]:
    """The records in a run's metrics.jsonl; a last line that was not written completely is left out."""
    path, records = Path(run_dir) / METRICS, []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    records.append(json.loads(line, object_pairs_hook=_record))
    except OSError as error:
        raise LowmemError(f"{path}: can't be read: {error.strerror}. It is written while a run trains.") from error
    except json.JSONDecodeError as error:
        raise LowmemError(f"{path}, line {len(records) + 1}: not JSON: {error.msg}. Delete the line.") from error
    return records


def _record(pairs: list[tuple[str, Any]]) -> Record:
    """A record whose names, hundreds where norms of parameters are logged, are shared by all records."""
    return {sys.intern(name): value for name, value in pairs}


def nonfinite(record: Record) -> str:
    """What a step with a non-finite gradient is called: with a loss scale it is skipped as a matter of course."""
    return "skipped steps" if "loss_scale" in record else "non-finite steps"
