"""Compiles a function of tensors once, with symbolic sizes, and calls it without guards.

`torch.compile` checks guards before every call, which takes longer than the update of a small parameter. Here the
caller compiles for one kind of arguments, and calls the code only with those. Inductor caches compiled code on disk,
as it does for `torch.compile`.
"""

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

logger = logging.getLogger(__name__)

# Prevents Inductor from materializing long expressions in tile-sized buffers.
OPTIONS: dict[str, Any] = {f"realize_{kind}_threshold": 1 << 10 for kind in ("reads", "opcount", "acc_reads")}

# Skips Inductor's 9-second probe of instruction sets. If the compiler is too old for the processor, compiling fails.
OPTIONS["cpp.vec_isa_ok"] = True

# CUDA graphs would copy gradients into a separate buffer for each size.
OPTIONS["triton.cudagraphs"] = False

# By default, Inductor divides approximately on a GPU, and fuses adjacent multiplies and adds.
GPU_OPTIONS = OPTIONS | {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}

Size = int | torch.SymInt
Function = Callable[..., Any]

# Inductor compiles on one thread at a time.
_LOCK = threading.Lock()

# Part of Inductor's cache key, since cached code may predate the changes below.
_VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@functools.cache
def try_compiler(device: str) -> None:
    """Compiles a tiny function for a device type, and raises the compiler's error if that fails."""
    sizes = Sizes()
    fake = sizes.tensor((sizes.size(64),), torch.float32, torch.device(device))
    compiled(trace(lambda tensor: [tensor + 1], [fake]), sizes, [fake])


class Sizes:
    """Symbolic sizes of the arguments of one graph, and fake tensors of those sizes."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self._examples: list[Tensor] = []  # each must exist as long as its symbol is used

    def size(self, example: int) -> torch.SymInt:
        """Returns the symbol of a size that varies from call to call. example: a possible value."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        self._examples.append(torch.empty(example, device="meta"))
        return self.mode.from_tensor(self._examples[-1], symbolic_context=context).shape[0]  # type: ignore[return-value]

    def tensor(self, shape: Sequence[Size], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a contiguous fake tensor to pass to `trace`."""
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device)


def trace(fn: Function, args: Sequence[Tensor | Size]) -> fx.GraphModule:
    """Traces the operations of `fn(*args)`, which returns tensors. args: fake tensors and sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # if tracing fails, the caller runs the function eagerly
    try:
        with torch.no_grad(), _use_lazy_graph_module(True):
            traced = make_fx(fn, fused_operations(), tracing_mode="symbolic")(*args)
    finally:
        log.setLevel(level)
    return module(traced.graph)  # without the `shape_env` of `traced`, which Inductor cannot hash for its cache key


def module(graph: fx.Graph) -> fx.GraphModule:
    """Returns a graph as a module without Python code, which Inductor does not need."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(torch.nn.Module(), graph)


def fused_operations() -> dict[Any, Function]:
    """Returns decompositions of `addcmul` and `lerp` with fused multiply-adds, as in their eager kernels."""
    from torch._inductor.inductor_prims import fma

    def addcmul(value: Tensor, one: Tensor, other: Tensor, **scale: Any) -> Any:
        return NotImplemented if scale or not value.is_floating_point() else fma(one, other, value)

    def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
        near = weight.abs() < 0.5
        return fma(torch.where(near, weight, weight - 1), end - start, torch.where(near, start, end))

    return {torch.ops.aten.addcmul.default: addcmul, torch.ops.aten.lerp.Tensor: lerp}


def compiled(graph: fx.GraphModule, sizes: Sizes, args: Sequence[Tensor | Size]) -> Function:
    """Compiles the result of `trace` for `args`. The returned function takes real tensors with matching sizes."""
    from torch._inductor.compile_fx import compile_fx

    on_cpu = all(arg.device.type == "cpu" for arg in args if isinstance(arg, Tensor))
    patches = OPTIONS if on_cpu else GPU_OPTIONS
    tracing = torch._guards.tracing(torch._guards.TracingContext(sizes.mode))
    config: Any = torch.compiler.config
    own_keys = config.patch(cache_key_tag=f"{config.cache_key_tag} {_VERSION}")
    with _LOCK, own_keys, _vector_code(), tracing, torch.no_grad():
        return compile_fx(graph, list(args), config_patches=patches)  # type: ignore[return-value]


@contextmanager
def _vector_code() -> Iterator[None]:
    """Makes Inductor generate faster vector code for CPUs, with the same results.

    By default, it reinterprets the bits of a float32 in a loop over elements. With mixed 16- and 32-bit tensors it
    processes half vectors, so each load waits for the previous store. With 8-bit tensors it processes two float32
    vectors at a time, and converts them to and from integers element by element.
    """
    from torch._inductor.codegen import cpp

    V, types = cpp.V, cpp.DTYPE_TO_CPP  # type: ignore[attr-defined]
    narrow_type = cpp.get_loop_body_lowp_fp

    def to_dtype_bitcast(value: Any, dtype: torch.dtype, source: torch.dtype) -> str:
        count = V.kernel._get_num_vectors(source)
        vector = "Vectorized<{}>" if count == 1 else f"VectorizedN<{{}}, {count}>"
        # not `c10::bit_cast`, which needs C++20 for types that are not trivially constructible
        to = f"at::vec::{vector.format(types[dtype])} to"
        return f"[&] {{ const auto from = {value}; {to}; std::memcpy((void*)&to, &from, sizeof(to)); return to; }}()"

    def get_loop_body_lowp_fp(body: Any) -> tuple[torch.dtype | None, bool]:
        found, is_wide = narrow_type(body)
        nodes = chain.from_iterable(block.graph.nodes for block in (body.root_block, *body.subblocks.values()))
        loaded = {V.graph.get_dtype(node.args[1]) for node in nodes if node.target == "load"}
        return None if loaded & {torch.int8, torch.uint8} else found or torch.bfloat16, is_wide

    with (
        patch.object(cpp.CppVecOverrides, "to_dtype_bitcast", staticmethod(to_dtype_bitcast)),
        patch.object(cpp, "get_loop_body_lowp_fp", get_loop_body_lowp_fp),
    ):
        yield


def materialize(value: Tensor) -> Tensor:
    """Forces Inductor to materialize a small tensor (before `as_strided`), so that it is not recomputed for each
    element of a tile that uses it. An int32 arange also stays int32 (torch 2.11: int64).
    """
    return torch.as_strided(value, value.shape, value.stride())


def fuse_with(value: Tensor, to: Tensor) -> Tensor:
    """Returns `value` unchanged, and makes compiled CPU code also read `to`. On CPUs, Inductor fuses two computations
    into one loop only if they read the same tensor, or if one depends on the other.
    """
    return torch.where(to > 0, value, value) if value.device.type == "cpu" else value
