"""Prints a traced graph as Triton code, one line per operation, with the rounding of eager PyTorch.

Lines of LOMO's last pass:

    h4 = tl.load(numbers + group + 0).to(tl.float32)    an expression of the head, computed once per program
    v2 = v1 * h4                                        aten.mul of an earlier value and a number of the rule
    v3 = tl.fma(v0, h2, v2)                             the fused multiply-add of aten.addcmul
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from lowmem.errors import UnsupportedError

TRITON_TYPES = {
    torch.float64: "tl.float64", torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16", torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int8: "tl.int8",
    torch.uint8: "tl.uint8", torch.bool: "tl.int1",
}  # fmt: skip

# Operations that only change the shape of a value, and operations that return another tensor with the same values.
RESHAPES = {"view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "as_strided", "select"}
COPIES = {"clone", "alias", "detach", "contiguous", "lift_fresh_copy"}
REDUCTIONS = {"sum", "mean", "amax"}

# Triton code of operations, by name. It rounds like the eager kernels of PyTorch.
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
    """The code of a value: a variable or a literal."""

    code: str
    shape: tuple[int, ...] = ()  # shape in the kernel
    dtype: torch.dtype | None = None  # None for a literal


def op_name(node: fx.Node) -> str:
    """Returns the name of an operation, or "": aten.mul_.Tensor → mul, aten.__rshift__.Scalar → rshift."""
    if node.op != "call_function":
        return ""
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    name: str = packet.__name__
    return name if name in ("_to_copy", "_unsafe_view") else name.strip("_")


def arg(node: fx.Node, n: int = 0) -> fx.Node:
    """Returns argument `n` of a node, which must be a node."""
    return cast(fx.Node, node.args[n])


def source_of(node: Any) -> fx.Node:
    """Returns the node that computes the values of a node, looking through changes of shape and copies."""
    while op_name(node) in RESHAPES | COPIES and not isinstance(node.args[-1], torch.dtype):
        node = node.args[0]
    return node


def closure(roots: Iterable[fx.Node], stop: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Returns the given nodes and all nodes that they are computed from, in the order of the graph."""
    waiting = list(roots)
    found = set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if not stop(node):
                waiting += node.all_input_nodes
    return [node for node in next(iter(found)).graph.nodes if node in found] if found else []


class Lines:
    """The first lines of a kernel. head: expression → variable, for expressions that are computed once per program."""

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
        self.text = text
        self.lines = list[str]()
        self.values = dict[fx.Node, Value]()

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
        code = f"{value.code} != 0" if dtype == torch.bool else f"{value.code}.to({TRITON_TYPES[dtype]})"
        return self.assign(code, value.shape, dtype)

    def _operation(self, node: fx.Node) -> Value:
        name = op_name(node)
        args = node.args
        meta: Any = node.meta.get("val")
        if name == "copy":
            return self.cast(self.value(arg(node, 1)), meta.dtype)
        if (filled := name.removesuffix("_like")) in ("full", "scalar_tensor", "zeros", "ones"):
            fill: Any = {"zeros": 0, "ones": 1}.get(filled, args[-1])
            return Value(f"tl.full((), {_literal(fill)}, {TRITON_TYPES[meta.dtype]})", (), meta.dtype)
        first = self.value(args[0]) if args and isinstance(args[0], fx.Node) else None
        if first is not None and name == "view" and isinstance(args[1], torch.dtype):
            return self.assign(f"{first.code}.to({TRITON_TYPES[args[1]]}, bitcast=True)", first.shape, args[1])
        if first is not None and name in RESHAPES:
            return self.reshaped(node, first)
        if first is not None and name in COPIES:
            return first
        if first is not None and name == "_to_copy":
            return self.cast(first, meta.dtype)
        if first is not None and name in REDUCTIONS and not node.kwargs:
            return self.reduced(node, first)
        return self._pointwise(node, name, meta.dtype if isinstance(meta, torch.Tensor) else torch.int64)

    def _pointwise(self, node: fx.Node, name: str, dtype: torch.dtype) -> Value:
        if any(value != 1 for option, value in node.kwargs.items() if option not in ("min", "max")):
            raise UnsupportedError(f"{node.format_node()} is not supported in Triton")
        if name == "clamp":
            return self._clamped(node, dtype)
        operands = [each for each in node.args if isinstance(each, fx.Node | int | float)]
        if name == "pow" and operands[1] == 2:
            name, operands = "square", operands[:1]
        if name == "mul" and dtype == torch.bool:
            name = "bitwise_and"
        args: list[Any] = [self.value(each) if isinstance(each, fx.Node) else each for each in operands]
        common = dtype
        if name in COMPARISONS:
            values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in operands]
            common = torch.result_type(values[0], values[-1])
        if name == "where":
            return self._expression(name, [args[0], *(self._like(each, dtype) for each in args[1:])], dtype)
        return self._expression(name, [self._like(each, common) for each in args], dtype)

    def _like(self, operand: Any, dtype: torch.dtype) -> Value:
        """Returns an operand in the dtype of an operation."""
        if isinstance(operand, Value):
            return self.cast(operand, dtype)
        if dtype.is_floating_point:
            operand = float(operand)
        if dtype == torch.float64 or (isinstance(operand, float) and 0 < abs(operand) < 2.0**-126):
            # otherwise Triton chooses the dtype
            return Value(f"tl.full((), {_literal(operand)}, {TRITON_TYPES[dtype]})")
        return Value(_literal(operand))

    def _clamped(self, node: fx.Node, dtype: torch.dtype) -> Value:
        _, low, high = (*node.args, None, None)[:3]
        result = self.value(arg(node))
        for limit, name in ((node.kwargs.get("min", low), "maximum"), (node.kwargs.get("max", high), "minimum")):
            if limit is not None:
                bound = self.value(limit) if isinstance(limit, fx.Node) else limit
                result = self._expression(name, [result, self._like(bound, dtype)], dtype)
        return result

    def _expression(self, name: str, args: list[Value], dtype: torch.dtype) -> Value:
        expressions = EXPRESSIONS
        if dtype == torch.float64:
            expressions = EXPRESSIONS | IN_DOUBLE
        elif not dtype.is_floating_point:
            expressions = EXPRESSIONS | OF_INTEGERS
        if not (code := expressions.get(name)):
            raise UnsupportedError(f"{name} is not supported in Triton")
        rank = max(len(value.shape) for value in args)
        shapes = [(1,) * (rank - len(value.shape)) + value.shape for value in args]
        shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        return self.assign(code.format(*(_of_rank(value, rank) for value in args)), shape, dtype)


def _of_rank(value: Value, rank: int) -> str:
    """Returns the code of a value, with leading dimensions added up to this rank."""
    if not value.shape or len(value.shape) == rank:
        return value.code
    return f"{value.code}[{', '.join(['None'] * (rank - len(value.shape)) + [':'] * len(value.shape))}]"


def _literal(number: float) -> str:
    return repr(number) if math.isfinite(number) else f'float("{number}")'
