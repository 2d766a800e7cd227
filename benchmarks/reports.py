"""What all commands share: options, the machine, tables, JSON files and pictures."""

import argparse
import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines import PACKAGES
from lowmem.errors import LowmemError
from lowmem.files import write_file, writing
from lowmem.run.environment import cpu, version

OUT = Path("runs/bench")
CPUINFO = Path("/proc/cpuinfo")
COLORS = {"floor": "#e6e6e6", "ours": "#2a8f7c", "peer": "#c9ced6"}


# -- options -----------------------------------------------------------------------------------------------------------


def make_parser(
    doc: str, counts: Mapping[str, tuple[int, str]], *, dtype: bool = True, only: str | None = None
) -> argparse.ArgumentParser:
    """Returns a parser with `--out`, usually `--dtype`, and an option for each count.

    Args:
        doc: the command's docstring; its first line is the description.
        counts: default and description by name.
        only: what `--only` selects, if there is that option.
    """

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
        return int(text)

    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    for name, (default, what) in counts.items():
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=f"{what} ({default})")
    if dtype:
        usual = default_dtype()
        parser.add_argument(
            "--dtype", choices=("bfloat16", "float32"), default=usual, help=f"dtype of the weights ({usual})"
        )
    if only is not None:
        what = f"only this {only}; repeatable"
        parser.add_argument("--only", action="append", default=[], metavar="NAME", help=what)
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"where the results are written ({OUT})")
    return parser


def command(main: Callable[[Sequence[str] | None], None]) -> Callable[..., None]:
    """A command that turns the user's mistakes into a message and exit status 2, and Ctrl-C into 130."""

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
def output(folder: Path, name: str) -> Iterator[None]:
    """Creates the folder of the results before anything is measured, and removes it if nothing was written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
        files = " and ".join(path.name for path in sorted(folder.glob(f"{name}.*")) if path.suffix in (".json", ".png"))
        print(f"\nwrote {files} to {folder}")
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


# -- the machine -------------------------------------------------------------------------------------------------------


def has_bfloat16() -> bool:
    """Whether the GPU, or the CPU where there is none, has bfloat16 instructions; without them it emulates bfloat16."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return flags is not None and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())


def default_dtype() -> str:
    """bfloat16, or float32 on a processor that would emulate bfloat16."""
    return "bfloat16" if has_bfloat16() else "float32"


def machine() -> dict[str, Any]:
    """Describes the hardware and the versions."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bfloat16_instructions": has_bfloat16(),
        "torch": torch.__version__,
        "packages": {name: number for name in PACKAGES if (number := version(name)) is not None},
    }


def headline(dtype: str) -> str:
    """The machine and the dtype in one line."""
    known = machine()
    device = known["gpu"] or f"{known['cpu']}, {known['threads']} of {known['cores']} cores"
    reason = "" if known["bfloat16_instructions"] else " (the processor has no bfloat16 instructions)"
    return f"{device}; torch {known['torch']}; {dtype}{reason}"


# -- results -----------------------------------------------------------------------------------------------------------


def save(path: Path, settings: Mapping[str, Any], **parts: Any) -> None:
    """Writes results as JSON, with their settings and the machine."""
    report = {"settings": settings, "machine": machine(), **parts}
    write_file(path, (json.dumps(report, indent=2, default=str) + "\n").encode())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state, those of compensated rounding included."""
    states = optimizer.state_dict()["state"].values()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table with aligned columns."""
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("| " + " | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) + " |")


def print_missing(failed: Mapping[str, str], left_out: Mapping[str, str]) -> None:
    """Prints which rows a table does not have, and why."""
    for name, why in failed.items():
        print(f"\n{name} failed: {why}")
    for name, why in left_out.items():
        print(f"\nleft out: {name} ({why})")


def formatted(value: float | None, form: str) -> str:
    """A number as text; a dash for what was not measured."""
    return "–" if value is None else format(value, form)


@contextmanager
def picture(path: Path, title: str, size: tuple[float, float], columns: int, **layout: Any) -> Iterator[Any]:
    """Gives the axes of a figure with `columns` panels, and writes it as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, columns, **layout)
    yield panels
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    write_file(path, png.getvalue())


@dataclass(frozen=True)
class Bars:
    """One panel of horizontal bars. `parts` are stacked: values and colors by the name that the legend shows."""

    label: str
    parts: Mapping[str, tuple[Sequence[float], str | Sequence[str]]]
    form: str = "{:.2f}"


def draw_bars(path: Path, title: str, names: Sequence[str], panels: Sequence[Bars]) -> None:
    """Draws a bar for each name in each panel, the first name at the top."""
    size = (5.0 * len(panels), 1.6 + 0.31 * len(names))
    with picture(path, title, size, len(panels), sharey=True) as all_axes:
        for axes, panel in zip(all_axes, panels, strict=True):
            ends = [0.0] * len(names)
            for name, (values, colors) in panel.parts.items():
                bars = axes.barh(names, values, left=ends, color=colors, label=name)
                ends = [end + value for end, value in zip(ends, values, strict=True)]
            axes.bar_label(bars, [panel.form.format(end) for end in ends], padding=3, fontsize=9)
            axes.set_xlabel(panel.label)
            axes.margins(x=0.16, y=0.02)
            if len(panel.parts) > 1:
                axes.legend(fontsize=8, frameon=False)
        all_axes[0].invert_yaxis()
