"""Single updates: compiled against eager, time against memory bandwidth, temporary memory, cost of dispatch."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lowmem
from benchmarks.engine import update_one
from benchmarks.gpu.measure import (
    COMPILES,
    DEVICE,
    GPU,
    clear,
    device_seconds,
    draw,
    host_seconds,
    kernels,
    median,
    peak,
    seconds,
)
from benchmarks.gpu.report import Report

RULES = [row.name for row in lowmem.rules.table()]
ROUNDING_GOALS = {"stochastic": 1.3, "compensated": 1.6}  # times an update that rounds to nearest
POLICIES: dict[str, dict[str, Any]] = {
    "immediate": {"policy": "immediate"},
    "two_pass": {"policy": "two_pass", "clip_norm": 1.0},
    "deferred, host": {"policy": "deferred", "store": "host", "clip_norm": 1.0},
    "deferred, device": {"policy": "deferred", "store": "device", "clip_norm": 1.0},
}


class Updates:
    """`count` parameters of one size, their gradients, and an optimizer.

    Attributes:
        first_seconds: the time of the first update of all parameters, compilation included.
    """

    def __init__(
        self, size: tuple[int, ...], count: int = 1, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        self.params = [torch.nn.Parameter(draw(*size).to(dtype)) for _ in range(count)]
        self._grads = [draw(*size).to(dtype) for _ in range(count)]
        for value in (*self.params, *self._grads):  # rounding divides by the spacing of floats, which is tiny at 0
            value.detach()[..., 0] = 0.0
        self._opt = lowmem.FusedOptimizer(self.params, **options)
        self.first_seconds = seconds(lambda: torch.autograd.backward(self.params, self._grads))

    @torch.no_grad()
    def run(self) -> None:
        """Updates every parameter once, without a backward pass."""
        for param, grad in zip(self.params, self._grads, strict=True):
            update_one(self._opt, param, grad)


def compiled_against_eager(report: Report, small: bool) -> None:
    """Compares two compiled updates with two eager ones: float32 results that differ in their last bits are rarely
    rounded to different weights.
    """
    matrix = (300, 517)
    cases = [("adalomo", rounding, matrix) for rounding in ("nearest", "stochastic", "compensated")]
    cases += [("adalomo", "nearest", size) for size in ((4, 128, 96), (20_000,))]
    cases += [(rule, "nearest", matrix) for rule in RULES if rule != "adalomo"]
    if small:
        cases = [("lomo", "nearest", (150, 160))]  # the fastest to compile
    if not COMPILES:
        report.row("compiled against eager", None, reason="no compiler is available")
        return
    compiling = 0.0
    for rule, rounding, size in cases:
        what = f"{rule}, {rounding}, {list(size)}: share of weights that differ from the eager ones"
        if not report.affords(what, 15):
            break
        with report.trial(what):
            after = []
            for compile in (False, True):
                torch.manual_seed(0)
                updates = Updates(size, rule=rule, lr=1e-2, rounding=rounding, compile=compile)
                updates.run()
                after.append(updates.params[0].detach().float())
            compiling += updates.first_seconds
            torch.manual_seed(0)
            largest_change = (after[0] - draw(*size)).abs().max()
            difference = (after[1] - after[0]).abs()
            report.row(
                what,
                float((~(difference <= 1e-3 * largest_change)).float().mean()),  # NaN differs, too
                ("<=", 1e-3),
                largest_difference=float(difference.max()),
                largest_change=float(largest_change),
                first_update_seconds=updates.first_seconds,
            )
    report.row("seconds of the first compiled updates together", compiling)


def no_host_sync(report: Report, small: bool) -> None:
    """Takes steps of a large parameter and a stack of small ones; torch raises if the host waits for the device."""
    waits = []
    for rule, (policy, options) in itertools.product(RULES[:2] if small else RULES, POLICIES.items()):
        params = [torch.nn.Parameter(draw(*size)) for size in ((256, 256), (64,), (64,))]
        common = {"rule": rule, "lr": 1e-3, "rounding": "stochastic", "loss_scale": "dynamic", "compile": False}
        opt = lowmem.FusedOptimizer(params, **common, **options)
        try:
            for _ in range(3):
                loss = torch.stack([param.float().square().sum() for param in params]).sum()
                if GPU:
                    torch.cuda.set_sync_debug_mode("error")
                opt.backward(loss)
        except RuntimeError as error:
            waits.append(f"{rule}, {policy}: {error}")
        finally:
            if GPU:
                torch.cuda.set_sync_debug_mode("default")
        opt.remove()
    report.row("rules and policies that wait for the device", len(waits) if GPU else None, ("<=", 0), where=waits)


def update_against_floor(report: Report, small: bool) -> None:
    """Compares an update of a bfloat16 matrix with a copy of as many bytes as the update has to move: 3 reads of the
    gradient, 2 reads and 1 write of the weight. All matrices together are far larger than a cache.
    """
    methods: dict[str, dict[str, Any]] = {
        "adalomo": {"rule": "adalomo"},
        "adalomo, stochastic": {"rule": "adalomo", "rounding": "stochastic"},
        "adalomo, compensated": {"rule": "adalomo", "rounding": "compensated"},
        "adalomo, eager": {"rule": "adalomo", "compile": False},
        "AdamW(fused=True)": {"rule": torch.optim.AdamW, "fused": True, "lr": 1e-3},
    }
    for side, count in ((160, 2),) if small else ((4096, 16), (8192, 4)):
        floor = floor_seconds(6 * 2 * side * side, count)
        report.row(f"floor, {side} x {side}: bytes per second", 12 * side * side / floor, seconds=floor)
        for name, options in methods.items():
            what = f"update, {name}, {side} x {side}: times the floor"
            if not report.affords(what, 15):
                return
            with report.trial(what):
                updates = Updates((side, side), count, **{"compile": COMPILES and not small, **options})
                taken = median(device_seconds, updates.run) / count
                report.row(
                    what,
                    taken / floor,
                    ("<=", 1.3) if name == "adalomo" else None,
                    seconds=taken,
                    host_seconds=median(host_seconds, updates.run) / count,
                    first_step_seconds=updates.first_seconds,
                )
            updates = None
            clear()


def floor_seconds(moved: int, count: int) -> float:
    """The time of a copy that reads and writes `moved` bytes in all."""
    pairs = torch.zeros(count, 2, moved // 2, dtype=torch.uint8, device=DEVICE)

    def copy_all() -> None:
        for into, source in pairs:
            into.copy_(source)

    copy_all()
    return median(device_seconds, copy_all) / count


def update_against_adamw(report: Report, small: bool) -> None:
    """Compares an update by AdaLomo with one by torch's fused AdamW, whose states have the dtype of the weights."""
    side, count = (160, 2) if small else (4096, 8)
    for dtype in (torch.bfloat16, torch.float32):
        updates = Updates((side, side), count, dtype, rule="adalomo", compile=COMPILES and not small)
        ours = median(device_seconds, updates.run) / count
        adamw = torch.optim.AdamW(updates.params, lr=1e-3, fused=True)
        for param in updates.params:
            param.grad = torch.randn_like(param)
        adamw.step()
        theirs = median(device_seconds, adamw.step) / count
        what = f"update, adalomo, {side} x {side}, {dtype}: times AdamW(fused=True)"
        report.row(what, ours / theirs, ("<=", 0.9), seconds=ours, adamw_seconds=theirs)
        del updates, adamw, param
        clear()


def update_memory(report: Report, small: bool) -> None:
    """The kernels of an update by every rule, its temporary memory relative to the parameter's bytes, and what rounding
    costs.
    """
    side = 160 if small else 4096
    for rule in RULES:
        seconds_of = {}
        for rounding in ("nearest", *ROUNDING_GOALS):
            what = f"temporary memory, {rule}, {rounding}: of the parameter's"
            if not report.affords(what, 15):
                return
            with report.trial(what):
                updates = Updates((side, side), rule=rule, rounding=rounding, compile=COMPILES and not small)
                seconds_of[rounding] = taken = median(device_seconds, updates.run)
                most = peak(updates.run)
                report.row(
                    what,
                    None if most is None else most / (2 * side * side),
                    ("<=", 0.01),
                    bytes=most,
                    kernels=kernels(updates.run),
                    seconds=taken,
                    first_step_seconds=updates.first_seconds,
                )
            updates = None
            clear()
        for rounding, goal in ROUNDING_GOALS.items():
            if {"nearest", rounding} <= set(seconds_of):
                times = seconds_of[rounding] / seconds_of["nearest"]
                report.row(f"update, {rule}, {rounding}: times nearest", times, ("<=", goal))


def dispatch(report: Report, small: bool) -> None:
    """The time of the host for a backward into many small tensors, relative to hooks that only drop gradients."""
    count = 40 if small else 720
    grads = [draw(32, 32) for _ in range(count)]

    def host(prepare: Callable[[list[Tensor]], object]) -> float:
        params: list[Tensor] = [torch.nn.Parameter(draw(32, 32)) for _ in range(count)]
        prepared = prepare(params)  # keeps the hooks alive
        torch.autograd.backward(params, grads)
        taken = median(host_seconds, lambda: torch.autograd.backward(params, grads))
        del prepared
        return taken

    def drop(param: Tensor) -> None:
        param.grad = None

    bare = host(lambda params: [param.register_post_accumulate_grad_hook(drop) for param in params])
    report.row("a bare hook: host seconds per tensor", bare / count)
    options: dict[str, Any]
    for options in ({"rule": "lomo"}, {"rule": "adalomo"}, {"rule": "adalomo", "batching": False}):
        taken = host(lambda params, options=options: lowmem.FusedOptimizer(params, **options))
        name = ", ".join(f"{key}={value}" for key, value in options.items())
        goal = ("<=", 1.6) if options == {"rule": "adalomo"} else None
        what = f"dispatch of {count} tensors, {name}: times a bare hook"
        report.row(what, taken / bare, goal, host_seconds=taken / count)
    one = Updates((64, 64), rule="adalomo", batching=False)
    taken = median(host_seconds, one.run, 50)
    # on a CPU the kernels' own time would be counted
    what = "an update of 64 x 64, adalomo: host seconds"
    report.row(what, taken if GPU else None, ("<=", 60e-6), kernels=kernels(one.run))
