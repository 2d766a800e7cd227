"""Operations that kernels cannot have are refused when their source is written."""

import pytest
from support.updated import Parameter

from lowmem.errors import UnsupportedError
from lowmem.kernels import Kernels
from lowmem.rules.factored import moments, moved
from lowmem.tiles.sweep import Reading
from lowmem.tiles.traced import trace_update

REFUSED = {
    "a row and a column": lambda row, col: row + col[:, :1],
    "half of the rows": lambda row, col: row.view(-1, 2).sum(-1).repeat_interleave(2).view_as(row),
    "one row": lambda row, col: row - row.select(1, 0).unsqueeze(1),
    "another order": lambda row, col: row.flip(-1),
    "a sum over slices and rows": lambda row, col: row / row.sum(),
    "a maximum": lambda row, col: row / row.amax(-1, keepdim=True),
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
        sweep.apply(moved, row={"r": row}, col={"c": sums.col["square"]}, scalar={"keep": number, "step": number})

    traced = trace_update(Parameter("adalomo", (8, 16)).kind(Reading()), update)
    return Kernels(traced, line=False, aligned=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_refused(name):
    with pytest.raises(UnsupportedError):
        write(REFUSED[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_what_has_a_form_is_written(name):
    assert "def pass_1" in write(WRITTEN[name]).source.text
