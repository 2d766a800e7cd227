"""Records the time, machine and package versions of a run."""

import json
import os
import platform
import shlex
import sys
from datetime import datetime
from pathlib import Path

import psutil
import torch

from lowmem import __version__
from lowmem.files import write_file
from lowmem.hf import version
from lowmem.run.secrets import redacted

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
# Packages whose versions are reported.
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "deepspeed", "peft")


def versions() -> dict[str, str | None]:
    """Returns the versions of lowmem, Python, the packages, or None if they are not installed, and the system."""
    packages = {name: version(name) for name in PACKAGES}
    return {"lowmem": __version__, "python": platform.python_version(), **packages, "system": platform.platform()}


def write_environment(run_dir: str | Path) -> None:
    """Writes environment.json: the start time, the command, the machine and the versions of a run."""
    record = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(map(redacted, sys.argv)),
        "directory": str(Path.cwd()),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "versions": versions(),
    }
    write_file(Path(run_dir) / ENVIRONMENT, (json.dumps(record, indent=2) + "\n").encode())
