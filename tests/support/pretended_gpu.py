"""A simulated GPU in a separate process. Its tensors have no values, and its streams record what they have waited for.

A race that could go wrong on a GPU always raises: memory that two streams use without an order between them, or memory
that its stream may reuse before another stream has finished with it.
"""

import multiprocessing
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

try:
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
except ImportError:
    pytest.skip("this torch has no devices that are written in Python", allow_module_level=True)

# Seconds after which a call that has not returned is considered hung.
PATIENCE = 60


class Race(Exception):
    """Two streams use the same memory without an order between them."""


class Failed(AssertionError):
    """A call in the process raised an error, whose traceback is the message."""


class Stream:
    """Counts the operations queued on it, and records how many of every stream come before the next one."""

    def __init__(self, device=None):
        self.seen = {self: 0}

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        for stream, count in event.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def record_event(self):
        return dict(self.seen)


class Module(_DummyBackendModule):
    """What `torch.get_device_module` returns."""

    Stream = Stream

    def __init__(self):
        self._current = Stream()

    def current_stream(self, device=None):
        return self._current

    @contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


MODULE = Module()


@dataclass
class Memory:
    """A storage, the stream that allocated it (None for host memory), and its uses as (stream, count)."""

    storage: StorageWeakRef
    size: int
    owner: Stream | None
    written: list[tuple[Stream, int]] = field(default_factory=list)
    read: list[tuple[Stream, int]] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Checks every operation on the GPU.

    Attributes:
        held: bytes that are allocated on the GPU.
        most: their maximum since it was last set.
    """

    def __init__(self):
        super().__init__()
        self.most = 0
        self._memories: dict[int, Memory] = {}

    @property
    def held(self):
        self._collect()
        return sum(memory.size for memory in self._memories.values() if memory.owner is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._collect()
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # queries, such as the device of a tensor
            return result
        values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        read, written = [], []
        for argument in func._schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(_tensors(values.get(argument.name)))
        known = {_key(tensor) for tensor in (*read, *written)}
        new = [tensor for tensor in _tensors(result) if _key(tensor) not in known]
        if any(tensor.device.type == "gpu" for tensor in (*read, *written, *new)):
            stream = MODULE.current_stream()
            for tensor in new:
                self._memory(tensor, stream)
            if (new or written) and "empty" not in func.__name__:  # a view or an allocation uses no memory
                self._use(func, stream, read, [*written, *new])
            self.most = max(self.most, self.held)
        return result

    def _use(self, func, stream, read, written):
        stream.seen[stream] += 1
        now = (stream, stream.seen[stream])
        for tensor in read:
            memory = self._memory(tensor, stream)
            _refuse_race(stream, memory.written, f"{func} reads what another stream may not have written yet")
            memory.read.append(now)
        for tensor in written:
            memory = self._memory(tensor, stream)
            _refuse_race(stream, memory.written + memory.read, f"{func} writes over what another stream still uses")
            memory.written, memory.read = [now], []

    def _memory(self, tensor, stream):
        if _key(tensor) not in self._memories:
            storage, owner = tensor.untyped_storage(), stream if tensor.device.type == "gpu" else None
            self._memories[_key(tensor)] = Memory(StorageWeakRef(storage), storage.nbytes(), owner)
        return self._memories[_key(tensor)]

    def _collect(self):
        """Frees memory that is no longer referenced: its stream may reuse it."""
        freed = [key for key, memory in self._memories.items() if memory.storage.expired()]
        for memory in map(self._memories.pop, freed):
            if memory.owner is not None:
                used = memory.written + memory.read
                _refuse_race(memory.owner, used, "memory was given back that another stream still uses")


def _refuse_race(stream, used, reason):
    if any(stream.seen.get(other, 0) < count for other, count in used):
        raise Race(reason)


def _tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _key(tensor):
    return tensor.untyped_storage()._cdata


@contextmanager
def watched() -> Iterator[Watch]:
    """Tensors created inside have no values, and every operation on them is checked."""
    with FakeTensorMode(), Watch() as watch:
        yield watch


class Process:
    """A process with a device "gpu". Functions are pickled, so they must be those of a module."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _begin)

    def run(self, function, *args):
        """Returns `function(*args)`, called in the process.

        Raises:
            Failed: the function raised an error.
        """
        return self._pool.submit(_call, function, *args).result(PATIENCE)

    def stop(self):
        self._pool.shutdown()


def _begin():
    _setup_privateuseone_for_python_backend("gpu", MODULE)


def _call(function, *args):
    try:
        return function(*args)
    except Exception:
        raise Failed(traceback.format_exc()) from None
