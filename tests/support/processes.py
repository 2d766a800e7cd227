"""Starts processes by forking a server that has already imported the packages, which is fast.

Tests use this module if they need separate processes but do not test how these are started.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO

from matplotlib.figure import Figure
from support import compiled

# Seconds after which processes count as hung. Even on a slow or busy machine, tests take less time.
PATIENCE = 600

# Seconds within which the other processes of a group must end after one has failed
GRACE = 60

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest", "torch", "torch.distributed.fsdp", "torch.distributed._tools.mem_tracker", "torch._dynamo",
        "transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral",
        "transformers.models.llama.tokenization_llama", "transformers.trainer", "trl.trainer.sft_trainer", "datasets",
        "accelerate", "deepspeed", "matplotlib.figure", "matplotlib.backends.backend_agg",
        "trl.scripts.sft", "lowmem.trainer", "lowmem.hf.checkpoint", "lowmem.cli", "lowmem.run.training",
    ]
)  # fmt: skip


def sketch(figure: Figure, file: BinaryIO, **options: Any) -> None:
    """Replaces `Figure.savefig` in tests that do not need pictures, because drawing takes longer than a small run."""
    file.write(b"\x89PNG\r\n\x1a\n")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


class Launched:
    """Processes that run `python -m` without drawing pictures. Their output is written to files.

    commands: arguments and environment of each process.
    """

    def __init__(self, commands: list[tuple[list[str], dict[str, str]]]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.processes = [
            CONTEXT.Process(
                target=_execute, args=(words, environment, self._file("out", number), self._file("err", number))
            )
            for number, (words, environment) in enumerate(commands)
        ]
        for process in self.processes:
            process.start()

    @classmethod
    def ranks(cls, count: int, *words: str, environment: dict[str, str] | None = None) -> "Launched":
        """Starts `count` processes with the variables that torchrun sets, or for 0 one process without them."""
        environment = environment or dict(os.environ)
        if not count:
            return cls([(list(words), environment)])
        group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": count}
        group["LOCAL_WORLD_SIZE"] = count
        variables = ({**group, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count))
        environments = (environment | {name: str(value) for name, value in ranks.items()} for ranks in variables)
        return cls([(list(words), variables) for variables in environments])

    def _file(self, kind: str, rank: int) -> str:
        return str(Path(self._folder.name) / f"{kind}{rank}")

    def output(self, kind: str = "out") -> str:
        """Returns the output of all processes so far. kind: "out" or "err"."""
        files = (Path(self._file(kind, rank)) for rank in range(len(self.processes)))
        return "".join(file.read_text() for file in files if file.exists())

    def wait_for(self, text: str) -> None:
        """Waits until a process has written `text`."""
        end = time.monotonic() + PATIENCE
        while text not in self.output():
            assert any(process.is_alive() for process in self.processes), "the processes ended: " + self.output("err")
            assert time.monotonic() < end, f"no {text!r} in {PATIENCE} s"
            time.sleep(0.05)

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Waits for all processes. The return code is the exit status of the first process that failed, or 0."""
        end, failed = time.monotonic() + PATIENCE, 0
        running = {process.sentinel: process for process in self.processes}
        while running and (left := end - time.monotonic()) > 0:
            for sentinel in wait(list(running), left):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode and not failed:
                    failed, end = process.exitcode, min(end, time.monotonic() + GRACE)
        for process in running.values():
            process.kill()
            process.join()
        done = subprocess.CompletedProcess([], failed, self.output(), self.output("err"))
        self._folder.cleanup()
        assert not running, f"{len(running)} of {len(self.processes)} processes hung: {done.stderr}"
        return done

    @property
    def statuses(self) -> list[int | None]:
        """The exit status of each process, or None while it is running."""
        return [process.exitcode for process in self.processes]


def _execute(words: list[str], environment: dict[str, str], out: str, err: str) -> None:
    for number, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    Figure.savefig = sketch  # type: ignore[method-assign, assignment]
    sys.argv = list(words)
    compiled.force()
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
