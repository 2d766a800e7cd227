"""The fused optimizer: a `torch.optim.Optimizer` whose updates happen during backward."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from lowmem import placements, rules
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.rules import UpdateRule
from lowmem.step import by_hand, habits, saving
from lowmem.step.clipping import Clipping
from lowmem.step.compiled import Compilation
from lowmem.step.cycle import StepCycle
from lowmem.step.hooks import Hooks
from lowmem.step.loop import StepLoop, claim
from lowmem.step.parameters import Parameters, States
from lowmem.step.record import AddedGroup, ParamRecord
from lowmem.step.report import LastStep, Report
from lowmem.step.updates import Updates
from lowmem.tiles.quantized import in_codes


class FusedOptimizer(torch.optim.Optimizer):
    """Updates every parameter during backward, as soon as its gradient is complete, and frees the gradient.

        opt = lowmem.FusedOptimizer(model.named_parameters(), rule="adalomo", lr=1e-3)
        for batch in loader:
            opt.backward(model(**batch).loss)
            scheduler.step()

    Without a loss scale, plain `loss.backward()` does the same under policies "immediate" and "deferred".

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts) of either, as `torch.optim` takes them. A group
            may set "rule", "rounding", "state_storage" and hyperparameters. Hyperparameters that a group with a "rule"
            does not set, including `lr`, have the defaults of that rule. Frozen parameters cost nothing. A parameter
            that is unfrozen later is updated from the next `backward` on. Pass parameters that the model gets later to
            `add_param_group`.
        rule: a name (`lowmem.rules.table()`), an `UpdateRule`, a `torch.optim.Optimizer` class, or its import path.
        model: the module that owns the parameters; required under FSDP2. With it, norms over all gradients are summed
            in the order of `model.parameters()`, as by `clip_grad_norm_`.
        **options: the attributes of `FusedConfig`, which documents them, and hyperparameters of `rule`.

    Attributes:
        config: the options.

    Raises:
        ConfigError: a rule, option or hyperparameter is unknown, or a value is out of range.
        UnsupportedError: the combination cannot be exact.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: str | UpdateRule | type = "adalomo",
        *,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.config = config = FusedConfig(rule, **options)
        groups = config.param_groups(params) if config.groups else list(params)
        if not groups:
            raise ConfigError("no parameters were given")
        if config.weight_format is not None and not (model and in_codes(model)):
            raise ConfigError(
                f"weight_format={config.weight_format!r} is an option of trainers. In a loop, call "
                f"lowmem.quantize_(model, {config.weight_format!r}) before you create the optimizer, and omit it here"
            )
        if (config.home, config.device_memory) != ("host", None) and not (model and placements.streaming_of(model)):
            raise ConfigError(
                f"home={config.home!r} and device_memory={config.device_memory!r} are options of trainers. In a loop, "
                "call lowmem.stream(model, device, home=..., device_memory=...) before you create the optimizer, and "
                "omit them here"
            )
        groups = [_listed(group) for group in (groups if isinstance(groups[0], dict) else [{"params": groups}])]
        placement = placements.find(config.placement, (param for group in groups for param in group["params"]))
        self._parameters = Parameters(config, placement, model)
        self._records = self._parameters.records
        self._cycle = StepCycle(config.seed)
        habits.watch()
        self._hooks = Hooks(self._records, self._cycle, self._on_gradient)
        self._opt_called = False
        self._wraps = True  # Accelerate may wrap this optimizer
        self._created = False
        try:
            with placement.together():
                super().__init__(groups, {})
                self.defaults = {**rules.resolve(rule).defaults, **config.given}
            placement.adopt(self._records.values(), model)
            with placement.together():
                self._parameters.complete()
                self._clipping = Clipping(self._parameters)
                self._updates = Updates(self._parameters, self._cycle, self._clipping)
                self._report = Report(self._parameters, self._updates)
                self._loop = StepLoop(self._parameters, self._hooks, self._updates, self._report)
            self._updates.compilation.decide()
            self._created = True  # groups that are added from now on are complete at once
        except BaseException:
            self.remove()  # the hooks of the groups that were added
            raise

    @classmethod
    def from_config(
        cls, params: Iterable[Any], config: FusedConfig, model: nn.Module | None = None
    ) -> "FusedOptimizer":
        """Creates an optimizer with the options of `config`. Its rule is "adalomo" unless `config` names one."""
        options = {option.name: getattr(config, option.name) for option in fields(config)}
        return cls(params, model=model, **{**options, "rule": config.rule or "adalomo"})

    # -- parameters ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checks its hyperparameters and hooks its parameters."""
        parameters, where = self._parameters, f"parameter group {len(self.param_groups)}: "
        rule, group = self.config.complete(_named(_listed(param_group), first=len(self._records)), where)
        rule = parameters.same_rule(rule, where)
        placement = placements.find(self.config.placement, group["params"]) if group["params"] else parameters.placement
        if type(placement) is not type(parameters.placement):
            raise UnsupportedError(
                f"{where}its placement is {placement.name}, but earlier groups have {self.placement}. Shard all "
                "parameters of an optimizer in the same way"
            )
        defaults, self.defaults = self.defaults, {}  # the group has its defaults already
        try:
            super().add_param_group(group)
        finally:
            self.defaults = defaults
        group = self.param_groups[-1]
        group.setdefault("param_names", [])  # torch omits it if there are no parameters
        added = AddedGroup(group, rule, {**group}, len(group["params"]))
        parameters.groups.append(added)
        records: dict[Tensor, ParamRecord] = {}
        try:
            records = parameters.new_records(added)
            sharded = parameters.shard.sharded and bool(records)
            if sharded:  # first, because a shard is rejected for its own shape
                rule.adopt(group, sharded)
            for record in records.values():
                self._hooks.add(record)
                claim(record, parameters, self._hooks)
                record.refuse_leftover()
            if not sharded:  # last, because a parameter is rejected by its name
                rule.adopt(group, sharded)
            self._records.update(records)
            if self._created:
                parameters.placement.adopt(records.values(), parameters.model)
                parameters.complete()
                self._loop.choose_policy()
        except BaseException:  # the group is added completely or not at all
            for param, record in records.items():
                self._hooks.discard(record)
                self._records.pop(param, None)
            self.param_groups.pop()
            parameters.groups.pop()
            raise

    def remove(self) -> None:
        """Removes all hooks. The optimizer can still be saved, but it updates nothing from then on."""
        self._hooks.remove()

    @property  # type: ignore[override]  # torch's optimizer has an attribute
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Hyperparameters may be edited."""
        return self._parameters.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._parameters.param_groups[:] = groups  # the next backward compares them with the groups that were added

    @property  # torch's optimizer has an attribute, which loops replace to start with new states
    def state(self) -> States:  # type: ignore[override]
        """Parameter → name of a state → value. Parameters without states get new ones in their next update."""
        return self._parameters.states

    @state.setter
    def state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        self.state.update({**{param: {} for param in self.state}, **states})
        for group in self._parameters.groups:
            group.memory.clear()

    # -- the policy ------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """When updates happen: "immediate", "two_pass" or "deferred"."""
        return self._loop.policy.name

    @property
    def policy_reason(self) -> str:
        """The reason for which this policy was chosen."""
        return self._loop.policy.reason

    @property
    def placement(self) -> str:
        """Where the parameters are: "local", "replicated", "zero3" or "fsdp2"."""
        return self._parameters.placement.name

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside this context are micro-batches. The first one outside completes the step and updates.

        `step()` completes the step as well, with the micro-batches so far. `zero_grad()` drops them.

            for n, batch in enumerate(batches, 1):
                with opt.accumulate() if n < len(batches) else nullcontext():
                    opt.backward(model(**batch).loss / len(batches))

        Raises:
            UnsupportedError: the policy does not store gradients. "auto" becomes "deferred" here.
        """
        with self._hooks.during(in_accumulate=True):
            self._loop.choose_policy()
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards inside this context do not update the parameters of this optimizer, and free their gradients.

        To keep a GAN's discriminator fixed during the generator's step:

            with discriminator_opt.paused():
                generator_opt.backward(-discriminator(generator(noise)).mean())
        """
        with self._hooks.during(paused=True):
            yield

    # -- the step --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Callable[[], Tensor]) -> Tensor:
        """Runs the backward of a loss and updates the parameters that it depends on.

        Args:
            loss: a scalar, or a callable that returns one.

        Returns:
            The loss, detached and without the loss scale.

        Raises:
            StepError: the loss is not a scalar or has no graph, a gradient is left over in `.grad`, the calls of a step
                are in the wrong order (a second backward, a hook that fires twice, a torn step), the loss depends on
                parameters of another `FusedOptimizer` that is not `paused`, or the gradients of the last
                `max_nonfinite_steps` steps were not finite.
        """
        return self._loop.backward(loss, last=not self._hooks.accumulating)

    def _on_gradient(self, record: ParamRecord) -> None:
        """Called by the hook of a parameter when its gradient is complete."""
        self._loop.arrived(record)
        self._opt_called |= self._cycle.last  # LR schedulers ask whether an optimizer step came before theirs

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Completes a step of accumulated micro-batches, and applies gradients that the training loop has put into
        `.grad`. Otherwise it does nothing, because backward has already updated the weights.

        Args:
            closure: computes the loss, runs its backward and returns it, as for any `torch.optim.Optimizer`.

        Returns:
            The result of the closure, or None.

        Raises:
            StepError: several backwards ran outside of `accumulate` since the last step, or `.grad` cannot be used.
        """
        loss = None
        self._hooks.caller.note()
        if self._hooks.postponed and not self._wraps:
            return loss
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._loop.drop_failed()
        set_by_hand = [r for r in self._records.values() if r.span.numel and r.param.grad is not None]
        if set_by_hand or self._cycle.waiting:
            by_hand.complete_step(self._loop, set_by_hand)
        self._cycle.stepped()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the micro-batches of an incomplete step, and gradients in `.grad`.

        Raises:
            StepError: a loop that calls `step()` has run a backward since, whose gradient has already been used.
        """
        if self._hooks.postponed and not self._wraps:
            return
        self._loop.drop_failed()
        if self._cycle.waiting:
            self._loop.drop()
        self._cycle.discard()
        super().zero_grad(set_to_none)

    def accept_torn_step(self) -> None:
        """Continues after a failed backward with the weights as they are, only some of which it has updated."""
        self._loop.drop()
        self._cycle.accept_torn()

    # -- reports -----------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> LastStep | None:
        """The report of the last step; None before the first one."""
        return self._report.last

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next loss; None without loss scaling."""
        value = self._clipping.scaler.value
        return None if value is None else float(value)

    @property
    def nonfinite_gradients(self) -> int:
        """The number of gradients with Inf or NaN since the optimizer was created."""
        return int(self._report.nonfinite_gradients)

    @property
    def nonfinite_steps(self) -> int:
        """The number of steps with such a gradient since the optimizer was created."""
        return int(self._report.nonfinite_steps)

    @property
    def compiled(self) -> bool:
        """True if updates of large parameters are compiled, which takes a few seconds in the first step. False if only
        third-party optimizers, or rules that cannot be traced, update them, or if the compiler has failed.
        """
        return self._updates.compiled

    @property
    def compile_seconds(self) -> float:
        """The time that compiling updates has taken in this process, most of it in the first step."""
        return Compilation.seconds

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate 1.15 (accelerator.py, prepare_optimizer) reads it, and wraps the optimizer unless it is True. The
        wrapper omits calls of `step` and `zero_grad` in the middle of a step.
        """
        self._hooks.prepared |= sys._getframe(1).f_globals.get("__name__") == "accelerate.accelerator"
        return not self._wraps

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._hooks.prepared, self._wraps = prepared, not prepared

    # -- saving ----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `UnsupportedError`, because a copy would have no hooks and update nothing."""
        raise UnsupportedError(
            "a FusedOptimizer cannot be copied or pickled, because its hooks are on the parameters of one model. Save "
            "opt.state_dict(), create an optimizer for the other model, and load_state_dict() it there"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns everything except the weights that the next step depends on, in the form of `torch.optim.Optimizer`:
        states by the number of a parameter, and groups with `param_names`. The step, the seed and similar values are in
        the first group, under "lowmem".

        States of parameters that have not been updated yet are included with their initial values, but not loaded.
        Tensors have their own dtype and logical shape. They are the live tensors, or copies of small ones. Tensors of
        sharded parameters are gathered, and every rank has to call this method.

        Raises:
            StepError: a step is incomplete or torn.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = saving.numbered(self._loop)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            saved = post_hook(self, saved) or saved
        return saved

    def named_state_dict(self, *, lazy: bool = False) -> dict[str, Any]:
        """Returns the values of `state_dict` by parameter name, without states of parameters that were not updated yet.
        Hooks of `state_dict` are not called.

        Args:
            lazy: return each tensor as a `TensorSource`: a shape, a dtype, and `read()`, which gathers one tensor at a
                time. Every rank has to read all of them, in their order, before the next step.

        Returns:
            "state": name of a parameter → name of a state → value, and "_group0" → the tensors that the rule of group 0
            stores for clipping by norm; "param_groups", with names as "params"; "step", "seed", "loss_scale",
            "nonfinite" and "weights", the dtypes of the parameters.

        Raises:
            StepError: a step is incomplete or torn.
        """
        return saving.named(self._loop, lazy=lazy)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from the result of `state_dict`. Tensors are copied to their parameter's device and never cast.

        Existing states are freed after the new ones have been checked. Rule "adamw" also continues from the state of a
        `torch.optim.AdamW` of the same parameters and groups. `convert_states` allows another `state_storage`.

        Raises:
            CheckpointError: the state has other rules, storages, parameters or groups, or is damaged. Nothing changes.
        """
        state_dict = copy.copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saving.load(self._loop, state_dict, numbered=True)
        self._loop.drop()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def load_named_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from the result of `named_state_dict`, as `load_state_dict` does. Hooks are not called."""
        saving.load(self._loop, state_dict, numbered=False)
        self._loop.drop()


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group whose `params` can be iterated more than once."""
    params = group["params"]
    if isinstance(params, Tensor):
        return {**group, "params": [params]}
    return group if isinstance(params, set) else {**group, "params": list(params)}


def _named(group: dict[str, Any], first: int) -> dict[str, Any]:
    """Returns a parameter group with names for its parameters, numbered from `first` if it has none."""
    params = group["params"]
    if "param_names" in group or any(isinstance(item, tuple) for item in params):
        return group
    return {**group, "params": [(f"param{first + i}", param) for i, param in enumerate(params)]}
