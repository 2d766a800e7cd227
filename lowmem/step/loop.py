"""The loop of a step: each gradient is taken from its parameter, reduced over ranks, and handed to the policy."""

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.base import ReadyGradients
from lowmem.step import habits
from lowmem.step.hooks import Hooks
from lowmem.step.parameters import Parameters
from lowmem.step.policies import POLICIES, Needs, Policy, choose
from lowmem.step.record import ParamRecord
from lowmem.step.report import Report
from lowmem.step.updates import Updates

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the steps of one optimizer.

    A step begins with `backward`, or with the first gradient of a plain `loss.backward()`. The hooks then call
    `arrived` for each parameter. After the last backward, `_finish` completes the step.

    Attributes:
        policy: decides when a gradient updates its parameter.
    """

    policy: Policy

    def __init__(self, parameters: Parameters, hooks: Hooks, updates: Updates, report: Report) -> None:
        self.parameters, self.records, self.placement = parameters, parameters.records, parameters.placement
        self.hooks, self.updates, self.report = hooks, updates, report
        self.cycle, self.clipping = updates.cycle, updates.clipping
        hooks.connect(self.arrived)
        self._confirmed = 0  # parameter groups whose settings all ranks share
        self.choose_policy()

    def choose_policy(self, loss: Tensor | None = None) -> None:
        """Chooses the policy for the current options and the graph of the loss. Logs the reason if it is not obvious.

        Raises:
            UnsupportedError: the requested policy does not meet a need.
        """
        scaler = self.clipping.scaler
        foreign = scaler.value is not None and any(group.rule.materializes for group in self.parameters.groups)
        needs = Needs(
            norm=self.parameters.norm_option,
            skip="loss_scale with a third-party optimizer" if foreign else None,
            exact_skip="a dynamic loss scale" if scaler.dynamic else None,
            accumulation=self.hooks.accumulating,
            unmeasurable=habits.unmeasurable(loss),
            sharded=self.placement.shard.sharded,
        )
        on_cpu = all(param.device.type == "cpu" for param in self.records)
        name, reason = choose(self.parameters.config, needs, on_cpu=on_cpu)
        before: Policy | None = getattr(self, "policy", None)
        if before is not None and before.name == name:
            before.reason = reason
        if before is not None and (before.accumulates or before.name == name):
            return
        self.policy = POLICIES[name](self.parameters, self.updates, reason)
        if before is not None or name != "immediate":
            logger.info("policy %s: %s", name, reason)

    # -- a step begins ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Callable[[], Tensor], *, last: bool) -> Tensor:
        """Runs the backward of a loss as a step, or as a micro-batch.

        Args:
            loss: a scalar without the loss scale, or a callable that returns one.
            last: whether this backward completes the step.

        Returns:
            The loss, detached.
        """
        if self.hooks.removed or self.hooks.paused:
            state = "was removed by remove()" if self.hooks.removed else "is inside its paused()"
            raise StepError(f"backward() of an optimizer that {state}: nothing would be updated")
        self.hooks.caller.note()
        self.drop_failed()
        self.cycle.require_can_begin()
        value = loss if isinstance(loss, Tensor) else loss()  # launched before the host waits for the last step
        _check_loss(value)
        self._begin()
        if self.policy.name == "two_pass":  # it does not support every graph
            self.choose_policy(value)
        self.claim_changed()
        for record in self.records.values():
            record.require_no_gradient()
        self.cycle.begin(last, explicit=True)
        try:
            for inputs, retain_graph in self.policy.passes():
                self._begin_pass()
                scaled = self.clipping.scaler.scaled(value)
                with self.hooks.alone(scaled):
                    torch.autograd.backward(scaled, inputs=inputs, retain_graph=retain_graph)
                self._end_pass()
            self._finish(value.detach())
        except BaseException as error:
            self._fail(error)
            raise
        return value.detach()

    def _begin_plain(self, first: ParamRecord) -> None:
        """Called for the first complete gradient of a plain `loss.backward()`."""
        self.hooks.require_single_optimizer(first)
        self._begin()
        self.policy.allow_plain_backward()
        self.claim_changed()
        self.cycle.begin(not self.hooks.accumulating, nests=habits.nests(self.records.values()))
        self._begin_pass()
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(self.hooks.caller.run, self._end_plain)
        )  # type: ignore[attr-defined]

    def _end_plain(self) -> None:
        self._end_pass()
        self._finish()

    def _begin(self) -> None:
        """Called when a step or a micro-batch begins, before any weight changes."""
        self.drop_failed()
        self.report.settle()
        self.report.raise_if_diverged()
        self.updates.compilation.raise_if_failed()
        first = self._confirmed != len(self.parameters.groups)
        with self.placement.raise_together() if first else nullcontext():
            self.parameters.check_edits()
            self.parameters.check_unfrozen()
        if first:
            self.placement.confirm(self.records.values(), {**self.parameters.settings(), "seed": self.cycle.seed})
            self._confirmed = len(self.parameters.groups)
        self.choose_policy()  # the options of a group may have changed
        self.updates.begin(self.cycle.step + (not self.cycle.waiting))

    def claim_changed(self) -> None:
        """Claims parameters that were unfrozen, or have changed, since the last step."""
        if self.parameters.device != self.clipping.device:
            self._move_to(self.parameters.device)
        for record in self.records.values():
            claim(record, self.parameters, self.hooks)

    def _move_to(self, device: torch.device) -> None:
        """Moves the tensors of a step to the device of the parameters, after `model.to(device)`."""
        self.updates.compilation.decide()
        self.clipping.device = device
        for owner in (self.clipping, self.clipping.scaler, self.updates.changes):
            for name, value in vars(owner).items():
                if isinstance(value, Tensor):
                    setattr(owner, name, value.to(device))

    # -- a backward runs -------------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        self.placement.reducer.begin(self.records.values(), self.policy.begin())

    def arrived(self, record: ParamRecord) -> None:
        """Called when the gradient of a parameter is complete."""
        if torch.is_grad_enabled():  # create_graph=True. Entering no_grad for every small parameter would be slow
            with torch.no_grad():
                self.arrived(record)
            return
        if record.param.grad is None:  # its autograd function returned None
            if not self.cycle.idle:
                self._use(self.placement.reducer.skip(record))
            return
        if self.cycle.idle:
            self._begin_plain(record)
        self.cycle.fired(record.name, in_parts=self.policy.accumulates)
        grad = self.placement.reducer.take(record.param)
        self.updates.observer.gradient(grad)
        reduced = self.placement.reducer.reduce(record, grad.detach() if grad.requires_grad else grad)
        del grad
        self._use(reduced)

    def _use(self, reduced: ReadyGradients) -> None:
        """Passes gradients to the policy as soon as they are reduced."""
        for placed, grad in reduced:
            self.cycle.notice(placed.name)
            self.policy.ready(self.records[placed.param], grad)
            del grad  # frees it before the next one is created

    @torch.no_grad()
    def _end_pass(self) -> None:
        self._use(self.placement.reducer.flush())

    # -- a step ends -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _finish(self, loss: Tensor | None = None) -> None:
        """Called after the backwards of a micro-batch. After the last micro-batch, completes and reports the step."""
        self.cycle.require_gradients()
        if not self.cycle.last:
            self.placement.free_copies(self.records.values(), updated=False)
            self.cycle.end()
            return
        decision = self.policy.complete()
        skipped = decision is not None and decision.skipped
        if not skipped:
            self.updates.put_zeros(self.records.values(), decision)
        self.updates.flush(decision)
        if not skipped:
            for group in self.parameters.groups:
                group.rule.end(group.live)
        self.updates.compilation.settle()
        self.placement.free_copies(self.records.values(), updated=True)
        self.cycle.end()
        self.report.close(self.policy, decision, loss)

    def _fail(self, error: BaseException) -> None:
        """Called when a backward has failed. Adds a note about the state of the step to the error."""
        waiting = self.cycle.waiting
        if not self.cycle.idle:
            self.cycle.fail(f"its backward ended with {type(error).__name__}")
        self.drop()
        if self.cycle.torn is not None:
            note = f"{self.cycle.torn}. The optimizer cannot continue until a checkpoint is loaded"
        elif waiting:
            note = f"the {waiting} micro-batch(es) before it were dropped too; begin the step again"
        elif self.policy.name == "two_pass" and isinstance(error, RuntimeError):
            note = (
                "policy 'two_pass' runs two backwards through the same graph. If the graph allows only one, as with "
                "selective activation checkpointing, use policy='deferred'"
            )
        else:
            return
        if sys.version_info >= (3, 11):
            error.add_note(note)
        else:
            warnings.warn(note, stacklevel=3)

    def drop_failed(self) -> None:
        """Drops the gradients of a plain backward that has failed, which autograd does not report."""
        if self.cycle.detect_failure():
            self.drop()

    def drop(self) -> None:
        """Drops the gradients of the step."""
        self.policy.drop()
        self.updates.drop()
        self.placement.reducer.drop()


def claim(record: ParamRecord, parameters: Parameters, hooks: Hooks) -> None:
    """Decides how a parameter is updated when it first requires a gradient, and again when its form has changed."""
    shard, state = parameters.shard, parameters.states.get(record.param) or {}
    if not record.param.requires_grad or not record.span.numel:
        return
    if record.claimed and record.form == shard.form(record.param):
        return
    if record.param.device.type == "mps":
        raise UnsupportedError(
            f"parameter {record.name!r} is on 'mps', which does not support float64, the dtype in which lowmem "
            "computes norms and step sizes. Train on a CPU or on a CUDA GPU: model.to('cpu')"
        )
    if record.param.is_complex():
        raise UnsupportedError(
            f"parameter {record.name!r} is complex, which is not supported. Store its real and imaginary parts in the "
            "last dimension of a real parameter, and compute with torch.view_as_complex(param)"
        )
    record.choose_program(shard, state if record.extra or state else None)
    hooks.own(record)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise StepError(f"the loss is {what}; it must be a tensor of one element, as .mean() returns")
    if not loss.requires_grad:
        raise StepError("the loss has no graph: every parameter is frozen, or it was computed under no_grad")
