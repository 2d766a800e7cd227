"""A gradient that is computed as it is read equals one that exists, in any view of the parameter."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.tiles.gradients import ComputedGradient, saves_memory
from lowmem.tiles.layout import Layout, View
from lowmem.tiles.storage import FLOAT32, Held
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Sweep
from lowmem.tiles.tile import Sums

ROWS, COLS = 53, 12
VIEWS = {
    "matrix": View.matrix(2),
    "transposed": View((), (1,), (0,)),
    "vector": View.vector(2),
    "lines": View((), (0, 1), ()),
    "batch": View((0,), (), (1,)),
    "batch of columns": View((1,), (), (0,)),
}


@dataclass
class InBlocks:
    """A stored gradient that is read in blocks of rows, and counts its reads."""

    grad: Tensor
    block_rows: int
    reads: int = 0
    stored_bytes: int = 0

    def add_to(self, rows, start):
        self.reads += 1
        rows += self.grad[start : start + len(rows)]


@pytest.fixture
def param():
    return torch.randn(ROWS, COLS)


@pytest.mark.parametrize("rows", [1, 7, 53, 100])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_rectangle_equals_the_stored_gradient(view, rows, param):
    one, other = torch.randn(2, ROWS, COLS)
    computed = ComputedGradient((ROWS, COLS), param.device, [InBlocks(one, rows), InBlocks(other, ROWS)])
    assert computed.block_rows == min(rows, ROWS)
    layout = computed.layout(view)
    full = Layout.of((ROWS, COLS), view)
    (whole,) = full.views(one + other) if len(full.rectangles) == 1 else (None,)
    covered = torch.zeros(full.shape)
    for block in layout.rectangles:
        at = block.rect.batch, block.rect.rows, block.rect.cols
        assert whole is None or torch.equal(computed.view(block), whole[at])
        covered[at] += 1
    assert covered.eq(1).all()
    assert torch.equal(computed.dense(torch.float32), one + other)
    total = torch.ones(ROWS, COLS)
    computed.add_to(total)
    assert torch.equal(total, one + other + 1)


@pytest.mark.parametrize("block", [1, 8, 100])
def test_ranges_of_elements(block, param):
    """As ZeRO-3 cuts a parameter; the last rank's range may end beyond it."""
    grad = torch.randn(ROWS, COLS)
    computed = ComputedGradient((ROWS, COLS), param.device, [InBlocks(grad, block)])
    padded = torch.cat([grad.view(-1), torch.zeros(100)])
    size = ROWS * COLS
    for start, count in ((0, 5), (7, 30), (COLS * 3, COLS), (size - 5, 20), (size + 1, 4), (0, size)):
        assert torch.equal(computed.elements(start, count), padded[start : start + count])


def squares(t):
    return Sums(row={"rows": t.grad_square}, col={"cols": t.grad_square}, scalar={"all": t.grad * t.param})


def moved(t):
    return {"param": t.param - 0.1 * t.grad}


@pytest.mark.parametrize("tile", [None, 5, 40])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_sweep_can_read_a_gradient_repeatedly(view, tile, param):
    grad, block = torch.randn(ROWS, COLS), 8
    weights, sums = [param.clone(), param.clone()], []
    contribution = InBlocks(grad, block)
    computed = ComputedGradient((ROWS, COLS), param.device, [contribution])
    layouts = Layout.of((ROWS, COLS), view), computed.layout(view)
    for weight, gradient, layout in zip(weights, (grad, computed), layouts, strict=True):
        sweep = Sweep(StoredTiles(layout, Held(FLOAT32, (weight,)), gradient, tile=tile))
        sums.append([sweep.reduce(squares) for _ in range(2)][-1])
        sweep.apply(moved)
        assert sweep.square_sums.isfinite()
    assert torch.equal(*weights)
    for kind in ("row", "col", "scalar"):
        torch.testing.assert_close(getattr(sums[0], kind), getattr(sums[1], kind), rtol=1e-5, atol=1e-5)
    # three passes over 7 blocks, of which each but the first begins with the block that the one before has left
    assert contribution.reads == 3 * 7 - 2


@pytest.mark.parametrize(("blocks", "reads"), [(0, 3 * 7 - 2), (2, 7 + 2 * 4), (7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_fit_are_computed_once(dtype, blocks, reads, param):
    """With the bits of rows that are computed again, and of a tensor that is rounded to the dtype once."""
    contribution = InBlocks(torch.randn(ROWS, COLS), 8, stored_bytes=blocks * 8 * COLS * dtype.itemsize)
    computed = ComputedGradient((ROWS, COLS), param.device, [contribution], dtype)
    starts = range(0, ROWS, 8)
    for order in (starts, starts[::-1], starts):
        for start in order:
            assert torch.equal(computed.read(start), contribution.grad[start : start + 8].to(dtype))
    assert contribution.reads == reads


@pytest.mark.troubleshooting("this rule reads the gradient once more")
def test_reading_a_gradient_after_the_weight_changed_raises(param):
    """The gradient would belong to other weights."""
    computed = ComputedGradient((ROWS, COLS), param.device, [InBlocks(torch.ones(ROWS, COLS), ROWS)])
    sweep = Sweep(StoredTiles(computed.layout(View.matrix(2)), Held(FLOAT32, (param,)), computed))
    sweep.apply(moved)
    with pytest.raises(UnsupportedError, match="needs_dense_gradient = True"):
        sweep.reduce(squares)


def test_gradients_are_computed_where_that_saves_enough_memory(param):
    kept = torch.ones(ROWS, COLS), torch.ones(ROWS, COLS).bfloat16()
    assert saves_memory(kept, 4 * ROWS * COLS * 6)
    assert not saves_memory(kept, 4 * ROWS * COLS * 6 - 1)
