"""Functions that all commands share: options, a description of the machine, and files of results."""

import argparse
import datetime
import functools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks import pages
from benchmarks.methods import PACKAGES, Method, runnable, select
from benchmarks.processes import Figures, in_rounds
from lowmem.errors import LowmemError
from lowmem.files import write_file, writing
from lowmem.hf import version

OUT = Path("runs/bench")
CPUINFO = Path("/proc/cpuinfo")


# -- options -----------------------------------------------------------------------------------------------------------


def make_parser(
    doc: str, counts: Mapping[str, tuple[int, str]], *, dtype: bool = True, only: str | None = None
) -> argparse.ArgumentParser:
    """Returns a parser with `--out`, usually `--dtype`, and an option for each count.

    Args:
        doc: docstring of the command, whose first line is the description.
        counts: name of an option → default and description.
        only: noun for the values of `--only`, such as "method". None omits this option.
    """

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
        return int(text)

    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    for name, (default, description) in counts.items():
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=f"{description} ({default})")
    if dtype:
        usual = default_dtype()
        description = f"dtype of the weights ({usual})"
        parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=usual, help=description)
    if only is not None:
        description = f"only this {only}; repeatable"
        parser.add_argument("--only", action="append", default=[], metavar="NAME", help=description)
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"folder for the results ({OUT})")
    return parser


def command(main: Callable[[Sequence[str] | None], None]) -> Callable[..., None]:
    """Wraps a command: a `LowmemError` prints its message and exits with status 2, Ctrl-C exits with status 130."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> None:
        try:
            main(argv)
        except LowmemError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return run


@contextmanager
def output(folder: Path) -> Iterator[None]:
    """Creates the folder for results before measuring, and removes it if nothing was written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


# -- the machine -------------------------------------------------------------------------------------------------------


def default_dtype() -> str:
    """Returns bfloat16, or float32 if the GPU (or without a GPU, the CPU) does not have bfloat16 instructions."""
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    known = flags is not None and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())
    return "bfloat16" if known else "float32"


def _cpu() -> str:
    name = re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE) if CPUINFO.exists() else None
    return name[1] if name else platform.machine()


def machine() -> dict[str, Any]:
    """Describes the hardware, the versions, the date and the commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=pages.ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bfloat16_instructions": default_dtype() == "bfloat16",
        "torch": torch.__version__,
        "packages": {name: number for name in PACKAGES if (number := version(name)) is not None},
        "date": datetime.date.today().isoformat(),
        **({"commit": commit} if commit else {}),
    }


# -- results -----------------------------------------------------------------------------------------------------------


def save(file: Path, settings: Mapping[str, Any], **parts: Any) -> None:
    """Writes results as JSON, with their settings and the machine."""
    text = json.dumps({"settings": settings, "machine": machine(), **parts}, indent=2, default=str) + "\n"
    write_file(file, text.encode())


def publish(
    out: Path, name: str, settings: Mapping[str, Any], tables: Callable[[Any], Mapping[str, str]],
    pictures: Mapping[str, pages.Picture] = MappingProxyType({}), **parts: Any,
) -> None:  # fmt: skip
    """Saves results, prints tables, draws pictures, and updates pages if `out` is benchmarks/results."""
    file = out / f"{name}.json"
    save(file, settings, **parts)
    report = json.loads(file.read_text())
    print(pages.about(report), *tables(report).values(), sep="\n\n")
    for method, error in report.get("failed", {}).items():
        print(f"{method} failed: {error}")
    for method, requirement in report.get("left_out", {}).items():
        print(f"skipped: {method} ({requirement})")
    pages.draw(file, pictures)
    if out.resolve() == pages.RESULTS:
        pages.write(pages.RESULTS / file.name)
    print(f"\nwrote {file}{' and its pictures' if pictures else ''}")


def compare(
    methods: Mapping[str, Method], options: argparse.Namespace, name: str, settings: Mapping[str, Any],
    tables: Callable[[Any], Mapping[str, str]], measure: Callable[[str, Path], Figures], longest: str = "",
) -> None:  # fmt: skip
    """Measures the selected methods with `in_rounds` and publishes the results. Exits with status 1 if the floor or a
    method of lowmem failed.
    """
    names, left_out = runnable(select(methods, options.only))
    with output(options.out):
        results, failed = in_rounds(names, options.rounds, measure, longest)
        publish(options.out, name, settings, tables, results=results, failed=failed, left_out=left_out)
    if any(methods[method].kind != "peer" for method in failed):
        sys.exit(1)


def ratio(results: Mapping[str, Figures], name: str, base: str | None) -> str:
    """Formats the ratio of the seconds of a method and of `base`. Returns a dash if `base` was not measured."""
    return formatted(results[name]["seconds"] / results[base]["seconds"] if base in results else None, ".2f")


def formatted(value: float | None, form: str) -> str:
    """Formats a number, or returns a dash if it was not measured."""
    return "–" if value is None else format(value, form)
