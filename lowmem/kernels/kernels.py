"""Compiles the kernels for one kind of parameters, and launches them for parameters that are updated together."""

import functools
import hashlib
import linecache
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.kernels.arguments import ARGS
from lowmem.kernels.source import KernelSource
from lowmem.kernels.tables import FOLD, Member, Tables
from lowmem.tiles.stored import RankGroup
from lowmem.tiles.tile import Reading
from lowmem.tiles.traced import TracedUpdate

# Options of Triton's compiler: no software pipelining, no fused multiply-adds.
COMPILER_OPTIONS: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": False}
WARPS_BETWEEN, WARPS_FOLD = 16, 8

# `ARGS` with the arguments of `fold`.
ARG_TYPES = ARGS | {"jobs": torch.int64, "pieces": torch.int64}


def try_compiler() -> None:
    """Compiles one of the kernels for the current GPU, and raises Triton's error if that fails."""
    from lowmem.kernels.device import fold

    pointers = (ARG_TYPES[name] for name in ("programs", "jobs", "pieces", "work"))
    fold.warmup(*pointers, False, *FOLD, grid=(1,), num_warps=WARPS_FOLD, **COMPILER_OPTIONS)


class Kernels:
    """The kernels of an update, for any number of parameters of any size.

    Args:
        one_row: whether parameters have one row per slice, and may be updated as single lines.
        aligned: whether every member and its gradients are aligned (`Member.is_aligned`).

    Raises:
        UnsupportedError: the update has an unknown operation.
    """

    def __init__(self, update: TracedUpdate, *, one_row: bool, aligned: bool) -> None:
        self.source = KernelSource(update, one_row=one_row, aligned=aligned)
        self._compiled: dict[Any, Any] = {}  # by name and constants

    @functools.cached_property
    def functions(self) -> dict[str, Any]:
        """Triton functions by name."""
        import triton
        import triton.language as tl

        from lowmem.kernels import device

        text = self.source.text
        shared = {each: getattr(device, each) for each in device.__all__}
        name = f"lowmem.kernels.generated_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # Triton reads it here
        module: dict[str, Any] = {"__name__": name, "triton": triton, "tl": tl, **shared}
        exec(compile(text, name, "exec"), module)  # noqa: S102 (written by this package alone)
        return module

    @property
    def variants(self) -> Iterator[tuple[str, tuple[Any, ...], int]]:
        """Yields the name, constants and number of warps of each kernel."""
        for name, _ in self.source.steps:
            yield name, (), WARPS_BETWEEN if name.startswith("between") else self.source.tile.warps
        kinds = {kind for each in self.source.update.passes for kind, _ in each.sums}
        for largest in {kind == "row_max" for kind in kinds}:
            yield "fold", (largest, *FOLD), WARPS_FOLD

    def compile(self) -> None:
        """Compiles the kernels, unless they are already compiled. Raises Triton's errors."""
        if self._compiled:
            return
        compiled = dict[Any, Any]()
        kind = self.source.update.kind
        device = kind.device
        types = ARG_TYPES | {f"reading_{key[1]}": dtype for key, dtype, _ in kind.args if key[0] == "reading"}
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for name, constants, warps in self.variants:
                function = self.functions[name]
                args = [*(types[each] for each in function.arg_names if each in types), *constants]
                compiled[name, constants] = function.warmup(*args, grid=(1,), num_warps=warps, **COMPILER_OPTIONS)
        self._compiled = compiled

    def launch(self, launch: "Launch", args: Sequence[Any]) -> None:
        """Launches a kernel. The device of its arguments must be the current device."""
        args = (*launch.args, *args, *launch.constants)
        if (kernel := self._compiled[launch.name, launch.constants]) is None:  # in Triton's interpreter
            self.functions[launch.name][launch.grid,](*args)
        else:
            kernel[launch.grid, 1, 1](*args)


class Launch(NamedTuple):
    """A launch of a kernel."""

    name: str  # name of the kernel
    grid: int  # number of programs
    args: tuple[Tensor, ...]  # the first arguments
    constants: tuple[Any, ...] = ()  # the last arguments


class Reduction(NamedTuple):
    """A part of the workspace that is reduced over ranks, by sum or maximum."""

    part: slice
    largest: bool


class Batch:
    """Parameters that are updated together. All static values are on their device. They include pointers to the
    parameters' tensors, which are not kept alive.

    Args:
        ranks: the ranks that the parameters are sharded over; None if they are not sharded.

    Attributes:
        steps: the launches and reductions of a run.
    """

    def __init__(self, kernels: Kernels, members: Sequence[Member], ranks: RankGroup | None = None) -> None:
        self._kernels = kernels
        self._ranks = ranks
        source = kernels.source
        self.device = members[0].tensors["param", 0].device
        tables = Tables(source, members, sharded=ranks is not None)
        self._size = tables.size
        self._scalars = torch.zeros(
            len(tables.slices), len(source.scalars.slots), dtype=torch.float64, device=self.device
        )
        rectangles = self._to_device(tables.rectangles)
        slices = self._to_device(tables.slices)
        programs = self._to_device(tables.programs, torch.int32)
        self.steps = list[Launch | Reduction]()
        for name, n in source.steps:
            if name.startswith("between"):
                self.steps.append(Launch(name, len(tables.slices), (programs, slices)))
                continue
            if len(programs):
                self.steps.append(Launch(name, len(programs), (programs, rectangles)))
            for largest in (False, True):
                of_fold, jobs, pieces = tables.folds(n, largest)
                if jobs:
                    args = (self._to_device(of_fold, torch.int32), self._to_device(jobs), self._to_device(pieces))
                    self.steps.append(Launch("fold", len(args[0]), args, (largest, *FOLD)))
                    if ranks is not None:
                        self.steps.append(Reduction(tables.totals[n, largest], largest))
        on_gpu = self.device.type == "cuda"
        self._pointers = list[int]()  # addresses of the gradients in the last run
        self._on_host = self._on_device = torch.empty(len(members), dtype=torch.int64, pin_memory=on_gpu)
        self._as_array = self._on_host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        self._results = torch.zeros(len(source.results), len(members), dtype=torch.float64, device=self.device)
        self._by_name = dict(zip(source.results, self._results, strict=True))

    def _to_device(self, numbers: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.device)

    def run(self, grads: Sequence[Tensor], numbers: Tensor, keys: Tensor, reading: Reading) -> Mapping[str, Tensor]:
        """Updates the members.

        Args:
            grads: the gradient of each member, contiguous, in the memory order of its tensors.
            numbers, keys: the numbers of all groups, float64, and the noise keys of all parameters, int32.
            reading: how the gradients are read. Its scalars are the same for all members.

        Returns:
            The results of the update by name, float64 [members], which the next run overwrites.
        """
        pointers = [grad.data_ptr() for grad in grads]
        work = torch.empty(self._size, dtype=torch.float32, device=self.device)
        with torch.cuda.device(self.device) if self._copied is not None else nullcontext():
            step = (self._send(pointers), numbers, keys)
            args = (*step, self._scalars, work, self._results, *reading.tensors.values())
            for each in self.steps:
                if isinstance(each, Reduction):
                    assert self._ranks is not None
                    work[each.part] = self._ranks.all_reduce([work[each.part]], largest=each.largest)[0]
                else:
                    self._kernels.launch(each, (work,) if each.name == "fold" else args)
        return self._by_name

    def _send(self, pointers: list[int]) -> Tensor:
        """Copies pointers to the device unless they equal the last run's. Waits for the previous copy, which has
        normally finished, because each step waits for the outcome of the previous step.
        """
        if pointers != self._pointers:
            if self._copied is not None:
                self._copied.synchronize()
            self._pointers = pointers
            self._as_array[:] = pointers
            self._on_device = self._on_host.to(self.device, non_blocking=True)
            if self._copied is not None:
                self._copied.record()
        return self._on_device
