"""What `lowmem rules` prints is what an optimizer keeps."""

import pytest
import torch

import lowmem
from lowmem.run.memory import state_bytes
from lowmem.tiles.storage import ROUNDINGS


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("rule", "options", "bytes_each"),
    [
        ("lomo", {}, 0),
        ("adalomo", {}, 2 * 64 * 4 / 64**2),
        (
            "adafactor",
            {"min_dim_size_to_factor": 64, "beta1": 0.9, "dtype_momentum": "bfloat16"},
            2 + 2 * 64 * 4 / 64**2,
        ),
        ("adafactor", {}, 4),
        ("adafactor_t2t", {"beta1": 0.9}, 2 + 2 * 64 * 4 / 64**2),
        ("scaled_adam", {}, 8 + (8 + 4 + 4 + 4 * 4) / 64**2),
        ("lans", {"multi_precision": True}, 12 + 8 / 64**2),
        ("adamw", {}, 8 + 8 / 64**2),
        ("adamw", {"dtype_moments": "bfloat16"}, 4 + 8 / 64**2),
        ("lion", {"dtype_moments": "float16"}, 2),
        (torch.optim.SGD, {}, 0),
    ],
)
def test_measured(rule, options, bytes_each, rounding):
    assert state_bytes(rule, rounding, size=64, **options) == bytes_each + 2 * (rounding == "compensated")


@pytest.mark.parametrize("row", lowmem.rules.table(), ids=lambda row: row.name)
def test_the_table_declares_what_is_measured(row):
    assert state_bytes(row.name) == pytest.approx(row.state_bytes, abs=0.01)  # of 4096 x 4096, and of 1024 x 1024
