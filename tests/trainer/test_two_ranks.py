"""Trainers on two ranks, compared with the trainer without the mixin, which uses DistributedDataParallel."""

import pytest
import torch
from support.products import FULL
from support.trainers import build, joined
from torch.nn.parallel import DistributedDataParallel

# A row of the table of trainers, and arguments.
RUNS = {
    "tokens are averaged": ("causal language model", {"average_tokens_across_devices": True}),
    "tokens of a window": (
        "causal language model",
        {"average_tokens_across_devices": True, "gradient_accumulation_steps": 2},
    ),
}
SELDOM = {  # with LOWMEM_FULL
    "tokens of each rank": ("causal language model", {"average_tokens_across_devices": False}),
    "means": ("sequence classification", {"gradient_accumulation_steps": 2}),
    "SFT": ("SFT", {}),
    "DPO": ("DPO", {}),
}


RUNS |= SELDOM if FULL else {}


@pytest.mark.parametrize(("row", "arguments"), RUNS.values(), ids=RUNS)
def test_training_is_that_of_distributed_data_parallel(two, row, arguments, tmp_path):
    for equal, wrapped, logs in two.run(compared, row, {**arguments, "use_cpu": True}, str(tmp_path)):
        assert wrapped == [True, False]
        assert equal
        assert logs[0] == pytest.approx(logs[1], rel=1e-6)


def compared(rank, row, arguments, folder):
    """Whether the weights are equal, which of both runs wrapped the model, and the logged losses."""
    runs = []
    with joined(rank):
        for mixin in (False, True):
            trainer = build(row, folder, mixin, max_steps=2, **arguments)
            trainer.train()
            wrapped = isinstance(trainer.model_wrapped, DistributedDataParallel)
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            runs.append(([*trainer.model.parameters()], wrapped, losses))
    equal = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    return equal, [run[1] for run in runs], [run[2] for run in runs]
