"""Measures the time of the host and of the device separately, and memory."""

import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.engine import has_compiler

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
COMPILES = has_compiler(DEVICE.type)

Run = Callable[[], object]


def draw(*size: int) -> Tensor:
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16)


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def clear() -> None:
    """Frees what is no longer referenced, reference cycles of optimizers and their hooks included."""
    if GPU:
        gc.collect()
        torch.cuda.empty_cache()


def free_memory() -> int:
    """The free bytes of the device."""
    clear()
    return torch.cuda.mem_get_info()[0] if GPU else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def median(measure: Callable[[Run], float], run: Run, repeats: int = 7) -> float:
    return statistics.median(measure(run) for _ in range(repeats))


def seconds(run: Run) -> float:
    """The time of a call, from an idle device to an idle device."""
    sync()
    start = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - start


def host_seconds(run: Run) -> float:
    """The time of a call until everything is queued."""
    sync()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_seconds(run: Run) -> float:
    """The time that the device takes for what a call queues.

    The device sleeps until everything is queued, so that it never waits for the host. A queue holds about a thousand
    kernels; a call must not launch more.
    """
    if not GPU:
        return seconds(run)
    cycles = int(host_seconds(run) * 3e9)  # half as long again as the host takes, at 2 GHz
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sync()
    torch.cuda._sleep(cycles)
    start.record()
    run()
    end.record()
    sync()
    return start.elapsed_time(end) / 1e3


def kernels(run: Run) -> int | None:
    """How many kernels a call launches, copies and fills included; None on a CPU."""
    if not GPU:
        return None
    run()
    sync()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        sync()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def peak(run: Run) -> int | None:
    """The peak of allocated bytes during a call, above those before it; None on a CPU, where they are not counted."""
    if not GPU:
        return None
    sync()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    sync()
    return torch.cuda.max_memory_allocated() - before
