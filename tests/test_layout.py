"""How parameters are seen and cut: everything once, in memory as it lies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.layout import Layout, Rect, View
from lowmem.sweep import CPU_TILE


@pytest.mark.parametrize(
    ("shape", "vector", "matrix"),
    [
        ((), (1, 1, 1), (1, 1, 1)),
        ((5,), (1, 1, 5), (1, 1, 5)),
        ((5, 3), (1, 1, 15), (1, 5, 3)),
        ((2, 5, 3), (1, 1, 30), (2, 5, 3)),
        ((4, 5, 3, 2), (1, 1, 120), (1, 4, 30)),
    ],
)
def test_usual_views(shape, vector, matrix):
    assert View.vector(len(shape)).sizes(shape) == vector
    assert View.matrix(len(shape)).sizes(shape) == matrix
    stacked = View.matrix(len(shape)).stacked()
    assert stacked.sizes((7, *shape)) == (7 * matrix[0], *matrix[1:])


def test_shapes_of_states():
    view, shape = View(batch=(2,), rows=(0, 3), cols=(1,)), (4, 5, 3, 2)
    sizes = {extent: view.kept(extent, shape) for extent in ("full", "row", "col", "slice")}
    assert sizes == {"full": shape, "row": (3, 4, 2), "col": (3, 5), "slice": (3,)}


@st.composite
def views(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=5)))
    roles = [draw(st.integers(0, 2)) for _ in shape]
    return shape, View(*(tuple(d for d, role in enumerate(roles) if role == own) for own in range(3)))


@given(views())
@settings(max_examples=300, deadline=None)
def test_whole_layout_covers_exactly_once(case):
    """Its rectangles, put where they say, are the parameter with its dimensions in the view's order; none is a copy."""
    shape, view = case
    local = torch.arange(float(torch.Size(shape).numel())).view(shape)
    layout = Layout.whole(shape, view)
    seen = torch.full(layout.shape, -1.0)
    for rect, piece in zip(layout.rects, layout.views(local), strict=True):
        assert piece.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        assert (seen[rect.batch, rect.rows, rect.cols] == -1).all()
        seen[rect.batch, rect.rows, rect.cols] = piece
    assert torch.equal(seen, local.permute(view.batch + view.rows + view.cols).reshape(layout.shape))


@pytest.mark.parametrize(
    ("view", "pieces"),
    [
        (View.matrix(4), 1),
        (View((0,), (1,), (2, 3)), 1),
        (View((0, 1), (2,), (3,)), 1),
        (View((), (3,), (0, 1, 2)), 1),
        (View((1,), (0, 2), (3,)), 4),
        (View((0, 3), (), (1, 2)), 4),
    ],
)
def test_no_more_pieces_than_memory_asks_for(view, pieces):
    assert len(Layout.whole((4, 3, 2, 5), view).rects) == pieces


@st.composite
def rects(draw):
    starts = [draw(st.integers(0, 5)) for _ in range(3)]
    sizes = [draw(st.integers(1, 12)) for _ in range(3)]
    return Rect(*(slice(start, start + size) for start, size in zip(starts, sizes, strict=True)))


@given(rects(), st.integers(1, 2000))
@settings(max_examples=300, deadline=None)
def test_subdivide_covers_exactly_once(rect, tile):
    """Every element is in one tile, no tile is larger than asked for, and each is one piece of memory."""
    met = torch.zeros([s.stop for s in (rect.batch, rect.rows, rect.cols)], dtype=torch.int)
    local = torch.zeros([s.stop - s.start for s in (rect.batch, rect.rows, rect.cols)])
    for part in rect.subdivide(tile):
        met[part.batch, part.rows, part.cols] += 1
        piece = local[part.within(rect)]
        assert piece.numel() <= tile
        assert piece.is_contiguous()
    want = torch.zeros_like(met)
    want[rect.batch, rect.rows, rect.cols] = 1
    assert torch.equal(met, want)


def test_large_parameter_has_tiles_of_about_the_size_asked_for():
    tiles = list(Layout.whole((4096, 2048), View.matrix(2)).rects[0].subdivide(CPU_TILE))
    assert len(tiles) == 4096 * 2048 // CPU_TILE


def test_views_split_a_flat_piece():
    """A flat slice of a matrix: the end of a row, whole rows, the start of one."""
    rects = (
        Rect(slice(0, 1), slice(1, 2), slice(3, 5)),
        Rect(slice(0, 1), slice(2, 4), slice(0, 5)),
        Rect(slice(0, 1), slice(4, 5), slice(0, 1)),
    )
    matrix = torch.arange(30.0).view(1, 6, 5)
    local = matrix.flatten()[8:21].clone()
    views = Layout((1, 6, 5), rects).views(local)
    for rect, view in zip(rects, views, strict=True):
        assert torch.equal(view, matrix[rect.batch, rect.rows, rect.cols])
        assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
