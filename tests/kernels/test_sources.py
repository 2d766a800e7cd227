"""Tests the generated source of kernels and the tables that kernels read."""

import pytest
import torch
from support.updated import Parameter

from lowmem.errors import UnsupportedError
from lowmem.kernels import Kernels, Member
from lowmem.kernels.tables import Tables
from lowmem.rules.factored import moments, new_values
from lowmem.tiles.layout import Layout, View
from lowmem.tiles.sweep import Reading
from lowmem.tiles.traced import trace_update

REFUSED = {
    "a row and a column": lambda row, col: row + col[:, :1],
    "half of the rows": lambda row, col: row.view(-1, 2).sum(-1).repeat_interleave(2).view_as(row),
    "one row": lambda row, col: row - row.select(1, 0).unsqueeze(1),
    "another order": lambda row, col: row.flip(-1),
    "a sum over slices and rows": lambda row, col: row / row.sum(),
    "a maximum": lambda row, col: row / row.amax(-1, keepdim=True),
    "a sum in float64": lambda row, col: row / row.double().sum(-1, keepdim=True),
    "a sum of other dtype": lambda row, col: (row / row.sum(-1, keepdim=True, dtype=torch.float64)).float(),
    "division that rounds": lambda row, col: row.div(2.0, rounding_mode="floor"),
    "a remainder": lambda row, col: row % 2.0,
    "a power": lambda row, col: row**0.7,
    "running sums": lambda row, col: row.cumsum(-1),
}
WRITTEN = {
    "itself": lambda row, col: row,
    "a sum": lambda row, col: row / row.sum(-1, keepdim=True) + col.mean(1, keepdim=True),
}


def write(change):
    def update(sweep, states):
        sums, number = sweep.reduce(moments), sweep.scalar.lr
        row = change(sums.row["square"], sums.col["square"])
        sweep.store(states["exp_avg_sq_row"], row)
        sweep.apply(new_values, row={"r": row}, col={"c": sums.col["square"]}, scalar={"keep": number, "step": number})

    traced = trace_update(Parameter("adalomo", (8, 16)).kind(Reading()), update)
    return Kernels(traced, one_row=False, aligned=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_refused(name):
    with pytest.raises(UnsupportedError):
        write(REFUSED[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_what_has_a_form_is_written(name):
    assert "def pass_1" in write(WRITTEN[name]).source.text


def test_a_line_of_more_columns_than_int32_counts():
    """The line is split, and each column has the same random bits as in the eager sweep, which also splits it."""
    size = (5 << 30) + 3
    traced = Parameter("lion", (7,), torch.bfloat16, "stochastic").traced(Reading())
    source = Kernels(traced, one_row=True, aligned=False)
    param, state = (torch.empty(size, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))
    member = Member(Layout.of((size,), View.vector(1)), {("param", 0): param, ("exp_avg", 0): state}, {})
    assert member.fits
    tables = Tables(source.source, [member])
    rectangles = {kind: [row[n] for row in tables.rectangles] for (kind, _), n in source.source.rectangles.keys.items()}
    assert rectangles["cols"] == [1 << 30] * 5 + [3]
    assert rectangles["element"] == [n << 30 for n in range(6)]
    assert rectangles["high"] == [0, 0, 1, 1, 1, 1]
    assert rectangles["low"] == [0, 1 << 30, -(1 << 31), -(1 << 30), 0, 1 << 30]


def test_what_fits():
    layout = Layout.of((6, 4, 10), View((), (0,), (1, 2)))
    rows, columns = torch.zeros(6, 4, 10), Layout.of((6, 4), View((), (1,), (0,)))
    assert Member(layout, {("param", 0): rows}, {}).fits
    assert not Member(layout, {("param", 0): rows.transpose(1, 2).contiguous().transpose(1, 2)}, {}).fits
    assert not Member(columns, {("param", 0): torch.zeros(6, 4)}, {}).fits
