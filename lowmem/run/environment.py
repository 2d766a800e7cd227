"""When, where and with which versions a run was started."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from lowmem.files import write_file
from lowmem.run.secrets import redacted

ENVIRONMENT = "environment.json"


def write_environment(run_dir: str | Path) -> None:
    """Writes environment.json: when, where and with which versions the run was started."""
    packages = ("lowmem", "torch", "transformers", "trl", "accelerate", "datasets", "deepspeed", "safetensors")
    record = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(map(redacted, sys.argv)),
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
    write_file(Path(run_dir) / ENVIRONMENT, (json.dumps(record, indent=2) + "\n").encode())


def _git() -> dict[str, Any] | None:
    """The commit of the repository in the current directory, and whether there are uncommitted changes."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


def cpu() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return name[1] if name else platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version of a package as pip names it, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
