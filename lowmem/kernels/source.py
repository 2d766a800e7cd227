"""Source code of all kernels of an update."""

from lowmem.kernels.arguments import Columns, KernelScalars, TileSize
from lowmem.kernels.between import BetweenPasses
from lowmem.kernels.passes import pass_text
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
        self.rectangles = Columns("row")
        self.slices = Columns("row")
        self.scalars = KernelScalars(update)
        between = BetweenPasses(self.scalars, self.slices)
        self.steps = list[tuple[str, int]]()
        text = ""
        for n, tile_pass in enumerate(update.passes):
            if before := between.text(n):
                self.steps.append((f"between_{n}", n))
            self.steps.append((f"pass_{n}", n))
            text += before + pass_text(self.scalars, self.rectangles, n, tile_pass, self.tile, aligned=aligned)
        counts = {
            "RECTANGLE_COLUMNS": len(self.rectangles.keys),
            "SLICE_COLUMNS": len(self.slices.keys),
            "SLOTS": len(self.scalars.slots),
        }
        self.text = "".join(f"{name} = tl.constexpr({count})\n" for name, count in counts.items()) + text
        self.vectors = {node: str(between.sides[node]) for kind, node in self.slices.keys if kind == "vector"}
        self.results = list(update.graph.results)
