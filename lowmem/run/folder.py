"""The folder of a run: who may write there, and when, where and with which versions the run was started."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from lowmem.errors import ConfigError
from lowmem.files import cpu, version, write_file, writing


@contextmanager
def run_folder(run_dir: str | Path, resume: bool, rank: int = 0) -> Iterator[Path]:
    """The folder of a run. Rank 0 creates it, and removes it if the run fails before anything is written there."""
    folder = Path(run_dir)
    if rank == 0:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"run_dir {folder} is a file. Set run_dir to another path.")
        used = folder.is_dir() and any(folder.iterdir())
        if resume and not used:
            raise ConfigError(f"run_dir {folder} does not contain a run to resume. Omit --resume to start one.")
        if used and not resume:
            raise ConfigError(
                f"run_dir {folder} already contains a run. Continue it with --resume, set run_dir to another folder, "
                "or delete this one."
            )
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        if rank == 0 and not any(folder.iterdir()):
            folder.rmdir()
        raise


def write_environment(run_dir: str | Path) -> None:
    """Writes environment.json: when, where and with which versions the run was started."""
    packages = ("lowmem", "torch", "transformers", "trl", "accelerate", "datasets", "deepspeed", "safetensors")
    record = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": cpu(), "count": os.cpu_count()},
        "memory_bytes": psutil.virtual_memory().total,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "versions": {name: version(name) for name in packages},
    }
    write_file(Path(run_dir) / "environment.json", (json.dumps(record, indent=2) + "\n").encode())


def _git() -> dict[str, Any] | None:
    """The commit of the repository in the current directory, and whether there are uncommitted changes."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}
