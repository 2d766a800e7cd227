"""Converts errors of libraries to messages for the user, which name the input that caused the error and the reason."""

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowmem.errors import ConfigError, LowmemError, UnsupportedError
from lowmem.hf import version

# Messages of PyTorch's RuntimeErrors for failed allocations: of CPU, GPU and pinned memory, in CUDA libraries, in C++.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory",
    "CUDA out of memory", "HIP out of memory", "HIP error: out of memory", "_ALLOC_FAILED", "std::bad_alloc",
    "Cannot allocate memory",
)  # fmt: skip


@contextmanager
def convert_errors(subject: str, kind: type[LowmemError] = ConfigError) -> Iterator[None]:
    """Replaces an error of a library, whose type is rarely documented, by an error of type `kind` that names the
    subject. Errors of lowmem and out-of-memory errors are not replaced.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, LowmemError) or is_out_of_memory(error):
            raise
        raise kind(f"{subject}: {reason(error)}") from error


@contextmanager
def convert_library_errors(subject: str) -> Iterator[None]:
    """Replaces an error in a third-party package other than PyTorch by an `UnsupportedError` that names the subject and
    the place. Errors of lowmem and out-of-memory errors are not replaced.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, LowmemError) or is_out_of_memory(error):
            raise
        for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package in {"torch", *sys.stdlib_module_names} or frame.f_code.co_name == "__torch_dispatch__":
                continue
            if package == "lowmem":
                raise
            name = " ".join(filter(None, (package, version(package))))
            place = f"{name} ({Path(frame.f_code.co_filename).name}, line {line})"
            message = f"{subject}: {place} fails with {type(error).__name__}: {reason(error)}"
            raise UnsupportedError(message) from error
        raise


def reason(error: BaseException, longest: int = 600) -> str:
    """Returns the message of a library's error on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = f"{text} is missing" if isinstance(error, KeyError) else text
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, means that the device or the host is out of memory."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False
