"""The folder of a run: locks it, writes its files, and determines the checkpoint from which a run continues."""

import contextlib
import os
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lowmem.errors import ConfigError
from lowmem.files import write_file, writing
from lowmem.hf import checkpoint
from lowmem.run.recipe import Recipe
from lowmem.run.secrets import redacted
from lowmem.run.terminal import CONFIG, METRICS, rank, versions, warn

# Values of `resume_from_checkpoint` for the last intact checkpoint in `output_dir`. AUTO starts a run if it has none.
LAST, AUTO = "last", "auto"

LOCK = ".lock"
TRACEBACK = "traceback"  # prefix of a file per rank

_HEADER = """\
# The arguments of a run of `lowmem {command}`. To continue it, here or where this folder was moved to:
#   {resume}
# metrics.jsonl, loss.png: everything that was logged
# checkpoint-N: the weights as a model of transformers, and the optimizer · model.safetensors: the final weights
# {versions}
"""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, which only one run can use at a time: `with RunFolder(path).opened(): ...`.

    Args:
        path: `output_dir` of the run.
        resume: its `resume_from_checkpoint`: a checkpoint, `LAST`, `AUTO`, or None for a new run.

    Rank 0 creates the folder and writes all files except tracebacks.
    """

    path: Path
    resume: str | None = None

    @property
    def begun(self) -> bool:
        """True if a run has completed a step here."""
        return (self.path / CONFIG).exists()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Creates and locks the folder. If the run fails before its first step, removes the files that it has written.

        Raises:
            ConfigError: the folder has a run and `resume` is None, has no run and `resume` is `LAST`, or is in use.
            LowmemError: the folder cannot be written.
        """
        if rank() > 0:
            yield
            return
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            links = [path for path in self.path.iterdir() if path.is_symlink()]
        for path in links:
            if not (path.is_dir() or path.name.startswith("checkpoint-")):
                raise ConfigError(
                    f"{path} is a symbolic link, and writing would change its target. Replace it with the file, or "
                    "delete it."
                )
        try:
            with self._locked():
                self._check_use()
                checkpoint.remove(self.path / checkpoint.STAGING)  # of a killed run
                before = {*self.path.iterdir()}
                try:
                    yield
                finally:
                    if not self.begun:  # no step is complete
                        self._clear(before)
        finally:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # unless it contains something

    def start(self) -> str | bool | None:
        """Returns `resume_from_checkpoint` for a trainer: True for the last intact checkpoint in the folder."""
        if self.resume in (LAST, AUTO):
            if checkpoint.candidates(self.path):
                return True
            if self.begun:
                warn(f"{self.path} has no checkpoint yet, so the run starts from the beginning")
            return None
        if self.resume is not None and not Path(self.resume).is_dir():
            raise ConfigError(
                f"resume_from_checkpoint: {self.resume} was not found. Use {LAST!r} for the last checkpoint in "
                "output_dir"
            )
        return self.resume

    def train_command(self, recipe: Recipe) -> str:
        """Returns the command that continues a run or, if its checkpoints contain only models, that starts a run from
        one of them. It does not include the launcher of several processes, which is not known.
        """
        launcher = "  # with the same launcher or --num_processes" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        again = f"--resume_from_checkpoint {LAST}"
        if recipe.training.save_only_model:
            again = f"--model_name_or_path {shlex.quote(str(self.path / 'checkpoint-N'))} --output_dir ANOTHER"
        return f"lowmem {recipe.command} --config {shlex.quote(str(self.path / CONFIG))} {again}{launcher}"

    def write_config(self, recipe: Recipe) -> None:
        """Writes config.yaml, which is needed to continue the run."""
        if rank() == 0:
            installed = ", ".join(f"{name} {number}" for name, number in versions().items() if number)
            resume = self.train_command(recipe)
            header = _HEADER.format(command=recipe.command, resume=resume, versions=installed)
            write_file(self.path / CONFIG, (header + recipe.to_yaml()).encode())

    def write_traceback(self, error: BaseException) -> None:
        """Writes the traceback of an error, without credentials."""
        path = self.path / f"{TRACEBACK}{f'-{rank()}' if rank() else ''}.txt"
        write_file(path, redacted("".join(traceback.format_exception(error))).encode())

    def save_model(self, trainer: Any) -> None:
        """Saves the final model next to the checkpoints, either completely or not at all. Every rank calls it."""
        with checkpoint.saving(self.path) as staged:
            trainer.save_model(str(staged), _internal_call=True)

    def _check_use(self) -> None:
        names = {path.name for path in self.path.iterdir() if not path.name.startswith((TRACEBACK, ".rank-"))}
        names -= {LOCK, METRICS, "runs"}  # left by a run that was killed in its first step
        is_run = self.begun or checkpoint.candidates(self.path)
        if self.resume == LAST and not is_run:
            raise ConfigError(
                f"output_dir {self.path} has no run to resume. Omit --resume_from_checkpoint to start one."
            )
        if names and (self.resume is None or (self.resume == AUTO and not is_run)):
            what = "already contains a run" if is_run else f"is not empty (it contains {min(names)})"
            go_on = f"Continue it with --resume_from_checkpoint {LAST}, set" if is_run else "Set"
            raise ConfigError(
                f"output_dir {self.path} {what}. {go_on} output_dir to another folder, or delete this one."
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder. The system releases the lock when the process ends, however it ends."""
        path = self.path / LOCK
        lock = FileLock(path, timeout=0)
        with writing(path):
            try:
                lock.acquire()
            except Timeout:
                raise ConfigError(
                    f"output_dir {self.path} is in use by another run. Wait until it has ended, or set output_dir to "
                    "another folder."
                ) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # before the lock is released, so that no other process locks a deleted file
            lock.release()

    def _clear(self, before: set[Path]) -> None:
        """Removes the files that the run has written, except tracebacks."""
        for path in {*self.path.iterdir()} - before:
            if path.is_dir() or path.is_symlink():
                checkpoint.remove(path)
            elif not path.name.startswith(TRACEBACK):
                path.unlink(missing_ok=True)
