"""Writes the kernels for the code between passes, with one program for each slice of a parameter.

A program loops over the rows, the columns, the slices of its parameter, or the last dimension of a state. If a sum
depends on another sum, it needs one more loop, which recomputes the values that it needs:

    v0 += tl.where(here, v8, 0.0)            in a loop over rows: the sum of the row factors v8
    v10 = tl.div_rn(v9, R.to(tl.float32))    after this loop: their mean
    v28 = tl.div_rn(v27, v10)                in the next loop: the row factors, recomputed and divided by their mean
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from lowmem.errors import UnsupportedError
from lowmem.kernels.arguments import Columns, KernelScalars
from lowmem.kernels.printing import REDUCTIONS, Lines, Printer, Value, arg, closure, op_name, source_of

BLOCK = 4096  # elements per iteration of a loop

# Sides along which a value may extend. If it extends along the last dimension of a state, its side is this size.
ONE, SLICE, ROW, COL = "one", "slice", "row", "col"
Side = str | int


def _limit(side: Side) -> str:
    """Returns code for the number of elements of a side."""
    return {ROW: "R", COL: "C", SLICE: "B"}[side] if isinstance(side, str) else str(side)


class BetweenPasses:
    """The code between passes, for the slices of parameters.

    Attributes:
        sides: node → the side along which its value extends.
        sums: node → (number of the pass, number of its sum).
        copies: key of a small state → the node that copies its new value to it.
        stages: for each pass, the nodes to compute before it.
        results: node → the name of the result.
        ends: nodes that are stored before the last pass, after all states are read.
    """

    def __init__(self, scalars: KernelScalars, columns: Columns) -> None:
        self.scalars = scalars
        self.columns = columns
        self.update = scalars.update
        graph = self.update.graph
        inputs = scalars.inputs
        self.sides: dict[fx.Node, Side] = {}
        self.sums: dict[fx.Node, tuple[int, int]] = {}
        for n, each in enumerate(self.update.passes):
            self.sums |= {user: (n, user.args[1]) for user in each.node.users}
        self.copies = {
            inputs[arg(node)]: node
            for node in graph.module.graph.nodes
            if op_name(node) == "copy" and arg(node) in inputs
        }
        known = set[fx.Node]()
        self.stages: list[list[fx.Node]] = []
        for each in self.update.passes:
            vectors = dict(zip(each.vectors, each.node.args[0], strict=True))
            new = [source_of(node) for key, node in vectors.items() if key[0] != "noise"]
            self.stages.append([node for node in new if node not in known and scalars.known(node) is None])
            known |= set(new)
        self.results = {source_of(node): name for name, node in graph.results.items()}
        self.ends = [*self.copies.values(), *self.results]
        for node in closure([node for stage in (*self.stages, self.ends) for node in stage], self.sums.__contains__):
            self.sides[node] = self._side(node)

    def _side(self, node: fx.Node) -> Side:
        """Returns the side along which a value extends."""
        of_slice = SLICE if self.update.kind.batched else ONE
        if (key := self.scalars.inputs.get(node)) is not None:
            if key[0] == "slice":
                tail = node.meta["val"].shape[1:]
                return int(tail[0]) if tail else of_slice
            return key[0] if key[0] in (ROW, COL) else ONE
        if node in self.sums:
            number, n = self.sums[node]
            kind, _ = self.update.passes[number].sums[n]
            if kind == "scalar":
                return of_slice
            return COL if kind == "col" else ROW
        if op_name(node) == "arange" and isinstance(node.args[0], int):
            return node.args[0]
        sides = {self.sides[source] for source in node.all_input_nodes} - {ONE}
        if not sides:
            return ONE
        if op_name(node) in REDUCTIONS:
            within_slice = sides - {SLICE} or isinstance(arg(node).meta["val"].shape[-1], int)
            return of_slice if within_slice else ONE
        if len(sides) > 1:
            sides -= {SLICE}
        if len(sides) > 1:
            raise UnsupportedError(f"{node.format_node()} combines rows and columns")
        return next(iter(sides))

    def is_sum(self, node: fx.Node) -> bool:
        """Returns whether a node reduces one of the sides."""
        return op_name(node) in REDUCTIONS and self.sides[arg(node)] != ONE

    def text(self, number: int) -> str:
        """Returns the source of the kernel before pass `number`, or "" if there is nothing to do."""
        ends = self.ends if number == len(self.update.passes) - 1 else []
        if not (roots := [*self.stages[number], *ends]):
            return ""
        main = Scope(self, Lines(), ONE)
        for (_, side, limit), nodes in self._loops(roots):
            self._print_loop(main, side, limit, nodes)
        for node in roots:
            if self.sides[node] in (ONE, SLICE):
                main.store(node)
        names = {"R": "rows", "C": "cols", "B": "slices"} | {name: name for name in ("index", "member", "group")}
        start = ["slice = tl.program_id(0)", "row = table + slice * SLICE_COLUMNS"]
        start += [f"{name} = {self.columns.load(key)}" for name, key in names.items()]
        return main.text.function(f"between_{number}", self.scalars.args, start, main.lines)

    def _loops(self, roots: list[fx.Node]) -> list[tuple[tuple[int, Side, str], list[fx.Node]]]:
        """Returns the loops in order: (level, side, code for the number of elements) and the nodes to sum or store."""
        level = dict[fx.Node, int]()  # number of loops that must have ended before the node is computed
        nodes = closure(roots, self.sums.__contains__)
        for node in nodes:
            level[node] = max((level[source] for source in node.all_input_nodes if source in level), default=0)
            level[node] += self.is_sum(node)
        level |= dict.fromkeys(self.copies.values(), max(level.values()))  # states are read before they are written
        loops: dict[tuple[int, Side, str], list[fx.Node]] = {}
        for node in filter(self.is_sum, nodes):
            loops.setdefault((level[node] - 1, *self._loop_of(node)), []).append(node)
        for node in roots:
            if (side := self.sides[node]) not in (ONE, SLICE):
                loops.setdefault((level[node], side, _limit(side)), []).append(node)
        return sorted(loops.items(), key=lambda loop: loop[0][0])

    def _loop_of(self, node: fx.Node) -> tuple[Side, str]:
        """Returns the side of a sum, and the code for its number of elements."""
        side = self.sides[arg(node)]
        shape = arg(node).meta["val"].shape
        if node.kwargs or node.args[1:2] not in (([-1],), ([len(shape) - 1],)):
            raise UnsupportedError(f"{node.format_node()} is not supported in Triton")
        if side == SLICE and isinstance(shape[-1], int):
            return side, str(shape[-1])
        return side, _limit(side)

    def _print_loop(self, main: "Scope", side: Side, limit: str, nodes: list[fx.Node]) -> None:
        """Prints a loop over a side that sums or stores nodes."""
        sums = [node for node in nodes if self.is_sum(node)]
        inner = Scope(self, main.text, side, main, limit)
        totals = [main.assign(f"tl.zeros([{BLOCK}], tl.float32)", (BLOCK,), torch.float32) for _ in sums]
        for total, node in zip(totals, sums, strict=True):
            if op_name(node) == "amax":
                raise UnsupportedError("a maximum between two passes is not supported in Triton")
            value = inner.of_float32(node.args[0])
            inner.lines.append(f"{total.code} += tl.where(here, {value.code}, 0.0)")
        for node in nodes:
            if not self.is_sum(node):
                inner.store(node)
        main.loop(limit, inner.lines)
        for total, node in zip(totals, sums, strict=True):
            value = main.assign(f"tl.sum({total.code}, 0)", (), torch.float32)
            if op_name(node) == "mean":
                count = f"tl.full((), {limit}, tl.float32)" if limit.isdigit() else f"{limit}.to(tl.float32)"
                value = main.assign(f"tl.div_rn({value.code}, {count})", (), torch.float32)
            main.values[node] = value


class Scope(Printer):
    """Prints the body of a program, or of a loop over `side`, in which values along this side are blocks."""

    def __init__(
        self, between: BetweenPasses, text: Lines, side: Side, outer: "Scope | None" = None, limit: str = ""
    ) -> None:
        super().__init__(text)
        self._between = between
        self._side = side
        self._outer = outer
        self._limit = limit
        self._shape: tuple[int, ...] = (BLOCK,) if outer else ()

    def value(self, node: fx.Node) -> Value:
        if self._outer is not None and self._between.sides[node] != self._side:
            return self._outer.value(node)
        return super().value(node)

    def source(self, node: fx.Node) -> Value | None:
        between = self._between
        if (known := between.scalars.known(node)) is not None:
            return known._replace(code=self.text.once(known.code))
        if node in between.sums:
            total = between.columns.load("total", between.sums[node])
            return self._sum(total, node) if between.sides[node] == ONE else self._load("work", total, torch.float32)
        key = between.scalars.inputs.get(node, ("", ""))
        kind, name = key
        if kind == "size":
            return Value("BRC"[name], (), torch.int64)
        if kind:
            assert self._side != SLICE, "programs would read states that others write"
            dtype = node.meta["val"].dtype
            return self._load(between.columns.pointer("state", key, dtype), "", dtype)
        if op_name(node) == "arange":
            return Value("at", self._shape, torch.int32)
        return None

    def _load(self, pointer: str, offset: str, dtype: torch.dtype) -> Value:
        """Loads a value of this slice, or a block of values."""
        base = self.text.once(pointer + (f" + {offset}" if offset else ""))
        if not self._shape:
            return self.assign(f"tl.load({base})", (), dtype)
        if self._side == SLICE:  # starts at the first slice of the sum
            base += " - index" if self._limit == "B" else f" - index % {self._limit}"
        return self.assign(f"tl.load({base} + at, mask=here, other=0)", self._shape, dtype)

    def loop(self, limit: str, body: Iterable[str]) -> None:
        """Prints a loop over blocks of elements. at: the numbers of its elements.  here: those below `limit`."""
        self.lines += [f"for first in range(0, {limit}, {BLOCK}):", f"    at = first + tl.arange(0, {BLOCK})"]
        self.lines += [f"    here = at < {limit}", *(f"    {line}" for line in body)]

    def _sum(self, place: str, node: fx.Node) -> Value:
        """Adds the parts of a sum over a parameter: partial sums, or the total over ranks."""
        place = self.text.once(f"work + {place}")
        count = self.text.once(self._between.columns.load("parts", self._between.sums[node]))
        total = self.assign(f"tl.zeros([{BLOCK}], tl.float32)").code
        self.loop(count, [f"{total} += tl.load({place} + at, mask=here, other=0.0)"])
        return self.assign(f"tl.sum({total}, 0)", (), torch.float32)

    def reshaped(self, node: fx.Node, value: Value) -> Value:
        before, after = ([str(size) for size in each.meta["val"].shape if size != 1] for each in (arg(node), node))
        if value.shape and self._side != SLICE and before != after:
            raise UnsupportedError(f"{node.format_node()} is not supported in Triton")
        return value

    def reduced(self, node: fx.Node, value: Value) -> Value:
        return value  # one element, because other sums have been computed by a loop

    def of_float32(self, node: Any) -> Value:
        """Returns the float32 value of a node that is summed or stored in the workspace. Raises for other dtypes."""
        if (value := self.value(node)).dtype != torch.float32:
            raise UnsupportedError(f"{node.format_node()} is not supported in Triton, because it is not float32")
        return value

    def store(self, node: fx.Node) -> None:
        """Stores a state, a result, or a value that a pass reads."""
        between = self._between
        value = self.value(node)
        at, mask = (" + at", ", mask=here") if self._shape else ("", "")
        if node in between.copies.values():
            key = between.scalars.inputs[arg(node)]
            pointer = self.text.once(between.columns.pointer("state", key, node.meta["val"].dtype))
            self.lines.append(f"tl.store({pointer}{at}, {value.code}{mask})")
        elif self._shape:
            value = self.of_float32(node)
            vector = self.text.once(f"work + {between.columns.load('vector', node)}")
            self.lines.append(f"tl.store({vector}{at}, {value.code}{mask})")
        if node in between.results:
            address = self.text.once(f"results + {between.columns.load('result', between.results[node])}")
            self.lines.append(f"tl.store({address}, {value.code}.to(tl.float64), mask=index == 0)")
        if any(node in stage for stage in between.stages) and not self._shape:
            self.lines.append(f"tl.store({between.scalars.slot_address(node)}, {value.code}.to(tl.float64))")
