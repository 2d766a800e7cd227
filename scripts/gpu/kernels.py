"""Triton kernels that inductor generates for an update: counted, compiled ahead of time, or interpreted. No GPU."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
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

import lowmem.step.whole
import lowmem.tiles.compiled
from lowmem.step.whole import Kind, Update
from lowmem.tiles.compiled import CompiledTile
from lowmem.tiles.graph import OPTIONS, Function, Sizes
from lowmem.tiles.tile import Fields, Formats, RawTile, Tile

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
        assumptions: what the code takes for granted about sizes.
        launches: recorded instead of launched, unless kernels are interpreted.
        calls: of compiled functions. An update that takes one has no kernels but those of its launches.
        allocated: bytes of buffers that the code allocates, results included.
        read: bytes per element that the rule's passes over the parameter read.
    """

    assumptions: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    calls: int = 0
    allocated: int = 0
    read: int = 0


class _SourceError(Exception):
    """Carries the generated code out of the compiler."""


@contextmanager
def generating(interpreted: bool) -> Iterator[Generated]:
    """Updates of tensors on the CPU are compiled for "cuda". Their kernels are run by Triton's interpreter, or only
    recorded.

    Whoever enters has called `pretend`.
    """
    generated = Generated()
    tensor, create, once = Sizes.tensor, Tile.__init__, Tile._once
    create_update, compile_tile = Update.__init__, CompiledTile._compile

    class CountedFields(Fields):
        def __init__(self, named: dict[str, Tensor], full: dict[str, tuple[Tensor, ...]]) -> None:
            super().__init__(named)
            self._unread = {name: sum(part.itemsize for part in parts) for name, parts in full.items()}

        def __getattr__(self, name: str) -> Tensor:
            generated.read += self._unread.pop(name, 0)
            return super().__getattr__(name)

    def create_and_count(tile: Tile, formats: Formats, raw: RawTile) -> None:
        create(tile, formats, raw)
        if is_fake(raw.grad):  # nothing else is traced
            tile.full = CountedFields(tile.full._named, raw.full)

    def compute_and_count(tile: Tile, name: str, compute: Callable[[], Tensor]) -> Tensor:
        if name not in tile._cache and is_fake(tile._raw.grad):
            parts = {"unclipped": (tile._raw.grad,), "param": tile._raw.param}.get(name, ())
            generated.read += sum(part.itemsize for part in parts)
        return once(tile, name, compute)

    def update_on_gpu(update: Update, kind: Kind, *args: Any) -> None:
        generated.read = 0  # of an attempt that failed
        create_update(update, replace(kind, device=GPU), *args)
        update.kind = kind

    def tile_on_gpu(tile: CompiledTile, *args: Any) -> Any:
        with mock.patch.object(Sizes, "tensor", lambda *args: tensor(*args[:-1], GPU)):
            return compile_tile(tile, *args)

    def compiled(graph: fx.GraphModule, sizes: Sizes, args: Sequence[Tensor]) -> Function:
        source = _source(graph, sizes, args)
        generated.assumptions += sizes.assumptions
        return _load(source, generated)

    def record(kernel: CachingAutotuner, *args: Any, stream: int) -> None:
        generated.launches.append(Launch(kernel, args))

    recording = mock.patch.object(CachingAutotuner, "run", record)
    with (
        mock.patch.object(Update, "__init__", update_on_gpu),
        mock.patch.object(CompiledTile, "_compile", tile_on_gpu),
        mock.patch.object(Tile, "__init__", create_and_count),
        mock.patch.object(Tile, "_once", compute_and_count),
        mock.patch.object(lowmem.step.whole, "compiled", compiled),
        mock.patch.object(lowmem.tiles.compiled, "compiled", compiled),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        _interpreter() if interpreted else recording,
    ):
        yield generated


def _source(graph: fx.GraphModule, sizes: Sizes, args: Sequence[Tensor]) -> str:
    """The code of a module with a function `call`, and of its kernels."""

    def stop(lowering: GraphLowering) -> None:
        raise _SourceError(lowering.codegen()[0].value)

    with (
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        torch._guards.tracing(torch._guards.TracingContext(sizes.mode)),
        torch.no_grad(),
    ):
        try:
            # it would compute constants on the device
            compile_fx(graph, list(args), config_patches=OPTIONS | {"joint_graph_constant_folding": False})
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, _SourceError):
                raise
            return str(inner)
    raise AssertionError("nothing was compiled")


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


# -- compiled ----------------------------------------------------------------------------------------------------------


class Resources(NamedTuple):
    """What a compiled kernel takes: registers and bytes of spilled ones per thread, shared memory per block."""

    registers: int
    spilled: int
    shared: int


def compile_for(kernel: CachingAutotuner, capability: int) -> list[Resources]:
    """Compiles a kernel for a GPU that need not be there, in each of the configurations that a GPU would time."""
    return [_compile(kernel, config, capability) for config in kernel.configs]


def _compile(kernel: CachingAutotuner, config: Any, capability: int) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = kernel._create_compile_meta(config)
    code = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = kernel._create_compile_options(config, meta)
    binary = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = binary.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = triton.knobs.nvidia.ptxas.path
        command = [ptxas, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (
        sum(map(int, re.findall(pattern, log))) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return Resources(registers, spilled, binary.metadata.shared)


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
