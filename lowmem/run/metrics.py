"""The metrics of a run: the trainer's log history, which metrics.jsonl contains as one JSON object per line."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowmem.files import write_file

Record = dict[str, Any]

METRICS = "metrics.jsonl"

# The only logged text: the parameter that contributes most to the model's norm (`scaled_adam`).
DOMINANT = "dominant_parameter"


def json_line(record: Record) -> str:
    """One line of metrics.jsonl. JSON has no NaN and no infinity: they become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, default=str) + "\n"


def write_metrics(folder: Path, records: Iterable[Record]) -> None:
    """Overwrites metrics.jsonl, because a resumed run repeats the steps after its checkpoint and logs them again."""
    write_file(folder / METRICS, "".join(map(json_line, records)).encode())


def series(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    """The steps and values of one metric; a value that was not finite is NaN."""
    rows = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in rows], [math.nan if value is None else value for _, value in rows]


def main_metric(records: Iterable[Record]) -> str:
    """The metric that a run improves: the reward of GRPO and RLOO, whose loss stays near 0, or else the loss."""
    return "reward" if any("reward" in record for record in records) else "loss"


def evaluations(records: list[Record], metric: str) -> list[str]:
    """The keys of a metric in evaluations: one, or one per evaluation dataset."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if re.fullmatch(rf"eval_(.+_)?(?<!aux_){metric}", key)]
