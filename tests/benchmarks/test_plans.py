"""Plans match the peaks of real ranks in a sample of `benchmarks.plans`. tests/run/test_plan.py tests one device."""

import pytest
from support.products import FULL
from support.ranks import Ranks
from support.trainers import joined, require_sharding

from benchmarks import plans
from lowmem.run.plan import plan

CASE = "FSDP2, 2", ["Llama, DPO"], ["adamw, bfloat16"]


def measured(rank, folder):
    with joined(rank):
        return plans.measure(*CASE, folder / str(rank))


def test_a_plan_is_the_peak_of_real_ranks(tmp_path):
    """The tolerance of 1 % allows for scalars of a few bytes."""
    if not FULL:
        pytest.skip("with LOWMEM_FULL=1")
    require_sharding("fsdp2")
    ranks = Ranks(2)
    try:
        peaks, _ = ranks.run(measured, tmp_path)
    finally:
        ranks.stop()
    for model, rule, recipe in plans.recipes(*CASE, tmp_path, device="cpu"):
        assert plan(recipe, 2).step.peak == pytest.approx(peaks[model][rule], rel=0.01)
