"""Seconds of the host and of the device apart, and bytes."""

import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lowmem.optimizer import has_compiler

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
    """Gives back what nothing refers to any more; an optimizer and its hooks refer to each other."""
    if GPU:
        gc.collect()
        torch.cuda.empty_cache()


def free_memory() -> int:
    """Bytes that are free on the device."""
    clear()
    return torch.cuda.mem_get_info()[0] if GPU else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def median(measure: Callable[[Run], float], run: Run, repeats: int = 7) -> float:
    return statistics.median(measure(run) for _ in range(repeats))


def seconds(run: Run) -> float:
    """Of one call, from an idle device to an idle device."""
    sync()
    start = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - start


def host_seconds(run: Run) -> float:
    """Of one call, until everything is queued."""
    sync()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_seconds(run: Run) -> float:
    """Of what one call queues. The device sleeps until that is in the queue, so that it never waits for the host; more
    than the thousand kernels that a queue holds would have to wait.
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


def peak(run: Run) -> int | None:
    """Most bytes allocated during a call, above what was allocated before it; None where nobody counts."""
    if not GPU:
        return None
    sync()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    sync()
    return torch.cuda.max_memory_allocated() - before
