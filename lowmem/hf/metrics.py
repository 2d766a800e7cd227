"""Metrics of a step that a fused trainer logs."""

import math
from typing import Any

from lowmem.optimizer import FusedOptimizer


def step_metrics(optimizer: FusedOptimizer) -> dict[str, Any]:
    """Returns the norms, changed weights, clip coefficient and loss scale of the last step, and the rule's metrics."""
    last: Any = optimizer.last_step
    scale, nonfinite_steps = last.loss_scale, optimizer.nonfinite_steps  # each is copied to the host
    metrics: dict[str, Any] = {"grad_norm": float(last.grad_norm)}
    if not math.isnan(changed_share := float(last.changed_share)):
        metrics["changed_share"] = changed_share
    if last.clip_coef is not None:
        metrics["clip_coef"] = float(last.clip_coef)
    if scale is not None:
        metrics["loss_scale"] = scale
    if scale is not None or nonfinite_steps:
        metrics["nonfinite_steps"] = nonfinite_steps
    if optimizer.config.log_norms:
        metrics |= {f"grad_norm/{name}": norm for name, norm in zip(last.names, last.norms.tolist(), strict=True)}
    return {**metrics, **last.statistics}
