"""The folder of a run: who may write there, and a run that goes on where it was moved or copied to."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lowmem.errors import ConfigError
from lowmem.files import write_file, writing
from lowmem.hf.checkpoint import candidates, remove, tidy
from lowmem.run.environment import CONFIG, write_environment
from lowmem.run.metrics import METRICS
from lowmem.run.recipe import LAST, Recipe
from lowmem.run.terminal import train_command

LOCK = ".lock"
TRACEBACK = "traceback"  # and what follows in the names of files, one per rank

_HEADER = """\
# The arguments of a run of `lowmem {command}`. Continue it, here or where this folder was moved to, with:
#   {resume}
# environment.json: machine and versions · metrics.jsonl, loss.png: everything that was logged
# checkpoint-N: the weights as a model of transformers, and the optimizer · model.safetensors: the final weights
"""


@contextmanager
def run_folder(recipe: Recipe, rank: int = 0) -> Iterator[Path]:
    """The folder of a run, which no other process uses meanwhile. Rank 0 creates it. If the run fails before
    `write_config` was called, it removes all that the run has written except tracebacks.

    Raises:
        ConfigError: the folder has a run and is not to be resumed, has none and is, or is in use.
        LowmemError: it cannot be written.
    """
    folder, resume = Path(recipe.training.output_dir), recipe.training.resume_from_checkpoint
    if rank > 0:
        yield folder
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir {folder} is a file. Set output_dir to another path.")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_links(folder)
    try:
        with _locked(folder):
            _check_use(folder, resume)
            tidy(folder)
            before = {*folder.iterdir()}
            try:
                yield folder
            except BaseException:
                if not (folder / CONFIG).exists():
                    _clear(folder, before)
                raise
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()  # unless something is left
        raise


def write_config(recipe: Recipe, folder: Path) -> None:
    """Writes config.yaml, with which `lowmem` continues the run, and environment.json."""
    header = _HEADER.format(command=recipe.command, resume=train_command(recipe.command, folder))
    write_file(folder / CONFIG, (header + recipe.to_yaml()).encode())
    write_environment(folder)


def _clear(folder: Path, before: set[Path]) -> None:
    for path in {*folder.iterdir()} - before:
        if path.is_dir() or path.is_symlink():
            remove(path)
        elif not path.name.startswith(TRACEBACK):
            path.unlink(missing_ok=True)


def _check_links(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_symlink() and not (path.is_dir() or path.name.startswith("checkpoint-")):
            raise ConfigError(
                f"{path} is a symbolic link, and writing would change its target. Replace it with the file, or delete "
                "it."
            )


def _check_use(folder: Path, resume: str | None) -> None:
    found = {path.name for path in folder.iterdir()} - {LOCK, METRICS}  # which a run killed in its first step leaves
    found = {name for name in found if not name.startswith(TRACEBACK)}
    is_run = CONFIG in found or candidates(folder)
    if resume == LAST and not is_run:
        raise ConfigError(f"output_dir {folder} has no run to resume. Omit --resume_from_checkpoint to start one.")
    if found and resume is None:
        what = "already contains a run" if is_run else f"is not empty (it contains {min(found)})"
        go_on = f"Continue it with --resume_from_checkpoint {LAST}, set" if is_run else "Set"
        raise ConfigError(f"output_dir {folder} {what}. {go_on} output_dir to another folder, or delete this one.")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a run folder. The system releases it when the process ends, however it ends."""
    path = folder / LOCK
    lock = FileLock(path, timeout=0)
    with writing(path):
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"output_dir {folder} is in use by another run. Wait until it has ended, or set output_dir to another "
                "folder."
            ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while it is held, so that nobody else holds a file that is gone
        lock.release()
