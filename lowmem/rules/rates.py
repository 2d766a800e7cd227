"""Describes learning rates of a rule for the weights of a model."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lowmem.rules.rule import UpdateRule


def describe_rates(rule: UpdateRule, weights: Iterable[Tensor], adamw: float = 2e-5) -> str:
    """Describes learning rates for fine-tuning these weights. adamw: AdamW's learning rate, by default TRL's."""
    usual = "its usual rate is unknown"
    if rule.usual_lr:
        usual = "its usual rate is {:g} ({})".format(*rule.usual_lr)
    if rule.relative is None:
        return usual
    matrices = (w.detach().float() for w in weights if w.ndim > 1 and w.is_floating_point())
    norms = [(float(torch.linalg.vector_norm(w)), w.numel()) for w in matrices]
    size = math.hypot(*(norm for norm, _ in norms)) / math.sqrt(sum(count for _, count in norms) or 1)
    if not size:  # the weights are sharded, or there are none
        return usual
    low, high = (factor * adamw / size for factor in rule.relative)
    corresponds = f"corresponds to about {low:.2g} to {high:.2g} for weights with rms {size:.2g}, as here"
    return f"{usual}; AdamW's {adamw:g} {corresponds}"
