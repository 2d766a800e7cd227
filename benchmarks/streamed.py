"""Training with weights in files: the resident memory, the time of a step, and the bytes read and written.

    python -m benchmarks.streamed [--layers 11 --hidden 2048 --tokens 16 --steps 4] [--out benchmarks/results]

A Llama with random float32 weights is saved, loaded in a new process, and trained by AdaLomo on a CPU, once as usual
and then with `lowmem.stream(model, "cpu", home=FOLDER)`. The device is then the memory of the process, and the home of
the layers is the disk. A thread samples the resident memory, and figures are above a process that has imported
everything. The system also caches the files, in memory that it gives to others when they ask for it. One run drops this
cache all the time, as a machine does whose memory is full.
"""

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lowmem
from benchmarks import reports
from benchmarks.measurement import llama, loss_of
from benchmarks.methods import select
from benchmarks.pages import markdown
from benchmarks.processes import MeasurementError, alone, repeated, resident
from benchmarks.reports import command, formatted

Options = argparse.Namespace
VOCABULARY = 4096
LOCAL = "local"


class Run(NamedTuple):
    """The training of a model.

    Attributes:
        streamed: by `lowmem.stream`, with files as its home.
        share: of the weights, for which there is memory on the device; None lets all layers stream.
        drops: the page cache of the files is dropped.
    """

    streamed: bool = True
    share: float | None = None
    drops: bool = False


METHODS = {
    LOCAL: Run(streamed=False),
    "streamed": Run(),
    "streamed, page cache dropped": Run(drops=True),
    "streamed, `device_memory` 30% of the weights": Run(share=0.3),
}


def sampled(peaks: dict[str, dict[str, int]], phase: list[str]) -> contextlib.AbstractContextManager[None]:
    """Samples the resident memory until the context is left: the maximum over the first sample, by phase and kind."""
    first = resident()

    def sample() -> None:
        most, over = peaks.setdefault(phase[-1], {}), {kind: size - first[kind] for kind, size in resident().items()}
        for kind, size in (over | {"all": sum(over.values())}).items():
            most[kind] = max(most.get(kind, 0), size)

    return repeated(sample, 0.005)


def opened(folder: Path) -> list[Path]:
    """The files of a folder that this process has open. They have no names there."""
    descriptors = Path(f"/proc/{os.getpid()}/fd")
    return [
        path for path in descriptors.iterdir() if path.is_symlink() and path.readlink().is_relative_to(folder.resolve())
    ]


def drop(files: list[Path]) -> None:
    """Drops files from the page cache, except for pages that are in use."""
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def io() -> dict[str, int]:
    """Bytes that this process has made the disks read and write."""
    text = Path("/proc/self/io").read_text()
    return {kind: int(size) for kind, size in re.findall(r"^(read|write)_bytes: (\d+)", text, re.MULTILINE)}


def cached(files: list[Path]) -> int:
    """Bytes of files in the page cache."""
    listed = subprocess.run(["fincore", "-nbo", "RES", *map(str, files)], capture_output=True, text=True, check=True)
    return sum(map(int, listed.stdout.split()))


def measure(name: str, folder: Path, options: Options) -> dict[str, Any]:
    """Trains in this process."""
    from torch._inductor import compile_fx  # noqa: F401 (memory of an import)
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama  # noqa: F401

    run, home = METHODS[name], folder / "home"
    peaks: dict[str, dict[str, int]] = {}
    phase, steps, losses = ["load"], list[dict[str, float]](), list[float]()
    generator = torch.Generator().manual_seed(1)
    with sampled(peaks, phase), contextlib.ExitStack() as stack:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        weights = sum(param.nbytes for param in model.parameters())
        layers = sum(param.nbytes for param in model.model.layers.parameters())
        streaming, files = None, list[Path]()
        if run.streamed:
            budget = None if run.share is None else int(run.share * weights)
            streaming = lowmem.stream(model, "cpu", home=home, device_memory=budget)
            files = opened(home)
        if run.drops:
            stack.enter_context(repeated(partial(drop, files), 0.1))
        opt = lowmem.FusedOptimizer(model.named_parameters(), "adalomo", lr=1e-3, model=model)
        for step in range(options.steps + 1):
            phase.append("step" if step else "first step")
            ids = torch.randint(VOCABULARY, (1, options.tokens), generator=generator)
            before = counted(streaming)
            losses.append(float(opt.backward(loss_of(model, ids))))
            steps.append({kind: value - before[kind] for kind, value in counted(streaming).items()})
        in_cache = cached(files) if files else 0
    medians = {kind: statistics.median(step[kind] for step in steps[1:]) for kind in steps[0]}
    return {
        **medians, "first_step": steps[0]["seconds"], "weights": weights, "layers": layers, "peaks": peaks,
        "losses": losses, "cached": in_cache,
    }  # fmt: skip


def counted(streaming: Any) -> dict[str, float]:
    """Seconds and bytes until now."""
    bytes_moved = {kind: getattr(streaming, kind, 0) for kind in ("fetched", "written")}
    return {"seconds": time.perf_counter(), "processor": time.process_time(), **bytes_moved, **io()}


def tables(report: Any) -> dict[str, str]:
    rows, base = [], report["results"].get(LOCAL)
    for name, row in report["results"].items():
        load, step = (
            max(row["peaks"][phase]["all"] for phase in phases) for phases in (("load",), ("first step", "step"))
        )

        def moved(kind: str, row: Any = row) -> str:
            return f"{row[kind] / row['layers']:.2f}"

        def slower(kind: str, row: Any = row) -> str:
            return formatted(row[kind] / base[kind] if base else None, ".2f")

        rows.append(
            {
                "training": name, "loading, MiB": f"{load / 2**20:,.0f}",
                "steps, MiB (of the weights)": f"{step / 2**20:,.0f} ({step / row['weights']:.0%})",
                "s/step": f"{row['seconds']:.1f}", "× local": slower("seconds"),
                "processor time, × local": slower("processor"),
                "fetched, × layers": moved("fetched"), "written, × layers": moved("written"),
                "read from disk, × layers": moved("read"), "written to disk, × layers": moved("write"),
                "losses": "equal" if base and row["losses"] == base["losses"] else "–",
            }
        )  # fmt: skip
    return {"": markdown(rows)}


def save(folder: Path, options: Options) -> None:
    """Writes the model in files of several layers."""
    intermediate = -(-options.hidden * 8 // 3 // 256) * 256
    model = llama(options.layers, options.hidden, intermediate, VOCABULARY, "float32")
    model.save_pretrained(folder / "model", max_shard_size="400MB")


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {
        "layers": (11, "layers of the Llama"), "hidden": (2048, "its hidden size"), "tokens": (16, "tokens per step"),
        "steps": (4, "steps after the first one"),
    }  # fmt: skip
    options = reports.make_parser(__doc__ or "", counts, dtype=False, only="method").parse_args(argv)
    with reports.output(options.out), tempfile.TemporaryDirectory(prefix="lowmem-bench-", dir=options.out) as path:
        alone(save, Path(path), options)
        results, failed = {}, {}
        for name in select(METHODS, options.only):
            print(name, flush=True)
            try:
                results[name] = alone(measure, name, Path(path), options)
            except MeasurementError as error:
                failed[name] = str(error)
        settings = {key: getattr(options, key) for key in counts} | {"vocabulary": VOCABULARY, "dtype": "float32"}
        reports.publish(options.out, "streamed", settings, tables, results=results, failed=failed)


if __name__ == "__main__":
    main()
