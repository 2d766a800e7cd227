"""TRL 1.15 on a machine without Triton, where it has no function for its loss and no trainer of it can train.

TRL 1.16 has one for CPUs. This one computes the same from all logits at once, so that tests can compare with TRL.
"""

from importlib.metadata import version

import torch
from torch import Tensor
from torch.nn.functional import linear


class ChunkedLogProbFunction:
    """In place of trl.trainer.utils._ChunkedLogProbFunction."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, columns: int,
        softcap: float | None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        logits = linear(hidden, weight, bias).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        log_probs = logits.log_softmax(-1)
        values = {
            "log_probs": log_probs.gather(-1, targets[:, None])[:, 0],
            "entropy": -(log_probs.exp() * log_probs).sum(-1),
            "log_sum_sq_probs": (2 * log_probs).logsumexp(-1),
            "mean_logits": logits.mean(-1),
            "is_top1": logits.argmax(-1) == targets,
        }
        return tuple(value if name in outputs else None for name, value in values.items())


TRAINS_ON_GPUS_ALONE = version("trl").startswith("1.15.")

if TRAINS_ON_GPUS_ALONE:
    from trl.trainer import utils

    if utils._ChunkedLogProbFunction is None:
        utils._ChunkedLogProbFunction = ChunkedLogProbFunction
