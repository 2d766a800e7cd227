"""Prints a traced graph as Triton code, one line per operation, with the rounding of eager PyTorch."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from lowmem.errors import UnsupportedError

TYPES = {
    torch.float64: "tl.float64", torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16", torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int8: "tl.int8",
    torch.uint8: "tl.uint8", torch.bool: "tl.int1",
}  # fmt: skip

# Operations that only change the shape of a value, and operations that return another tensor with the same values.
RESHAPES = {"view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "as_strided", "select"}
COPIES = {"clone", "alias", "detach", "contiguous", "lift_fresh_copy"}
REDUCTIONS = {"sum", "mean", "amax"}

EXPRESSIONS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}", "neg": "-{0}",
    "abs": "tl.abs({0})", "div": "tl.div_rn({0}, {1})", "reciprocal": "tl.div_rn(1.0, {0})", "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({0}))", "addcdiv": "{0} + tl.div_rn({1}, {2})", "fma": "tl.fma({0}, {1}, {2})",
    "floor": "tl.floor({0})", "square": "{0} * {0}",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    "round": "tl.where(tl.abs({0}) < 4194304.0, ({0} + 12582912.0) - 12582912.0, {0})",  # ties to even
    "maximum": "larger({0}, {1})", "minimum": "smaller({0}, {1})", "where": "tl.where({0}, {1}, {2})",
    "isnan": "{0} != {0}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}", "bitwise_not": "~{0}", "logical_and": "{0} & {1}", "logical_or": "{0} | {1}",
    "logical_not": "{0} == 0", "lshift": "{0} << {1}", "bitwise_left_shift": "{0} << {1}",
    "rshift": "{0} >> {1}", "bitwise_right_shift": "{0} >> {1}",
}  # fmt: skip
# In float64, these operators round correctly. "" means that an operation is not supported.
IN_DOUBLE = {
    "div": "{0} / {1}", "sqrt": "tl.sqrt({0})", "reciprocal": "1.0 / {0}", "rsqrt": "1.0 / tl.sqrt({0})",
    "addcdiv": "{0} + {1} / {2}", "pow": "power({0}, {1})", "round": "", "fma": "",
}  # fmt: skip
# Division of integers by positive integers. (Triton rounds towards zero.)
OF_INTEGERS = {
    "floor_divide": "({0} - ({0} % {1} + {1}) % {1}) // {1}", "remainder": "({0} % {1} + {1}) % {1}",
    "floordiv": "{0} // {1}",
}  # fmt: skip
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne", "isnan"}


class Value(NamedTuple):
    """code: a variable or literal.  shape: the shape in the kernel, () for scalars.  dtype: None for a literal."""

    code: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


def op_name(node: fx.Node) -> str:
    """Returns the name of an operation, or "": aten.mul_.Tensor → mul, aten.__rshift__.Scalar → rshift."""
    if node.op != "call_function":
        return ""
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    name: str = packet.__name__
    return name if name in ("_to_copy", "_unsafe_view") else name.strip("_")


def source_of(node: Any) -> fx.Node:
    """Returns the node that computes the values of a node, looking through changes of shape and copies."""
    while op_name(node) in RESHAPES | COPIES and not isinstance(node.args[-1], torch.dtype):
        node = node.args[0]
    return node


def closure(roots: Iterable[fx.Node], stop: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Returns the given nodes and all nodes that they are computed from, in the order of the graph."""
    waiting, found = list(roots), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [] if stop(node) else node.all_input_nodes
    return [node for node in next(iter(found)).graph.nodes if node in found] if found else []


class Lines:
    """The source of a kernel. head: expression → variable, for expressions that are computed once at the start."""

    def __init__(self) -> None:
        self.head: dict[str, str] = {}
        self.numbers = itertools.count()

    def once(self, code: str) -> str:
        """Returns the variable for an expression that is computed once at the start of the kernel."""
        return self.head.setdefault(code, f"h{len(self.head)}")

    def function(self, name: str, args: Iterable[str], start: Iterable[str], body: Iterable[str]) -> str:
        """Returns the source of the kernel. start, body: the lines before and after the head."""
        lines = [*start, *(f"{variable} = {code}" for code, variable in self.head.items()), *body]
        names = ", ".join(args)
        untyped = f"do_not_specialize={[*args]!r}"  # compile once for all argument values
        return f"\n\n@triton.jit({untyped})\ndef {name}({names}):\n" + "".join(f"    {line}\n" for line in lines)


class Printer(ABC):
    """Prints requested nodes, each once. lines: the printed code.  values: the value of each printed node."""

    def __init__(self, text: Lines) -> None:
        self.text, self.lines, self.values = text, list[str](), dict[fx.Node, Value]()

    @abstractmethod
    def source(self, node: fx.Node) -> Value | None:
        """Returns the value of a node that this kernel does not compute, or None for an operation of the kernel."""

    @abstractmethod
    def reshaped(self, node: fx.Node, value: Value) -> Value:
        """Returns a value with the shape that an operation gives it."""

    @abstractmethod
    def reduced(self, node: fx.Node, value: Value) -> Value:
        """Returns the sum, mean or maximum of a value."""

    def assign(self, code: str, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> Value:
        """Prints an expression as a new variable."""
        name = f"v{next(self.text.numbers)}"
        self.lines.append(f"{name} = {code}")
        return Value(name, shape, dtype)

    def value(self, node: fx.Node) -> Value:
        """Returns the value of a node, and prints the node if it is new."""
        if node not in self.values:
            self.values[node] = self.source(node) or self._operation(node)
        return self.values[node]

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Returns a value converted to a dtype."""
        if value.dtype in (None, dtype):
            return value
        code = f"{value.code} != 0" if dtype == torch.bool else f"{value.code}.to({TYPES[dtype]})"
        return self.assign(code, value.shape, dtype)

    def _operation(self, node: fx.Node) -> Value:
        name, meta, args = op_name(node), node.meta.get("val"), node.args
        if name == "copy":
            return self.cast(self.value(args[1]), meta.dtype)  # type: ignore[arg-type, union-attr]
        if name.removesuffix("_like") in ("full", "scalar_tensor", "zeros", "ones"):
            fill: Any = {"z": 0, "o": 1}.get(name[0], args[-1])
            return Value(f"tl.full((), {_literal(fill)}, {TYPES[meta.dtype]})", (), meta.dtype)  # type: ignore[union-attr]
        first = self.value(args[0]) if args and isinstance(args[0], fx.Node) else None
        if first is not None and name == "view" and isinstance(args[1], torch.dtype):
            return self.assign(f"{first.code}.to({TYPES[args[1]]}, bitcast=True)", first.shape, args[1])
        if first is not None and name in RESHAPES:
            return self.reshaped(node, first)
        if first is not None and name in COPIES:
            return first
        if first is not None and name == "_to_copy":
            return self.cast(first, meta.dtype)  # type: ignore[union-attr]
        if first is not None and name in REDUCTIONS and not node.kwargs:
            return self.reduced(node, first)
        return self._pointwise(node, name, meta.dtype if isinstance(meta, torch.Tensor) else torch.int64)

    def _pointwise(self, node: fx.Node, name: str, dtype: torch.dtype) -> Value:
        if any(value != 1 for option, value in node.kwargs.items() if option not in ("min", "max")):
            raise UnsupportedError(f"{node.format_node()} is not supported in Triton")
        if name == "clamp":
            return self._clamped(node, dtype)
        operands = [arg for arg in node.args if isinstance(arg, fx.Node | int | float)]
        if name == "pow" and operands[1] == 2:
            name, operands = "square", operands[:1]
        if name == "mul" and dtype == torch.bool:
            name = "bitwise_and"
        args: list[Any] = [self.value(arg) if isinstance(arg, fx.Node) else arg for arg in operands]
        common = dtype
        if name in COMPARISONS:
            values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in operands]
            common = torch.result_type(values[0], values[-1])
        if name == "where":
            return self._expression(name, [args[0], *(self._like(arg, dtype) for arg in args[1:])], dtype)
        return self._expression(name, [self._like(arg, common) for arg in args], dtype)

    def _like(self, arg: Any, dtype: torch.dtype) -> Value:
        """Returns an operand in the dtype of an operation."""
        if isinstance(arg, Value):
            return self.cast(arg, dtype)
        arg = float(arg) if dtype.is_floating_point else arg
        if dtype == torch.float64 or (isinstance(arg, float) and 0 < abs(arg) < 2.0**-126):
            return Value(f"tl.full((), {_literal(arg)}, {TYPES[dtype]})")  # otherwise Triton chooses the dtype
        return Value(_literal(arg))

    def _clamped(self, node: fx.Node, dtype: torch.dtype) -> Value:
        value, low, high = (*node.args, None, None)[:3]
        result = self.value(value)  # type: ignore[arg-type]
        for limit, name in ((node.kwargs.get("min", low), "maximum"), (node.kwargs.get("max", high), "minimum")):
            if limit is not None:
                bound = self.value(limit) if isinstance(limit, fx.Node) else limit
                result = self._expression(name, [result, self._like(bound, dtype)], dtype)
        return result

    def _expression(self, name: str, args: list[Value], dtype: torch.dtype) -> Value:
        more = IN_DOUBLE if dtype == torch.float64 else {} if dtype.is_floating_point else OF_INTEGERS
        if not (code := (EXPRESSIONS | more).get(name)):
            raise UnsupportedError(f"{name} is not supported in Triton")
        rank = max(len(arg.shape) for arg in args)
        wide = [(1,) * (rank - len(arg.shape)) + arg.shape for arg in args]
        shape = tuple(max(sizes) for sizes in zip(*wide, strict=True))
        return self.assign(code.format(*(_of_rank(arg, rank) for arg in args)), shape, dtype)


def _of_rank(value: Value, rank: int) -> str:
    """Returns the code of a value, with leading dimensions added up to this rank."""
    if not value.shape or len(value.shape) == rank:
        return value.code
    return f"{value.code}[{', '.join(['None'] * (rank - len(value.shape)) + [':'] * len(value.shape))}]"


def _literal(number: float) -> str:
    return repr(number) if math.isfinite(number) else f'float("{number}")'
