"""A GPU made of host memory: after `install`, "cuda" is a device of this process whose kernels are the CPU's.

Its tensors are real. There are storages on `cuda:0`, streams, events, pinned memory, generators, autocast, and the
memory figures of torch.cuda, and autograd runs backward in a thread of the device. On purpose it is as unhelpful as a
GPU may be:

- Fresh and freed memory is full of NaN, and a kernel that reads it is reported ("unwritten").
- Copies on a side stream happen as late as possible: when something that comes after them runs, or the host waits for
  them. Copies into pinned memory arrive when the host has waited for them.
- Every stream has a vector clock. Uses of the same memory without an order between them are reported ("race").
- Everything that the host waits for is reported with the line that does ("sync", "wait"), and
  `torch.cuda.set_sync_debug_mode` works.
- Tensors of different devices do not mix.

It cannot compile (Triton and Inductor), communicate (NCCL), tell time, or round as a GPU does. A CPU build of PyTorch
and a C++ compiler are required. device.cpp is the device; cuda.py adds to torch.cuda what such a build lacks.
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
# Compiled libraries, which all processes and later runs of the suite share.
CACHE = Path(tempfile.gettempdir()) / f"lowmem-tests-simgpu-{os.getuid()}"
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-shared", "-w"]

library: ctypes.CDLL


# -- building ----------------------------------------------------------------------------------------------------------


def compiler() -> str | None:
    """Returns the C++ compiler of this machine, or None."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def build() -> Path:
    """Returns the path of the library. Compiles it unless it exists for this version of PyTorch and this source."""
    torch = Path(importlib.util.find_spec("torch").origin).parent  # not imported: the library must be loaded first
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    links = [f"-L{torch}/lib", "-ltorch_cpu", "-ltorch", "-lc10", f"-Wl,-rpath,{torch}/lib"]
    options = [compiler(), *FLAGS, *includes, *links, importlib.metadata.version("torch")]
    key = hashlib.sha256(SOURCE.read_bytes() + repr(options).encode()).hexdigest()[:16]
    target = CACHE / f"{key}.so"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of the processes that start together builds it
        if not target.exists():
            unfinished = target.with_suffix(".unfinished")
            subprocess.run([compiler(), *FLAGS, *includes, SOURCE, "-o", unfinished, *links], check=True)
            unfinished.replace(target)
    return target


def install(devices: int = 1) -> None:
    """Makes "cuda" a device of this process.

    Args:
        devices: number of devices.

    Raises:
        RuntimeError: torch has been imported already, which asks for the hooks of CUDA as it is imported.
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
    atexit.register(library.sim_callback, None)  # Python cannot be called once it shuts down

    import support.simgpu.cuda  # noqa: F401 (which replaces the functions of torch.cuda)


# -- reports -----------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Something that the device reported.

    Attributes:
        kind: "race"; "unwritten" (memory was read before it was written); "sync" (the host waits for an operation);
            "wait" (the host waits for an event, a stream or a device); "pageable" (a copy that is staged on the host);
            "async" (a copy that goes on while the host does).
        what: the operation.
        size: bytes.
        where: the innermost line of Python, and the innermost line of lowmem.
        thread: the thread that did it.
    """

    kind: str
    what: str
    size: int
    where: str
    thread: int


events: list[Event] = []


@contextmanager
def watch(*kinds: str) -> Iterator[list[Event]]:
    """Yields a list to which the events of these kinds (default: all) are added at the end of the context."""
    first, inside = len(events), []
    try:
        yield inside
    finally:
        inside += [event for event in events[first:] if not kinds or event.kind in kinds]


@contextmanager
def provoke(*kinds: str) -> Iterator[list[Event]]:
    """Like `watch`, for deliberate faults: these events are not reported anywhere else."""
    first = len(events)
    with watch(*kinds) as inside:
        yield inside
    events[first:] = [event for event in events[first:] if event.kind not in kinds]


def summary(listed: list[Event]) -> str:
    """Returns a table of events with one row per line of code and kind, the most frequent first."""
    counts = Counter((event.kind, event.what, event.where) for event in listed)
    return "\n".join(f"{count:6d} {kind:9s} {what} @ {where}" for (kind, what, where), count in counts.most_common())


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
def _report(kind, what, size):
    try:
        events.append(Event(kind.decode(), what.decode(), size, _where(), threading.get_ident()))
    except Exception:  # ctypes would print it without the line
        traceback.print_exc()


def _where() -> str:
    try:
        frame = sys._getframe(2)
    except ValueError:  # a thread of autograd outside of hooks
        return "autograd"
    lines = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        lines.append((path, f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"))
        frame = frame.f_back
    inner = lines[0][1]
    ours = next((line for path, line in lines if "lowmem" in path.parts and "site-packages" not in path.parts), inner)
    return inner if ours == inner else f"{inner} < {ours}"
