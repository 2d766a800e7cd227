"""Implements functions and classes of torch.cuda for the simulated GPU, under the names that they have there.

Importing this module replaces them in torch.cuda. The kernels and hooks in device.cpp are sufficient for "cuda" tensors
and torch.accelerator in a CPU build of PyTorch, but torch.cuda would raise "Torch not compiled with CUDA enabled".
"""

import ctypes
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from support import simgpu
from torch import accelerator

assert accelerator.current_accelerator() is not None, "torch looked for the CUDA hooks before they were registered"
TOTAL_MEMORY = simgpu.library.sim_memory()
DEVICES = simgpu.library.sim_devices()

# -- devices -----------------------------------------------------------------------------------------------------------


def index_of(device=None):
    """Returns the index of a device, or the current device's index if the argument does not have one."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return accelerator.current_device_index() if index is None or index < 0 else index


def always(value, count):
    """Returns `count` functions that return `value`: separate objects, since torch._dynamo uses them as keys."""
    return [lambda *_, value=value, **__: value for _ in range(count)]


is_available, is_initialized, _is_compiled, is_bf16_supported, is_tf32_supported = always(True, 5)
(can_device_access_peer,) = always(True, 1)
is_current_stream_capturing, _is_in_bad_fork = always(False, 2)
init, _lazy_init, empty_cache, ipc_collect, reset_accumulated_memory_stats = always(None, 5)


def _lazy_call(function, **_):
    function()


def device_count():
    return DEVICES


def current_device():
    return accelerator.current_device_index()


def set_device(device):
    accelerator.set_device_index(index_of(device))


def _exchange_device(device):
    before = current_device()
    set_device(device)
    return before


_maybe_exchange_device = _exchange_device


class device:
    """Context manager that changes the current device, except for None and -1."""

    def __init__(self, device):
        self._index = index_of(device)

    def __enter__(self):
        self._before = _exchange_device(self._index)

    def __exit__(self, *_):
        set_device(self._before)


class device_of(device):
    def __init__(self, tensor):
        super().__init__(tensor.get_device() if tensor.is_cuda else -1)


def get_device_properties(device=None):
    return SimpleNamespace(
        name="NVIDIA Simulated", major=9, minor=0, total_memory=TOTAL_MEMORY, multi_processor_count=132, uuid="0",
        L2_cache_size=50 << 20, warp_size=32, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448, gcnArchName="", is_integrated=0,
    )  # fmt: skip


def get_device_name(device=None):
    return get_device_properties(device).name


def get_device_capability(device=None):
    return 9, 0


def get_arch_list():
    return ["sm_90"]


# -- streams and events ------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **existing):
        if existing:
            return torch.Stream.__new__(cls, **existing)
        return torch.Stream.__new__(cls, torch.device("cuda", index_of(device)), priority=priority)

    @property
    def cuda_stream(self):
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return torch.Event.__new__(cls, torch.device("cuda", index_of()), enable_timing=enable_timing)

    def record(self, stream=None):
        return super().record(current_stream() if stream is None else stream)

    def elapsed_time(self, end_event):
        return 1.0  # ms; time is not simulated


def current_stream(device=None):
    return accelerator.current_stream(torch.device("cuda", index_of(device)))


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=1)


def set_stream(stream):
    accelerator.set_stream(stream)


@contextmanager
def stream(stream):
    if stream is None:
        yield
        return
    current, on_device = current_stream(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(on_device)
        set_stream(current)


def synchronize(device=None):
    accelerator.synchronize(torch.device("cuda", index_of(device)))


MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(mode):
    simgpu.library.sim_set_sync_mode(MODES.get(mode, mode))


def get_sync_debug_mode():
    return simgpu.library.sim_sync_mode()


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_allocated(device=None):
    return simgpu.library.sim_allocated(index_of(device))


def max_memory_allocated(device=None):
    return simgpu.library.sim_peak(index_of(device))


def memory_reserved(device=None):
    return simgpu.library.sim_reserved(index_of(device))


max_memory_reserved = memory_reserved  # memory is never returned to the system


def memory_stats(device=None):
    return OrderedDict(
        {
            "allocated_bytes.all.current": memory_allocated(device),
            "allocated_bytes.all.peak": max_memory_allocated(device),
            "reserved_bytes.all.current": memory_reserved(device),
            "reserved_bytes.all.peak": max_memory_reserved(device),
            "allocation.all.allocated": simgpu.library.sim_allocations(index_of(device)),
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }
    )


def host_memory_stats():
    return OrderedDict({"allocated_bytes.current": simgpu.library.sim_pinned()})


def reset_peak_memory_stats(device=None):
    simgpu.library.sim_reset_peak(index_of(device))


reset_max_memory_allocated = reset_peak_memory_stats


def mem_get_info(device=None):
    return TOTAL_MEMORY - memory_allocated(device), TOTAL_MEMORY


def _record_memory_history(**options):
    """Does nothing, because the simulation does not record a history."""


def _dump_snapshot(filename):
    Path(filename).touch()


def cudart():
    return SimpleNamespace(cudaMemGetInfo=mem_get_info)


# -- random numbers ----------------------------------------------------------------------------------------------------


class DefaultGenerator:
    """The default random generator of a device, with the methods that torch.random and torch.cuda call."""

    def __init__(self, index):
        self.device, self._index = torch.device("cuda", index), index

    def get_state(self):
        state = torch.empty(simgpu.library.sim_generator_bytes(self._index), dtype=torch.uint8, device="cpu")
        simgpu.library.sim_get_generator(self._index, ctypes.c_void_p(state.data_ptr()))
        return state

    def set_state(self, state):
        state = state.cpu().contiguous()
        simgpu.library.sim_set_generator(self._index, ctypes.c_void_p(state.data_ptr()), ctypes.c_int64(state.numel()))
        return self

    def manual_seed(self, seed):
        simgpu.library.sim_seed_generator(self._index, ctypes.c_uint64(seed & (1 << 64) - 1))
        return self

    def initial_seed(self):
        return simgpu.library.sim_generator_seed(self._index)


default_generators = tuple(map(DefaultGenerator, range(DEVICES)))


def manual_seed(seed):
    default_generators[index_of()].manual_seed(seed)


def manual_seed_all(seed):
    for generator in default_generators:
        generator.manual_seed(seed)


def seed_all():
    manual_seed_all(torch.random.initial_seed())


seed = seed_all


def initial_seed():
    return default_generators[index_of()].initial_seed()


def get_rng_state(device="cuda"):
    return default_generators[index_of(device)].get_state()


def set_rng_state(state, device="cuda"):
    default_generators[index_of(device)].set_state(state)


def get_rng_state_all():
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states):
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


# -- registration in torch ---------------------------------------------------------------------------------------------

for name, value in dict(globals()).items():
    for module in (torch.cuda, torch.cuda.streams, torch.cuda.memory, torch.cuda.random):
        if callable(value) and hasattr(module, name) and not name.startswith("__"):
            setattr(module, name, value)
torch.cuda.default_generators = default_generators

torch.version.cuda = "13.0"
torch.cuda._initialized = True  # otherwise torch.utils.checkpoint does not restore the random state
torch.backends.cuda.is_built = lambda: True
torch.accelerator.empty_cache = empty_cache
torch.random._seed_custom_device = lambda seed: None

# C functions that a CPU build lacks. They are separate objects, since torch._dynamo uses functions as dictionary keys.
torch._C._cuda_getCurrentRawStream = lambda device: 0
torch._C._cuda_isCurrentStreamCapturing = lambda: False
torch._C._cuda_sleep = lambda cycles: None
torch._C._cuda_resetPeakMemoryStats = lambda device: reset_peak_memory_stats(device)
torch._C._cuda_getDeviceCount = lambda: DEVICES
torch._C._cuda_getDevice = lambda: current_device()
torch._C._cuda_setDevice = lambda device: set_device(device)
torch._C._cuda_getArchFlags = lambda: "sm_90"
torch._C._cuda_synchronize = lambda: synchronize()
torch._C._cuda_emptyCache = lambda: None

# A CPU build can create storages only on the CPU, so storages are copied as uint8 tensors.
storage_to, storage_clone = torch.storage._to, torch.storage._StorageBase.clone
storage_resize = torch.UntypedStorage.resize_


def as_tensor(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to(self, device, non_blocking=False):
    if {self.device.type, torch.device(device).type} == {"cpu"}:
        return storage_to(self, device, non_blocking)
    return as_tensor(self).to(device).untyped_storage()


def clone(self):
    return storage_clone(self) if self.device.type == "cpu" else as_tensor(self).clone().untyped_storage()


def cpu(self):
    return self if self.device.type == "cpu" else to(self, "cpu")


def resize_(self, bytes):
    if self.device.type == "cpu":
        return storage_resize(self, bytes)
    simgpu.library.sim_resize_storage(ctypes.c_void_p(self._cdata), ctypes.c_int64(bytes))
    return self


torch.storage._to, torch.storage._StorageBase.clone, torch.UntypedStorage.cpu = to, clone, cpu
torch.UntypedStorage.resize_ = resize_
