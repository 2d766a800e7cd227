"""Views and tiles of a parameter cover every element once, without copies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.tiles.layout import Layout, Rect, View


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
    sizes = {extent: view.state_shape(extent, shape) for extent in ("full", "row", "col", "slice")}
    assert sizes == {"full": shape, "row": (3, 4, 2), "col": (3, 5), "slice": (3,)}


@st.composite
def views(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=5)))
    roles = [draw(st.integers(0, 2)) for _ in shape]
    return shape, View(*(tuple(d for d, role in enumerate(roles) if role == kind) for kind in range(3)))


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
def test_a_tensor_is_divided_into_the_fewest_pieces(view, pieces):
    assert len(Layout.of((4, 3, 2, 5), view).rectangles) == pieces


@st.composite
def rects(draw):
    starts = [draw(st.integers(0, 5)) for _ in range(3)]
    sizes = [draw(st.integers(1, 12)) for _ in range(3)]
    return Rect(*(slice(start, start + size) for start, size in zip(starts, sizes, strict=True)))


@given(rects(), st.integers(1, 2000))
@settings(max_examples=300)
def test_subdivide_covers_exactly_once(rect, tile):
    """Every element is in one tile, no tile exceeds the requested size, and each tile is contiguous."""
    met = torch.zeros([s.stop for s in (rect.batch, rect.rows, rect.cols)], dtype=torch.int)
    local = torch.zeros([s.stop - s.start for s in (rect.batch, rect.rows, rect.cols)])
    for part in rect.subdivide(tile):
        met[part.batch, part.rows, part.cols] += 1
        piece = local[tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(part, rect, strict=True))]
        assert piece.numel() <= tile
        assert piece.is_contiguous()
    want = torch.zeros_like(met)
    want[rect.batch, rect.rows, rect.cols] = 1
    assert torch.equal(met, want)


@given(views(), st.booleans(), st.data())
@settings(max_examples=800)
def test_a_layout_covers_its_elements_exactly_once(case, is_shard, data):
    """The rectangles of a parameter or of a flat shard contain its elements in the right places, without copies."""
    shape, view = case
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    start, stop, local, layout = 0, whole.numel(), whole, Layout.of(shape, view)
    if is_shard:
        start = data.draw(st.integers(0, whole.numel()))
        stop = data.draw(st.integers(start, whole.numel()))
        local, layout = whole.flatten()[start:stop].clone(), Layout.of(shape, view, start, stop)
    seen = torch.full(layout.shape, -1.0)
    for rect, block in zip((entry.rect for entry in layout.rectangles), layout.views(local), strict=True):
        assert block.numel() == 0 or block.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        assert (seen[rect.batch, rect.rows, rect.cols] == -1).all()
        seen[rect.batch, rect.rows, rect.cols] = block
    want = whole.permute(view.batch + view.rows + view.cols).reshape(layout.shape)
    assert torch.equal(seen, torch.where((want >= start) & (want < stop), want, -1.0))


def test_a_range_of_a_matrix_is_three_rectangles():
    """They are the end of a row, whole rows, and the start of a row."""
    layout = Layout.of((6, 5), View.matrix(2), 8, 21)
    assert [block.rect.size for block in layout.rectangles] == [(1, 1, 2), (1, 2, 5), (1, 1, 1)]
    assert len(Layout.of((6, 5), View.vector(2), 8, 21).rectangles) == 1
    assert len(Layout.of((6, 5, 3, 2), View.matrix(4), 8, 99).rectangles) == 3


@pytest.mark.parametrize("view", [View.matrix(2), View.vector(2)])
def test_ranges_without_rows_have_complete_groups(view):
    """A rank without elements has such a range."""
    (codes,), (scales,) = (Layout.of((6, 64), view, 384, 384).views(torch.empty(0), group) for group in (1, 32))
    assert not codes.numel() and codes.shape[-1] == 32 * scales.shape[-1] > 0


@pytest.mark.parametrize(("start", "stop"), [(3, 7), (0, 9), (9, 9)])
def test_pieces_of_lines_are_one_tile_when_stacked(start, stop):
    whole = torch.arange(36.0).view(4, 9)
    layout = Layout.of((9,), View.vector(1), start, stop).lines(4)
    assert layout.shape == (4, 1, 9)
    rect, (block,) = layout.rectangles[0].rect, layout.views(whole[:, start:stop].contiguous())
    assert torch.equal(block, whole[rect.batch, rect.cols].unsqueeze(1))
    assert list(rect.subdivide(2)) and rect.size[0] == (4 if stop > start else 0)
