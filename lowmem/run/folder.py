"""The folder of a run: who may write there, and a run that goes on where it was moved or copied to."""

import contextlib
import fcntl
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lowmem.errors import ConfigError
from lowmem.files import writing
from lowmem.hf.checkpoint import candidates, tidy
from lowmem.run.config import RunConfig
from lowmem.run.environment import ENVIRONMENT
from lowmem.run.terminal import warn

LOCK = ".lock"
CONFIG = "config.yaml"


@contextmanager
def run_folder(run_dir: str | Path, resume: bool, rank: int = 0) -> Iterator[Path]:
    """The folder of a run, which no other process uses meanwhile. Rank 0 creates it, and removes it if the run fails
    before anything is written there.

    Raises:
        ConfigError: the folder has a run and is not to be resumed, has none and is, or is in use.
        LowmemError: it cannot be written.
    """
    folder = Path(run_dir)
    if rank > 0:
        yield folder
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run_dir {folder} is a file. Set run_dir to another path.")
    if resume and not folder.is_dir():
        raise ConfigError(f"run_dir {folder} does not contain a run to resume. Omit --resume to start one.")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_links(folder)
    try:
        with _locked(folder):
            _check_use(folder, resume)
            tidy(folder)
            yield folder
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()  # unless something was written
        raise


def _check_links(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_symlink() and not (path.is_dir() or path.name.startswith("checkpoint-")):
            raise ConfigError(
                f"{path} is a symbolic link, and a run would write to where it leads. Put the file itself there, or "
                "delete the link."
            )


def _check_use(folder: Path, resume: bool) -> None:
    found = {path.name for path in folder.iterdir()} - {LOCK}
    is_run = CONFIG in found or candidates(folder)
    if resume and not is_run:
        raise ConfigError(f"run_dir {folder} does not contain a run to resume. Omit --resume to start one.")
    if found and not resume:
        what = "already contains a run" if is_run else f"is not empty (it has {min(found)})"
        go_on = "Continue it with --resume, set" if is_run else "Set"
        raise ConfigError(f"run_dir {folder} {what}. {go_on} run_dir to another folder, or delete this one.")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a run folder. The system releases it when the process ends, however it ends; processes that it
    has started do not inherit it.
    """
    path = folder / LOCK
    with writing(path):
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            owner = file.read(200).strip() or "another process"
            raise ConfigError(
                f"run_dir {folder} is in use by {owner}. Wait until it has ended, or set run_dir to another folder."
            ) from None
        except OSError as error:  # some network file systems have no locks
            warn(f"{path}: no lock can be taken here ({error.strerror}), so do not start another run in this folder")
        if os.fstat(file.fileno()).st_nlink == 0:
            raise ConfigError(f"run_dir {folder} was in use until now. Start again.")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # while it is held, so that nobody else holds a file that is gone


def resumed_in_place(config: RunConfig, path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration with the folder that its file is in as `run_dir`, where that is a run folder: it may have been
    copied or moved since it was written. An override of `run_dir` stays.
    """
    here = path.parent
    overridden = any(override.partition("=")[0].strip() == "run_dir" for override in overrides)
    if overridden or path.name != CONFIG or not (here / ENVIRONMENT).exists():
        return config
    if here.resolve() == Path(config.run_dir).resolve():
        return config
    warn(f"this run was started in {config.run_dir}; continuing in {here}, where its configuration is")
    return replace(config, run_dir=str(here))
