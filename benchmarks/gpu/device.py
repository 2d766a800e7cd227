"""Measures the time, kernels and memory of a call on a GPU, or on a CPU to try a script."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lowmem
from benchmarks.engine import update_one
from benchmarks.measurement import seconds, sync

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
QUEUE = 800  # number of launches that fit into a GPU's queue

Run = Callable[[], object]


def clear() -> None:
    """Frees unused memory, including reference cycles of optimizers and their hooks."""
    if GPU:
        gc.collect()
        torch.cuda.empty_cache()


def host_seconds(run: Run) -> float:
    """Returns the seconds until a call has queued all of its work."""
    sync()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_seconds(run: Run, repeats: int = 7) -> float:
    """Returns the median device seconds of the kernels that a call launches.

    The device sleeps until all kernels are queued, so that it never waits for the host. If a call launches more kernels
    than fit into the queue, the result includes host time.
    """
    if (kernels(run) or QUEUE) >= QUEUE:
        return median(run, repeats)
    cycles = int(host_seconds(run) * 3e9)  # 1.5 times the host time at 2 GHz
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        sync()
        torch.cuda._sleep(cycles)
        start.record()
        run()
        end.record()
        sync()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def median(run: Run, repeats: int = 7) -> float:
    return statistics.median(seconds(run) for _ in range(repeats))


def kernels(run: Run) -> int | None:
    """Returns the number of kernels that a call launches, including copies and fills, or None on a CPU."""
    if not GPU:
        return None
    run()
    sync()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        sync()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def peak(run: Run) -> int | None:
    """Returns the peak of allocated bytes during a call minus the bytes before it, or None on a CPU."""
    if not GPU:
        return None
    sync()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    sync()
    return torch.cuda.max_memory_allocated() - before


def pinned_bytes() -> int:
    """Returns the pinned bytes that torch has allocated, after returning unused blocks to the system."""
    if not GPU:
        return 0
    gc.collect()
    sync()
    torch._C._host_emptyCache()
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def normal(*size: int) -> Tensor:
    return torch.randn(size, device=DEVICE).bfloat16()


def squares(params: Sequence[Tensor]) -> Tensor:
    """Returns a loss that depends on every parameter."""
    return torch.stack([param.float().square().sum() for param in params]).sum()


class Updates:
    """Parameters of one size, their gradients, and an optimizer.

    Attributes:
        first_seconds: time of the first update of all parameters, including compilation.
    """

    def __init__(self, size: Sequence[int], count: int, *, weights: str = "", **options: Any) -> None:
        torch.manual_seed(0)
        module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))  # quantize_ needs modules
        for linear in module:
            linear.weight = nn.Parameter(normal(*size))
        if weights:
            lowmem.quantize_(module, weights)
        self.params = [linear.weight for linear in module]
        self._grads = [normal(*size) for _ in range(count)]
        options = {"lr": 1e-2, "batching": False, "state_storage": "float32", **options}
        self._opt = lowmem.FusedOptimizer(self.params, **options)
        self.first_seconds = seconds(self.run)

    @torch.no_grad()
    def run(self) -> None:
        """Updates every parameter once, without a backward pass."""
        for param, grad in zip(self.params, self._grads, strict=True):
            update_one(self._opt, param, grad)
