"""Compiled code: a function of tensors that is traced once, with sizes as symbols, and called without guards.

`torch.compile` asks before every call whether its code is valid for the arguments, which takes longer than the update
of a small parameter. Here the caller knows: it compiles for a kind of arguments, and calls with no others. Inductor
keeps what it compiled on disk, as it does for `torch.compile`.
"""

import functools
import logging
import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

logger = logging.getLogger(__name__)

# Inductor would put values for which much is read or computed into buffers as large as the tile, and go on from there.
OPTIONS: dict[str, Any] = {f"realize_{kind}_threshold": 1 << 10 for kind in ("reads", "opcount", "acc_reads")}

# Before its first kernel Inductor compiles a program for each instruction set, to see whether the compiler knows it: 9
# seconds. What the processor has is known, and a compiler that is too old for it fails.
OPTIONS["cpp.vec_isa_ok"] = True

Size = int | torch.SymInt
Function = Callable[..., Any]

# Inductor compiles on one thread at a time.
_LOCK = threading.Lock()


class Compiler:
    """seconds: what compiling has taken so far in this process.  failure: why it has failed, the first time. From then
    on updates are not compiled.
    """

    seconds = 0.0
    failure: str | None = None

    @classmethod
    def give_up(cls, error: Exception) -> None:
        """Notes a failure."""
        if cls.failure is None:
            cls.failure = f"{type(error).__name__}: {error}"
            logger.warning("updates are not compiled from here on, because compiling one has failed: %s", cls.failure)


@functools.cache
def try_compiler(device: str) -> None:
    """Compiles a tiny function for a type of device; raises whatever the compiler does."""
    sizes = Sizes()
    fake = sizes.tensor((sizes.size("size", 64),), torch.float32, torch.device(device))
    compiled(trace(lambda tensor: [tensor + 1], [fake]), sizes, [fake])


class Sizes:
    """Symbolic sizes of the arguments of one graph, and fake tensors of those sizes."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env)

    def size(self, name: str, example: int) -> torch.SymInt:
        """A size of an argument that is known when the graph is called, such as `example`."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self._env.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        return self._env.create_symintnode(symbol, hint=example, source=source)  # type: ignore[return-value]

    def tensor(self, shape: Sequence[Size], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous fake tensor, as an argument of `trace`."""
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device)


def trace(fn: Function, args: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of `fn(*args)`, whose `args` are fake tensors and which returns tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what cannot be traced is not an error: the caller has another way
    try:
        with torch.no_grad():
            traced = make_fx(fn, tracing_mode="symbolic")(*args)
    finally:
        log.setLevel(level)
    return fx.GraphModule(torch.nn.Module(), traced.graph)  # without its `shape_env`, for which there is no cache key


def compiled(graph: fx.GraphModule, sizes: Sizes, args: Sequence[Tensor]) -> Function:
    """Compiles what `trace` has returned for `args`. The result is called with real tensors of such sizes."""
    from torch._inductor.compile_fx import compile_fx

    with _LOCK, torch._guards.tracing(torch._guards.TracingContext(sizes.mode)), torch.no_grad():
        return compile_fx(graph, list(args), config_patches=OPTIONS)  # type: ignore[return-value]


def realized(value: Tensor) -> Tensor:
    """Makes compiled code compute a small tensor once, where it would compute it again for each element of a tile that
    uses it: Inductor has a tensor in memory before it takes it `as_strided`.
    """
    return torch.as_strided(value, value.shape, value.stride())


def tied(value: Tensor, to: Tensor) -> Tensor:
    """Returns `value` unchanged, and makes compiled CPU code read `to` as well. There Inductor fuses two computations
    into one loop only if they read the same tensor, or if one depends on the other.
    """
    return torch.where(to > 0, value, value) if value.device.type == "cpu" else value


# -- numbers -----------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten

# Operations of float64 scalars as Python computes them, in a hundredth of the time.
_IN_PYTHON: dict[Any, Callable[..., Any]] = {
    _aten.select.int: lambda numbers, dim, i: numbers[i],
    _aten._to_copy.default: lambda value, **dtype: value,
    _aten.add.Tensor: operator.add,
    _aten.sub.Tensor: operator.sub,
    _aten.mul.Tensor: operator.mul,
    _aten.div.Tensor: operator.truediv,
    _aten.pow.Tensor_Tensor: operator.pow,
    _aten.pow.Tensor_Scalar: operator.pow,
    _aten.pow.Scalar: operator.pow,
    _aten.rsub.Scalar: lambda value, other: other - value,
    _aten.neg.default: operator.neg,
    _aten.sqrt.default: math.sqrt,
}


class Numbers:
    """What a traced function computes from its numbers alone: the same for all parameters of a group in a step.

    It is computed once, on the host, and the graph is given the results that it uses.

    Args:
        graph: traced with a float64 vector of numbers as its last argument. It is changed, and takes two vectors of
            results in place of that one: float32 and float64.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        numbers = [node for node in nodes if node.op == "placeholder"][-1]
        known = {numbers}
        for node in nodes:
            inputs = node.all_input_nodes
            if node.target in _IN_PYTHON and inputs and known.issuperset(inputs) and _is_number(node):
                known.add(node)
        known_nodes = [node for node in nodes if node in known]
        used = [node for node in known_nodes if node is not numbers and not known.issuperset(node.users)]
        self._dtypes = torch.float32, torch.float64
        self._by_dtype = [[node for node in used if node.meta["val"].dtype == dtype] for dtype in self._dtypes]
        self._compute = self._in_python(known_nodes).forward
        self._replace(graph, numbers, known_nodes)

    def _in_python(self, nodes: Sequence[fx.Node]) -> fx.GraphModule:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in nodes:
            copies[node] = copy = graph.node_copy(node, copies.__getitem__)
            copy.target = _IN_PYTHON.get(node.target, node.target)
        graph.output([[copies[node] for node in same] for same in self._by_dtype])
        return fx.GraphModule(torch.nn.Module(), graph)

    def _replace(self, graph: fx.GraphModule, numbers: fx.Node, known: Sequence[fx.Node]) -> None:
        for dtype, same in zip(self._dtypes, self._by_dtype, strict=True):
            with graph.graph.inserting_before(numbers):
                vector = graph.graph.placeholder(str(dtype).removeprefix("torch."))
            for i, node in enumerate(same):
                with graph.graph.inserting_before(node):
                    result = graph.graph.call_function(_aten.select.int, (vector, 0, i))
                node.replace_all_uses_with(result)
        for node in reversed(known):
            graph.graph.erase_node(node)
        graph.recompile()

    def fake(self, sizes: Sizes, device: torch.device) -> list[Tensor]:
        """Fake vectors of results, for `compiled`."""
        pairs = zip(self._dtypes, self._by_dtype, strict=True)
        return [sizes.tensor((len(same),), dtype, device) for dtype, same in pairs]

    def results(self, values: Sequence[float], device: torch.device) -> list[Tensor]:
        """The results for these numbers: the last two arguments of the graph."""
        pairs = zip(self._dtypes, self._compute(values), strict=True)
        return [torch.tensor(same, dtype=dtype).to(device, non_blocking=True) for dtype, same in pairs]


def _is_number(node: fx.Node) -> bool:
    """Whether it computes a scalar, in float64 up to a cast: the results of a cast are not computed with in Python."""
    value = node.meta.get("val")
    cast = node.target is _aten._to_copy.default
    allowed = set(node.kwargs) <= ({"dtype", "device"} if cast else set())
    dtypes = (torch.float32, torch.float64) if cast else (torch.float64,)
    from_double = all(each.meta["val"].dtype == torch.float64 for each in node.all_input_nodes)
    return isinstance(value, Tensor) and value.ndim == 0 and value.dtype in dtypes and allowed and from_double
