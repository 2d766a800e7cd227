"""Records a run of the tests with other versions of packages, and writes the tables of docs/reference/tested.md.

scripts/test.sh --stack NAME runs it in the environment of the stack: python scripts/stacks.py NAME JUNIT_XML
"""

import json
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "tested.md"
RESULTS = ROOT / "benchmarks" / "results" / "stacks.json"
MARKS = "<!-- stacks -->\n", "<!-- /stacks -->"
KINDS = tuple(f"{part}: passed / failed / skipped" for part in ("trainers", "engine"))
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "deepspeed")
TITLES = ("torch", "transformers", "TRL", "Accelerate", "datasets", "DeepSpeed")
# paths or modules of the engine's tests; all others are tests of trainers
ENGINE = re.compile(r"tests.(tiles|rules|step|layers|placements).(?!test_zero3)")


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Returns the outcome of a test, and the reason why it was skipped or the error that it raised."""
    for result in case:
        if result.tag in ("failure", "error", "skipped"):
            first = (result.get("message") or "").partition("\n")[0]
            without_folders = re.sub(r"/[^\s']*/", "", first)
            return ("skipped" if result.tag == "skipped" else "failed"), without_folders[:120]
    return "passed", ""


def summary(cases: Iterable[ElementTree.Element]) -> dict[str, Any]:
    """Returns the numbers of passed, failed and skipped tests, by part of the package, with reasons and errors."""
    counts = {"trainers": Counter[str](), "engine": Counter[str]()}
    reasons = Counter[str]()
    errors: dict[str, str] = {}
    for case in cases:
        name = case.get("classname", "")
        ended, why = outcome(case)
        counts["engine" if ENGINE.match(name) else "trainers"][ended] += 1
        if ended == "skipped":
            reasons[why] += 1
        elif ended == "failed":
            errors[f"{name.rpartition('.')[2]}::{case.get('name')}"] = why
    return {**counts, "skipped": dict(sorted(reasons.items())), "failed": errors}


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"


def tables(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the tables of the page: the runs, and the tests that failed."""
    names = [f"{run['stack']}, Python {run['python']}" for run in runs]
    yield row("stack", "Python", *TITLES, *KINDS, "share of the engine's tests")
    yield row(*["---"] * (5 + len(TITLES)))
    for run in runs:
        parts = (run["trainers"], run["engine"])
        counts = (" / ".join(str(part.get(key, 0)) for key in ("passed", "failed", "skipped")) for part in parts)
        versions = (run["versions"][package] for package in PACKAGES)
        share = f"1 in {run['every']}" if run["every"] > 1 else "all" if run["engine"] else "–"
        yield row(f"`{run['stack']}`", run["python"], *versions, *counts, share)
    if not any(run["failed"] for run in runs):
        return
    yield "\nTests that failed:\n"
    yield row("error", "stack", "tests")
    yield row("---", "---", "---")
    for name, run in zip(names, runs, strict=True):
        for error in dict.fromkeys(run["failed"].values()):
            tests = (f"`{test}`" for test, other in run["failed"].items() if other == error)
            yield row(f"`{error}`", name, ", ".join(tests))


def write(page: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    before, after = re.split(f"(?s){MARKS[0]}.*{MARKS[1]}", page.read_text())
    page.write_text(f"{before}{MARKS[0]}{chr(10).join(tables(runs))}\n{MARKS[1]}{after}")


def main(stack: str, report: str) -> None:
    run = {
        "stack": stack,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "every": int(os.environ.get("LOWMEM_EVERY", "1")),
        "versions": {package: metadata.version(package).partition("+")[0] for package in PACKAGES},
        **summary(ElementTree.parse(report).iter("testcase")),
    }
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    runs = [other for other in runs if (other["stack"], other["python"]) != (stack, run["python"])] + [run]
    runs.sort(key=lambda run: (run["stack"], run["python"]))
    RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    write(PAGE, runs)


if __name__ == "__main__":
    main(*sys.argv[1:])
