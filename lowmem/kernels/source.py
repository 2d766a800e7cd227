"""Source code of all kernels of an update.

LOMO's first kernel, for aligned bfloat16 gradients, each of which is one row. It sums the squares of each strip:

    def pass_0(programs, table, grads, numbers, keys, scalars, work, results):
        row = table + tl.load(programs + tl.program_id(0)) * RECTANGLE_COLUMNS
        member = tl.load(row + 5)
        group = tl.load(row + 6)
        slice = tl.load(row + 7)
        R = tl.load(row + 2).to(tl.int32)
        C = tl.load(row + 3).to(tl.int32)
        stride = tl.load(row + 4).to(tl.int32)
        C = tl.multiple_of(C, 16)
        stride = tl.multiple_of(stride, 16)
        tile = (tl.program_id(0) - tl.load(row + 8)).to(tl.int32)
        strips = tl.cdiv(C, 32768)
        down, across = tile // strips, tile % strips
        row0 = 0
        rest = C - across * 32768
        h0 = tl.multiple_of((tl.load(grads + member) + tl.load(row + 0) * 2).to(tl.pointer_type(tl.bfloat16)), 16)
        h1 = work + tl.load(row + 1)
        sum0 = tl.zeros([1, 2048], tl.float32)
        for step in range(tl.minimum(tl.cdiv(rest, 2048), 16)):
            col0 = across * 32768 + step * 2048
            rows = row0 + tl.arange(0, 1)[:, None]
            cols = col0 + tl.arange(0, 2048)[None, :]
            inside1 = (rows < R) & (cols < C)
            base1 = col0
            offsets1 = tl.arange(0, 1)[:, None] * (stride) + tl.arange(0, 2048)[None, :]
            v0 = tl.load(h0 + base1 + offsets1, mask=inside1, other=0)
            v1 = v0.to(tl.float32)
            v2 = v1 * v1
            sum0 += tl.where(inside1, v2, 0.0)
        tl.store(h1 + tile, tl.sum(tl.sum(sum0, 1), 0))
"""

from lowmem.kernels.arguments import Columns, KernelScalars, TileSize
from lowmem.kernels.between import BetweenPasses
from lowmem.kernels.passes import TilePrinter
from lowmem.tiles.traced import TracedUpdate

# 16 elements per thread fit into registers, and loads are 16 bytes wide.
MATRIX_TILE = TileSize(8, 256, 16)
LINE_TILE = TileSize(1, 2048, 16)


class KernelSource:
    """Source code of an update's kernels.

    Attributes:
        text: the source of a Python module.
        steps: the name of each kernel and the number of its pass, in launch order.
        rectangles, slices: columns of the tables.
        vectors: the kind of each vector that the code between passes stores in the workspace.
        results: names of the update's results.
    """

    def __init__(self, update: TracedUpdate, *, one_row: bool, aligned: bool) -> None:
        self.update = update
        kinds = {kind for each in update.passes for kind, _ in (*each.vectors, *each.sums)}
        self.tile = LINE_TILE if one_row and not kinds & {"row", "col", "row_max"} else MATRIX_TILE
        self.rectangles = Columns()
        self.slices = Columns()
        self.scalars = KernelScalars(update)
        between = BetweenPasses(self.scalars, self.slices)
        self.steps = list[tuple[str, int]]()
        text = ""
        for n in range(len(update.passes)):
            if before := between.text(n):
                self.steps.append((f"between_{n}", n))
            self.steps.append((f"pass_{n}", n))
            text += before + TilePrinter(self.scalars, self.rectangles, n, self.tile, aligned=aligned).kernel()
        counts = {
            "RECTANGLE_COLUMNS": len(self.rectangles.keys),
            "SLICE_COLUMNS": len(self.slices.keys),
            "SLOTS": len(self.scalars.slots),
        }
        self.text = "".join(f"{name} = tl.constexpr({count})\n" for name, count in counts.items()) + text
        self.vectors = {node: str(between.sides[node]) for kind, node in self.slices.keys if kind == "vector"}
        self.results = list(update.graph.results)
