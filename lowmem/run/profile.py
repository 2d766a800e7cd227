"""Measures the memory of training steps, and draws it together with the prediction of a plan.

The trainer of the run takes the steps, with random weights and rows of maximum length, so weights are not downloaded.
"""

import json
import resource
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowmem.files import write_file, writing
from lowmem.run import pictures
from lowmem.run.description import describe
from lowmem.run.fake import running
from lowmem.run.memory import StepMemory
from lowmem.run.plan import require_rows
from lowmem.run.precheck import plan_elsewhere
from lowmem.run.recipe import Recipe
from lowmem.run.terminal import rank

# Files in the folder of a profile.
PICTURE, FIGURES, SNAPSHOT = "memory.png", "profile.json", "snapshot.pickle"


class Profile(NamedTuple):
    """The memory of training steps on one rank, in bytes."""

    measured: StepMemory
    planned: dict[str, Any] | None  # the figures of a plan, on rank 0
    text: str  # the plan, or the reason why there is none
    process: int  # reserved by the process's CUDA allocator, or its resident set on a CPU
    files: list[Path]  # written by rank 0


def profile(recipe: Recipe, steps: int, folder: Path) -> Profile:
    """Takes steps on this machine, and writes a picture and the figures of the memory of rank 0. On a GPU, it also
    writes a snapshot of the allocator, for https://pytorch.org/memory_viz.

    Raises:
        ConfigError: the model's configuration cannot be read, or the arguments are not valid for training.
        UnsupportedError: the command or an argument does not work with random weights and generated rows.
        LowmemError: the folder cannot be written.
    """
    require_rows(recipe)
    _, device = recipe.config, recipe.training.device  # raises before anything is written
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    planned, text = plan_elsewhere(recipe) if rank() == 0 else (None, "")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.memory._record_memory_history()
    with running(recipe, device, real=True) as run:
        measured, model = run.step(steps), describe(run.trainer)["model"]
    if on_gpu:
        process = torch.cuda.max_memory_reserved(device)
    else:
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    files = [folder / name for name in (PICTURE, FIGURES, *([SNAPSHOT] if on_gpu else []))]
    if rank() == 0:
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))
            torch.cuda.memory._record_memory_history(enabled=None)
        figures = {"measured": measured.figures(), "planned": planned, "process": process}
        write_file(folder / FIGURES, (json.dumps(figures, indent=2) + "\n").encode())
        assert measured.timeline is not None
        title = f"Tensors of {steps} step{'s' if steps > 1 else ''} of {model}"
        figure = pictures.memory_picture(measured.timeline, planned["peak"] if planned else None, title)
        pictures.write(figure, folder / PICTURE)
    return Profile(measured, planned, text, process, files)
