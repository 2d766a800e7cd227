"""Simulates a GPU in host memory: after `install`, "cuda" tensors have separate storages, and CPU kernels compute them.

The simulation includes streams, events, pinned memory, random generators, autocast and the memory statistics of
torch.cuda. Autograd runs the backward of "cuda" tensors in a separate thread. The device makes typical errors visible:

- Uninitialized and freed memory contains NaN. A kernel that reads it is reported ("unwritten").
- A copy on a side stream is delayed until an operation that is ordered after it runs, or until the host waits for it.
  The result of a copy into pinned memory is visible to the host only after the host has waited for the copy.
- Every stream has a vector clock. Unordered uses of the same memory are reported ("race").
- If the host waits for the device, the line of code that waits is reported ("sync", "wait"), and
  `torch.cuda.set_sync_debug_mode` works.
- Operations that mix tensors of different devices raise an error.

Compilation (Triton and Inductor), communication (NCCL), durations, and the rounding of a real GPU are not simulated. A
CPU build of PyTorch and a C++ compiler are required. device.cpp implements the device, and cuda.py provides the
functions of torch.cuda that a CPU build lacks.
"""

import atexit
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("device.cpp")
# Directory of compiled libraries, shared by all processes and by later runs of the tests.
CACHE = Path(tempfile.gettempdir()) / f"lowmem-tests-simgpu-{os.getuid()}"
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-shared", "-w"]

library: ctypes.CDLL


# -- building ----------------------------------------------------------------------------------------------------------


def compiler() -> str | None:
    """Returns the path of a C++ compiler, or None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def build() -> Path:
    """Returns the path of the library, and compiles it unless this source is cached for this version of PyTorch."""
    torch = Path(importlib.util.find_spec("torch").origin).parent  # not imported: the library must be loaded first
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    links = [f"-L{torch}/lib", "-ltorch_cpu", "-ltorch", "-lc10", f"-Wl,-rpath,{torch}/lib"]
    options = [compiler(), *FLAGS, *includes, *links, importlib.metadata.version("torch")]
    key = hashlib.sha256(SOURCE.read_bytes() + repr(options).encode()).hexdigest()[:16]
    target = CACHE / f"{key}.so"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together must not compile it twice
        if not target.exists():
            unfinished = target.with_suffix(".unfinished")
            subprocess.run([compiler(), *FLAGS, *includes, SOURCE, "-o", unfinished, *links], check=True)
            unfinished.replace(target)
    return target


def install(devices: int = 1) -> None:
    """Registers the simulated device "cuda" in this process.

    Args:
        devices: number of devices.

    Raises:
        RuntimeError: torch has already been imported. It looks for the CUDA hooks only during its import.
    """
    global library
    if "torch" in sys.modules:
        raise RuntimeError("install the simulated GPU before torch is imported")
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    for name in ("launches", "memory", "allocated", "peak", "reserved", "allocations", "pinned", "generator_bytes"):
        getattr(library, f"sim_{name}").restype = ctypes.c_int64
    library.sim_generator_seed.restype = ctypes.c_uint64
    library.sim_set_devices(devices)
    library.sim_callback(_report)
    atexit.register(library.sim_callback, None)  # Python must not be called while it shuts down

    import support.simgpu.cuda  # noqa: F401 (the import replaces functions of torch.cuda)


# -- reports -----------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """A report of the device.

    Attributes:
        kind: "race"; "unwritten" (a read of uninitialized memory); "sync" (the host waits for an operation); "wait"
            (the host waits for an event, a stream or a device); "pageable" (a copy from pageable memory, which is
            staged on the host); "async" (a copy that runs asynchronously to the host).
        what: the operation or a description of the error.
        size: number of bytes.
        where: the innermost Python line, followed by the innermost line in lowmem if it is a different one.
        thread: identifier of the Python thread.
    """

    kind: str
    what: str
    size: int
    where: str
    thread: int


events: list[Event] = []


@contextmanager
def watch(*kinds: str) -> Iterator[list[Event]]:
    """Yields a list. At the end of the context, events of these kinds (by default all) are appended to it."""
    first, inside = len(events), []
    try:
        yield inside
    finally:
        inside += [event for event in events[first:] if not kinds or event.kind in kinds]


@contextmanager
def provoke(*kinds: str) -> Iterator[list[Event]]:
    """Like `watch`, for errors that a test causes deliberately: the events are removed from `events`."""
    first = len(events)
    with watch(*kinds) as inside:
        yield inside
    events[first:] = [event for event in events[first:] if event.kind not in kinds]


def summary(reported: list[Event]) -> str:
    """Returns a table with the number of events per kind, operation and line of code, most frequent first."""
    counts = Counter((event.kind, event.what, event.where) for event in reported)
    return "\n".join(f"{count:6d} {kind:9s} {what} @ {where}" for (kind, what, where), count in counts.most_common())


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
def _report(kind, what, size):
    try:
        events.append(Event(kind.decode(), what.decode(), size, _where(), threading.get_ident()))
    except Exception:  # ctypes would print the error without a traceback
        traceback.print_exc()


def _where() -> str:
    try:
        frame = sys._getframe(2)
    except ValueError:  # an autograd thread that is not running a Python hook
        return "autograd"
    lines = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        lines.append((path, f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"))
        frame = frame.f_back
    inner = lines[0][1]
    ours = next((line for path, line in lines if "lowmem" in path.parts and "site-packages" not in path.parts), inner)
    return inner if ours == inner else f"{inner} < {ours}"
