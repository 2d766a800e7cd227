"""The arguments of kernels: scalars, and tables with one row for each rectangle or slice that a program processes.

programs  int32 [programs]: the row of the table that a program processes
table     int64 [rectangles or slices, columns]: sizes, pointers, and offsets in the workspace
grads     int64 [members]: addresses      numbers  float64: of all groups' rules      keys  int32: seeds of random bits
scalars   float64 [slices, slots]: results of the code between passes for each slice
work      float32: partial sums, sums, and vectors of rows and columns
results   float64 [results, members]
"""

from typing import Any, NamedTuple

import torch
from torch import fx

from lowmem.kernels.printing import TRITON_TYPES, Value, arg, op_name, source_of
from lowmem.tiles.traced import TracedUpdate

# Arguments of kernels, and the types that they point to.
ARGS = {
    "programs": torch.int32, "table": torch.int64, "grads": torch.int64, "numbers": torch.float64,
    "keys": torch.int32, "scalars": torch.float64, "work": torch.float32, "results": torch.float64,
}  # fmt: skip


class TileSize(NamedTuple):
    """The size of a tile. A program processes `steps` tiles [rows, cols] in turn: downwards, or along a line."""

    rows: int
    cols: int
    steps: int
    warps: int = 4

    @property
    def strip(self) -> tuple[int, int]:
        """Number of rows and columns per program."""
        return (1, self.cols * self.steps) if self.is_line else (self.rows * self.steps, self.cols)

    @property
    def is_line(self) -> bool:
        return self.rows == 1


class Columns:
    """The columns of a table, in the order in which kernels request them. The variable `row` points to a row.

    kind       value of the column in `tables.py`
    pointer    address of a tensor's first element in the rectangle; name: (storage, part)
    state      address of a small state's part for the slice
    partial    offset in the workspace of partial sums; total: of the sums of a slice; vector: of a row or column vector
    result     index in `results`
    parts      number of partial sums of a slice
    rectangles also have the fields of `TableRow`, and `first` (program), `group`, `line`, `high`, `low` and `key`
    slices also have `rows`, `cols`, `slices`, `index`, `member` and `group`
    """

    def __init__(self) -> None:
        self.keys = dict[tuple[str, Any], int]()

    def load(self, kind: str, name: Any = "") -> str:
        """Returns code that loads a column. New columns are added."""
        return f"tl.load(row + {self.keys.setdefault((kind, name), len(self.keys))})"

    def pointer(self, kind: str, name: Any, dtype: torch.dtype) -> str:
        """Returns code that loads a pointer."""
        return f"{self.load(kind, name)}.to(tl.pointer_type({TRITON_TYPES[dtype]}))"


class KernelScalars:
    """The scalars that kernels read: inputs of the update, and results of the code between passes, each in a slot.

    Attributes:
        slots: node → the number of its slot.
        inputs: node → its key, for the inputs of the graph.
        args: names of the arguments of kernels.
    """

    def __init__(self, update: TracedUpdate) -> None:
        self.update = update
        self.slots = dict[fx.Node, int]()
        self.inputs = {node: key for key, node in update.graph.inputs.items()}
        self.args = (*ARGS, *(f"reading_{name}" for (kind, name), *_ in update.kind.args if kind == "reading"))

    def known(self, node: fx.Node) -> Value | None:
        """Returns the value of a node that is a number of the rule or the reading, or a view of one; else None."""
        node = source_of(node)
        kind, name = self.inputs.get(node, ("", ""))
        if kind == "reading":
            value = node.meta["val"]
            member = " + member" if value.ndim else ""
            return Value(f"tl.load(reading_{name}{member})", (), value.dtype)
        if op_name(node) == "getitem" and op_name(arg(node)) == "unbind":
            kind, name = self.inputs[arg(arg(node))]
            index: Any = node.args[1]
            assert kind == "numbers"
            return self.number(index, single=name == "single")
        return None

    def number(self, at: int, *, single: bool) -> Value:
        """Returns the value of a number of the rule."""
        code = f"tl.load(numbers + group + {at})"
        if single:
            return Value(f"{code}.to(tl.float32)", (), torch.float32)
        return Value(code, (), torch.float64)

    def slot_address(self, node: fx.Node) -> str:
        """Returns the address of a node's slot as code. New nodes get a slot."""
        return f"scalars + slice * SLOTS + {self.slots.setdefault(node, len(self.slots))}"

    def vector(self, node: fx.Node) -> Value:
        """Returns the value of a scalar vector of a pass."""
        if (known := self.known(node)) is not None:
            return known
        dtype = node.meta["val"].dtype
        code = f"tl.load({self.slot_address(source_of(node))})"
        code = f"({code} != 0)" if dtype == torch.bool else f"{code}.to({TRITON_TYPES[dtype]})"
        return Value(code, (), dtype)
