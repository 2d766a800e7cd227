"""Checks that a run fits in memory, before its weights are downloaded or loaded."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed

from lowmem.errors import ConfigError, LowmemError
from lowmem.placements import in_group
from lowmem.run.recipe import Recipe
from lowmem.run.terminal import out, rank, size, stage, warn

# Models with fewer bytes of weights are not planned, because their run would be faster than the plan.
_SMALL = 256 << 20

# CUDA's context, which a plan reserves but this process already has.
_CONTEXT = 1 << 29

# Control groups, with which SLURM, Docker and Kubernetes limit memory: the groups of this process, and all groups. By
# kind (version 2, version 1): their folder, the files with the limit and the usage, and the cache in the usage.
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {
    "": (".", "max", "current", "inactive_file"),
    "memory": ("memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
}

# Environment variables of launchers, which are not passed to a plan in another process.
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "ACCELERATE_", "TORCHELASTIC_"
)  # fmt: skip


def require_fit(recipe: Recipe) -> None:
    """Raises `LowmemError` if a run does not fit in the free memory of rank 0. Every rank calls it."""
    problems = [_problem(recipe) if rank() == 0 else None]
    if in_group():
        distributed.broadcast_object_list(problems)
    if problems[0]:
        raise LowmemError(problems[0])


def _problem(recipe: Recipe) -> str | None:
    """Returns the reason why the run does not fit, or None if it fits or cannot be planned."""
    model, args = Path(recipe.model.model_name_or_path or ""), recipe.training
    files = [file for file in model.glob("*") if file.suffix in (".safetensors", ".bin")] if model.is_dir() else []
    if files and sum(file.stat().st_size for file in files) < _SMALL:
        return None
    try:
        _ = recipe.config
    except ConfigError:  # loading the model raises a better error
        return None
    on_gpu = args.device.type != "cpu"
    on_host = free_on_host() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    memory = torch.cuda.mem_get_info(args.device)[0] + _CONTEXT if on_gpu else on_host
    stage("planning the memory of the run")
    planned, text = plan_elsewhere(recipe, memory)
    if planned is None:
        out.print(f"memory     not planned: {text}", soft_wrap=True)
        return None
    needed = planned["needed"]
    host, disk = (max(phase[where] for phase in planned["phases"].values()) for where in ("host", "disk"))
    replaced = sum(file.stat().st_size for file in Path(args.output_dir).rglob("*") if file.is_file())
    if (free := shutil.disk_usage(args.output_dir).free + replaced) < disk:
        warn(f"{args.output_dir} needs {size(disk)} for checkpoints, but its disk has {size(free)}")
    out.print(f"memory     {size(needed)} of {size(memory)} per process (planned)", soft_wrap=True)
    problem = "the run does not fit: it needs {} {}, which has {}. Use --force to train anyway"
    if needed > memory:
        out.print(text, soft_wrap=True)  # arguments with which it fits
        where = "on the GPU of each process" if on_gpu else "for each process"
        return problem.format(size(needed), where, size(memory))
    if on_gpu and host > on_host:
        return problem.format(size(host), "on the host for each process", size(on_host))
    return None


def free_on_host() -> int:
    """Returns the host memory in bytes that is free for this process, on the machine and in its control groups."""
    free: int = psutil.virtual_memory().available
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []  # only on Linux
    for _, kind, path in (line.split(":", 2) for line in lines):
        if kind not in _FILES:
            continue
        root, *files, cache = _FILES[kind]
        group = _GROUPS / root / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # a container does not see files above its own; "max": no limit
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in files)
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, limit - used + int(stat.get(cache, 0)))
    return max(0, free)


def plan_elsewhere(recipe: Recipe, memory: int) -> tuple[dict[str, Any] | None, str]:
    """Plans a run in another process, so that it does not affect this one. Returns the figures and the text of the
    plan, or None and the reason why planning failed.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    device = "cpu" if recipe.training.device.type == "cpu" else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        config, file = Path(folder, "config.yaml"), Path(folder, "plan.json")
        config.write_text(recipe.to_yaml(), encoding="utf-8")
        words = [sys.executable, "-m", "lowmem", "plan", recipe.command, "--config", str(config), "--json", str(file)]
        words += ["--ranks", str(recipe.training.world_size), "--device", device]
        words += ["--memory", f"{memory / 2**20:.2f}MiB"]
        env["CUDA_VISIBLE_DEVICES"] = ""
        ended = subprocess.run(words, env=env, capture_output=True, text=True)
        if ended.returncode in (0, 1) and file.exists():
            return json.loads(file.read_text()), ended.stdout
        return None, ended.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
