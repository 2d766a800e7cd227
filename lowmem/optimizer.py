"""The fused optimizer: a `torch.optim.Optimizer` whose updates happen during backward."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
from lowmem.tiles.quantized import has_quantized_weights


class FusedOptimizer(torch.optim.Optimizer):
    """Updates every parameter during backward, as soon as its gradient is complete, and frees the gradient.

        opt = lowmem.FusedOptimizer(model.named_parameters(), rule="adalomo", lr=1e-3)
        for batch in loader:
            opt.backward(model(**batch).loss)
            scheduler.step()

    Without a loss scale, `loss.backward()` is equivalent under policies "immediate" and "deferred".

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts) of either, as for `torch.optim`. A group may set
            "rule", "rounding", "state_storage" and hyperparameters. In a group with a "rule", hyperparameters that are
            not set, including `lr`, have the defaults of that rule. Frozen parameters have no overhead. A parameter
            that is unfrozen later is updated from the next `backward` on. Pass parameters that are added to the model
            later to `add_param_group`.
        rule: a name (`lowmem.rules.table()`), an `UpdateRule`, a `torch.optim.Optimizer` class, or its import path.
        model: the module that owns the parameters; required under FSDP2. With it, norms over all gradients are summed
            in the order of `model.parameters()`, as in `clip_grad_norm_`.
        **options: attributes of `FusedConfig`, where they are documented, and hyperparameters of `rule`.

    Attributes:
        config: the options.

    Raises:
        ConfigError: a rule, option or hyperparameter is unknown, or a value is out of range.
        UnsupportedError: the options cannot reproduce ordinary training.
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
        if config.weight_format is not None and not (model and has_quantized_weights(model)):
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
        self._hooks = Hooks(self._records, self._cycle)
        self._wraps = True  # Accelerate may wrap this optimizer
        self._created = False
        try:
            with placement.raise_together():
                super().__init__(groups, {})
                self.defaults = {**rules.resolve(rule).defaults, **config.given}
            placement.adopt(self._records.values(), model)
            with placement.raise_together():
                self._parameters.complete()
                self._clipping = Clipping(self._parameters)
                self._updates = Updates(self._parameters, self._cycle, self._clipping)
                self._report = Report(self._parameters, self._updates)
                self._loop = StepLoop(self._parameters, self._hooks, self._updates, self._report)
            self._updates.compilation.decide()
            self._created = True  # groups that are added later are set up immediately
        except BaseException:
            self.remove()  # removes the hooks of the groups that were added
            raise

    @classmethod
    def from_config(
        cls, params: Iterable[Any], config: FusedConfig, model: nn.Module | None = None
    ) -> "FusedOptimizer":
        """Creates an optimizer with the options of `config`. If `config` does not set a rule, it is "adalomo"."""
        options = {option.name: getattr(config, option.name) for option in fields(config)}
        return cls(params, model=model, **{**options, "rule": config.rule or "adalomo"})

    # -- parameters ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, checks its hyperparameters, and registers hooks on its parameters."""
        parameters, where = self._parameters, f"parameter group {len(self.param_groups)}: "
        rule, group = self.config.complete(_named(_listed(param_group), first=len(self._records)), where)
        rule = parameters.same_rule(rule, where)
        placement = placements.find(self.config.placement, group["params"]) if group["params"] else parameters.placement
        if type(placement) is not type(parameters.placement):
            raise UnsupportedError(
                f"{where}its placement is {placement.name}, but earlier groups have {self.placement}. Shard all "
                "parameters of an optimizer in the same way"
            )
        defaults, self.defaults = self.defaults, {}  # the group already has its defaults
        try:
            super().add_param_group(group)
        finally:
            self.defaults = defaults
        group = self.param_groups[-1]
        group.setdefault("param_names", [])  # torch omits it for an empty group
        added = AddedGroup(group, rule, {**group}, len(group["params"]))
        parameters.groups.append(added)
        records: dict[Tensor, ParamRecord] = {}
        try:
            records = parameters.new_records(added)
            sharded = parameters.shard.sharded and bool(records)
            if sharded:  # before records are claimed, so that the error is about flat shards
                rule.adopt(group, sharded)
            for record in records.values():
                self._hooks.add(record)
                claim(record, parameters, self._hooks)
                record.require_no_gradient()
            if not sharded:  # after records are claimed, whose errors name the parameter
                rule.adopt(group, sharded)
            self._records.update(records)
            if self._created:
                parameters.placement.adopt(records.values(), parameters.model)
                parameters.complete()
                self._loop.choose_policy()
        except BaseException:  # a group is added completely or not at all
            for param, record in records.items():
                self._hooks.discard(record)
                self._records.pop(param, None)
            self.param_groups.pop()
            parameters.groups.pop()
            raise

    def remove(self) -> None:
        """Removes all hooks. The optimizer can still be saved, but it no longer updates parameters."""
        self._hooks.remove()

    @property
    def removed(self) -> bool:
        """True after `remove` was called."""
        return self._hooks.removed

    @property  # type: ignore[override]  # torch's optimizer has an attribute
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Their hyperparameters may be modified."""
        return self._parameters.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._parameters.param_groups[:] = groups  # the next backward compares them with the groups that were added

    @property  # an attribute in torch, which loops replace to start with new states
    def state(self) -> States:  # type: ignore[override]
        """Parameter → name of a state → value. Parameters without states get new states in their next update."""
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
        """The reason why this policy was chosen."""
        return self._loop.policy.reason

    @property
    def placement(self) -> str:
        """Where parameters are stored: "local", "replicated", "zero3", "fsdp2" or "streamed"."""
        return self._parameters.placement.name

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside this context are micro-batches. The first backward outside completes the step and updates.

        `step()` also completes the step, with the micro-batches so far. `zero_grad()` discards them.

            for n, batch in enumerate(batches, 1):
                with opt.accumulate() if n < len(batches) else nullcontext():
                    opt.backward(model(**batch).loss / len(batches))

        Raises:
            UnsupportedError: the policy does not store gradients. ("auto" changes to "deferred".)
        """
        with self.accumulating():
            self._loop.choose_policy()
            yield

    def accumulating(self, active: bool = True) -> AbstractContextManager[None]:
        """A context like `accumulate`, in which the first backward chooses the policy. False ends an outer context."""
        return self._hooks.during(in_accumulate=active)

    def paused(self) -> AbstractContextManager[None]:
        """A context whose backwards free the gradients of this optimizer's parameters without updating them.

        To keep a GAN's discriminator fixed during the generator's step:

            with discriminator_opt.paused():
                generator_opt.backward(-discriminator(generator(noise)).mean())
        """
        return self._hooks.during(paused=True)

    # -- the step --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Callable[[], Tensor]) -> Tensor:
        """Runs the backward of a loss and updates the parameters that it depends on.

        Args:
            loss: a scalar, or a callable that returns one.

        Returns:
            The loss, detached and without the loss scale.

        Raises:
            StepError: the loss is not a scalar or does not have a graph, a gradient is left in `.grad`, the calls of a
                step are in the wrong order (a second backward, a hook that fires twice, a torn step), the loss depends
                on parameters of another `FusedOptimizer` that is not `paused`, or the gradients of the last
                `max_nonfinite_steps` steps were not finite.
        """
        return self._loop.backward(loss, last=not self._hooks.accumulating)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Completes a step of accumulated micro-batches, and applies gradients that the training loop has assigned to
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
        """Discards the micro-batches of an incomplete step, and gradients in `.grad`.

        Raises:
            StepError: the loop calls `step()`, and a backward since the last call has already applied its gradients.
        """
        if self._hooks.postponed and not self._wraps:
            return
        self._loop.drop_failed()
        if self._cycle.waiting:
            self._loop.drop()
        self._cycle.discard()
        super().zero_grad(set_to_none)

    def accept_torn_step(self) -> None:
        """Accepts the weights as they are after a failed backward, which has updated only some of them."""
        self._loop.drop()
        self._cycle.accept_torn()

    # -- reports -----------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> LastStep | None:
        """The report of the last step, or None before the first step."""
        return self._report.last

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next loss, or None without loss scaling."""
        value = self._clipping.scaler.value
        return None if value is None else float(value)

    @property
    def nonfinite_gradients(self) -> int:
        """The number of gradients with Inf or NaN so far, also before a loaded state was saved."""
        self._report.settle()
        return self._report.nonfinite_gradients

    @property
    def nonfinite_steps(self) -> int:
        """The number of steps with a non-finite gradient so far, also before a loaded state was saved."""
        self._report.settle()
        return self._report.nonfinite_steps

    @property
    def nonfinite_streak(self) -> int:
        """The number of consecutive steps, up to the last one, with a non-finite gradient."""
        self._report.settle()
        return self._report.streak

    def compare_replicas(self) -> None:
        """Warns once if a sample of the weights shows that ranks differ but should be equal. Every rank calls it."""
        self._report.compare_replicas()

    @property
    def compiled(self) -> bool:
        """True if updates of large parameters are compiled, which takes 10 to 30 seconds in the first step. False if
        they are updated only by third-party optimizers or rules that cannot be traced, or if the compiler has failed.
        """
        return self._updates.compiled

    @property
    def compile_seconds(self) -> float:
        """The time in seconds that this process has spent compiling updates, mostly in the first step."""
        return Compilation.seconds

    @property
    def _opt_called(self) -> bool:
        """Read by LR schedulers, which warn if no step came before theirs. They also set it in `step`."""
        return self.last_step is not None

    @_opt_called.setter
    def _opt_called(self, called: bool) -> None:
        """Does nothing, because backward runs the steps."""

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by Accelerate 1.15 (accelerator.py, prepare_optimizer), which wraps the optimizer unless it is True. The
        wrapper omits calls of `step` and `zero_grad` before the last micro-batch of a step.
        """
        self._hooks.prepared |= sys._getframe(1).f_globals.get("__name__") == "accelerate.accelerator"
        return not self._wraps

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._hooks.prepared, self._wraps = prepared, not prepared

    # -- saving ----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `UnsupportedError`, because a copy would not have hooks and would not update anything."""
        raise UnsupportedError(
            "a FusedOptimizer cannot be copied or pickled, because its hooks are on the parameters of one model. Save "
            "opt.state_dict(), create an optimizer for the other model, and load_state_dict() it there"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next step depends on, except the weights, in the format of `torch.optim`: states
        by parameter index, and groups with `param_names`. The step, the seed and similar values are in the first group,
        under "lowmem".

        States of parameters that have not been updated yet are included with their initial values, but are not loaded.
        Tensors have their stored dtype and logical shape. Small tensors are copies, and large tensors are not. Tensors
        of sharded parameters are gathered, so every rank must call this method.

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
            lazy: return each tensor as a `TensorSource` with a shape, a dtype, and `read()`, which gathers the tensor.
                Every rank must read all tensors, in order, before the next step.

        Returns:
            "state": parameter name → state name → value, and "_group0" → the tensors that the rule of group 0 stores
            for clipping by norm; "param_groups", with names as "params"; "step", "seed", "loss_scale", "nonfinite" and
            "weights" (the dtypes of the parameters).

        Raises:
            StepError: a step is incomplete or torn.
        """
        return saving.named(self._loop, lazy=lazy)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`. Tensors are copied to the devices of their parameters and never cast.

        Existing states are freed after the new states have been checked. Rule "adamw" also loads the state of a
        `torch.optim.AdamW` with the same parameters and groups. `convert_states` allows another `state_storage`.

        Raises:
            CheckpointError: rules, storages, parameters or groups differ, or the state is damaged. Nothing is changed.
        """
        state_dict = copy.copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saving.load(self._loop, state_dict, numbered=True)
        self._loop.drop()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def load_named_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `named_state_dict`, like `load_state_dict`. Hooks are not called."""
        saving.load(self._loop, state_dict, numbered=False)
        self._loop.drop()


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group whose `params` can be iterated more than once."""
    params = group["params"]
    if isinstance(params, Tensor):
        return {**group, "params": [params]}
    return group if isinstance(params, set) else {**group, "params": list(params)}


def _named(group: dict[str, Any], first: int) -> dict[str, Any]:
    """Returns a parameter group with names for its parameters, which are numbered from `first` if they have none."""
    params = group["params"]
    if "param_names" in group or any(isinstance(item, tuple) for item in params):
        return group
    return {**group, "params": [(f"param{first + i}", param) for i, param in enumerate(params)]}
