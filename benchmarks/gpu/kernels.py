"""Triton kernels that inductor generates for an update: counted, or interpreted. No GPU."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor import async_compile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import is_fake

from lowmem.placements.base import Shard
from lowmem.tiles.graph import GPU_OPTIONS, Compiler, Function, Sizes, known
from lowmem.tiles.tile import RawTile, Tile

GPU = torch.device("cuda", 0)


@dataclass
class Launch:
    """A kernel and the arguments that it is launched with."""

    kernel: CachingAutotuner
    args: tuple[Any, ...]

    @property
    def moved(self) -> int:
        """Bytes that it reads and writes: those of a tensor once for each loop over it, as if no cache kept them from
        one loop to the next. What one loop reads several times, such as a vector for each row, counts once.
        """
        tensors = dict(zip(self.kernel.fn.arg_names, self.args, strict=False))
        accesses, loop = set(), 0
        for line in self.kernel.fn.src.split("\n"):
            loop += line.startswith("    for ")
            inside = loop if line.startswith(8 * " ") else None
            for how, name, index in re.findall(r"tl\.(load|store|atomic_add)\((\w+) \+ \((.*)", line):
                varies = re.search(r"\b[xyr]\d*_?\d+\b|\btmp\d+", index.split(", ")[0]) is not None
                accesses.add((how, inside, name, varies))
        return sum(tensors[name].nbytes if varies else tensors[name].itemsize for *_, name, varies in accesses)


@dataclass
class Generated:
    """What inductor generates while updates run.

    Attributes:
        launches: recorded instead of launched, unless kernels are interpreted.
        calls: of compiled functions. A shard has several, cut where sums of its tiles and ranks are taken.
        allocated: bytes of buffers that the code allocates, results included.
        tiles: as rules have read them while they were traced.
    """

    launches: list[Launch] = field(default_factory=list)
    calls: int = 0
    allocated: int = 0
    tiles: list[tuple[Tile, RawTile]] = field(default_factory=list)

    @property
    def read(self) -> float:
        """Bytes per element that the rule's passes over the parameter read."""
        total = 0.0
        for tile, raw in self.tiles:
            read = {**vars(tile), **vars(tile.full)}
            held = {"param": raw.param, **raw.full}
            total += raw.grad.itemsize if "unclipped" in read else 0
            total += sum(each.storage.bytes_per_element for name, each in held.items() if name in read)
        return total


class _OneRank:
    """The ranks of a shard that is all of its parameter."""

    def all_reduce(self, tensors: Sequence[Tensor], *, largest: bool = False) -> list[Tensor]:
        return list(tensors)


class _SourceError(Exception):
    """Carries the generated code out of the compiler."""


@contextmanager
def generating(interpreted: bool, sharded: bool = False) -> Iterator[Generated]:
    """Updates of tensors on the CPU are compiled for "cuda", as those of a shard if `sharded`. Their kernels are run by
    Triton's interpreter, or only recorded.

    Whoever enters has called `pretend`.
    """
    generated = Generated()
    tensor, create = Sizes.tensor, Tile.__init__

    def create_and_note(tile: Tile, raw: RawTile) -> None:
        create(tile, raw)
        if is_fake(raw.grad):  # nothing else is traced
            generated.tiles.append((tile, raw))

    def compiled(graph: fx.GraphModule, sizes: Sizes, args: Sequence[Tensor]) -> Function:
        source = _source(graph, sizes, args)
        return graph if source is None else _load(source, generated)

    def record(kernel: CachingAutotuner, *args: Any, stream: int) -> None:
        generated.launches.append(Launch(kernel, args))

    def fail(error: Exception) -> NoReturn:
        raise error

    recording = mock.patch.object(CachingAutotuner, "run", record)
    with (
        mock.patch("lowmem.step.compiled._TRACED", {}),
        mock.patch.object(Compiler, "give_up", fail),
        mock.patch.object(Shard, "ranks_of", lambda *_: _OneRank() if sharded else None),
        mock.patch.object(Sizes, "tensor", lambda sizes, shape, dtype, device: tensor(sizes, shape, dtype, GPU)),
        mock.patch.object(Tile, "__init__", create_and_note),
        mock.patch("lowmem.tiles.traced.compiled", compiled),
        mock.patch("lowmem.tiles.graph.compiled", compiled),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        _interpreter() if interpreted else recording,
    ):
        yield generated


def _source(graph: fx.GraphModule, sizes: Sizes, args: Sequence[Tensor]) -> str | None:
    """The code of a module with a function `call`, and of its kernels; None if there is nothing to compute."""

    def stop(lowering: GraphLowering) -> None:
        raise _SourceError(lowering.codegen()[0].value)

    with (
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        torch._guards.tracing(torch._guards.TracingContext(sizes.mode)),
        torch.no_grad(),
    ):
        try:
            # it would compute constants on the device
            patches = known(GPU_OPTIONS) | {"joint_graph_constant_folding": False}
            compile_fx(graph, list(args), config_patches=patches)
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, _SourceError):
                raise
            return str(inner)
    return None


def _load(source: str, generated: Generated) -> Function:
    """The generated function, which allocates on the CPU what it would allocate on the GPU."""

    def kernel(_: Any, name: str, code: str, **__: Any) -> Any:
        return getattr(PyCodeCache.load(code), name)

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = torch.empty_strided(size, stride, dtype=dtype)
        generated.allocated += buffer.nbytes
        return buffer

    torch._C._cuda_getCurrentRawStream = lambda _: 0
    torch.cuda._DeviceGuard = lambda _: nullcontext()  # type: ignore[misc, assignment]
    with (
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cuda", empty_strided),
        mock.patch.object(async_compile.AsyncCompile, "triton", kernel),
    ):
        call = PyCodeCache.load(source).call

    def count_and_call(*args: Tensor) -> list[Tensor]:
        generated.calls += 1
        return list(call(list(args)))

    return count_and_call


# -- interpreted -------------------------------------------------------------------------------------------------------


@contextmanager
def _interpreter() -> Iterator[None]:
    """What the interpreter lacks: CUDA's functions, and the rounding of float32 to bfloat16, for it cuts off."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding)
        return torch.from_numpy(data).bfloat16().view(torch.uint16).numpy()

    with (
        mock.patch.object(interpreter, "_convert_float", rounded),
        mock.patch.object(triton_helpers, "libdevice", _Library()),
    ):
        yield


class _Library:
    """CUDA's library of functions, by torch."""

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        function = getattr(torch, {"nearbyint": "round"}.get(name, name))

        def run(*args: Any) -> Any:
            values = [torch.from_numpy(arg.handle.data) if isinstance(arg, tl.tensor) else arg for arg in args]
            result = function(*values)
            first = next(arg for arg in args if isinstance(arg, tl.tensor))
            dtype = tl.int1 if result.dtype == torch.bool else first.dtype
            shape = list(first.shape)
            return tl.tensor(TensorHandle(result.numpy(), dtype), tl.block_type(dtype, shape) if shape else dtype)

        return run
