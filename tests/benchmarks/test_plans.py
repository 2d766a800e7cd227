"""Plans against real ranks: a sample of what `benchmarks.plans` measures."""

import pytest

from benchmarks import plans


@pytest.mark.parametrize(
    ("placement", "models"),
    [
        ("one device", ["Qwen3, experts", "Llama, LoRA", "Llama, KTO", "Llama, reward"]),
        ("replicated, 2", ["Llama, tied"]),
        ("FSDP2, 3", ["Llama", "Llama, DPO"]),
        ("ZeRO-3, 2", ["Llama, tied"]),
        ("ZeRO-3, offloaded, 2", ["Llama"]),
    ],
)
def test_a_plan_is_the_peak_of_real_ranks(placement, models):
    """Within 1 %: what differs are numbers of a few bytes, and the rows that a router sends to each expert."""
    for model, by_rule in plans.compare(placement, models).items():
        for rule, peak in by_rule.items():
            assert peak["planned"] == pytest.approx(peak["measured"], rel=0.01), (model, rule)
