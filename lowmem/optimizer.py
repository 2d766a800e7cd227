"""The fused optimizer: a `torch.optim.Optimizer` whose updates happen during backward."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from lowmem import placements, rules
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.options import FusedConfig
from lowmem.rules import UpdateRule
from lowmem.step import habits
from lowmem.step.clipping import Clipping
from lowmem.step.compiled import decide_compilation
from lowmem.step.cycle import StepCycle
from lowmem.step.hooks import Hooks
from lowmem.step.loop import StepLoop, claim
from lowmem.step.parameters import AddedGroup, Parameters, States
from lowmem.step.record import ParamRecord
from lowmem.step.report import LastStep, Report
from lowmem.step.saving import Saving
from lowmem.step.updates import Updates
from lowmem.tiles.gradients import Contribution
from lowmem.tiles.graph import Compiler
from lowmem.tiles.quantized import QuantizedWeight, in_codes


class FusedOptimizer(torch.optim.Optimizer):
    """Updates every parameter during backward, as soon as its gradient is complete, and frees the gradient.

        opt = lowmem.FusedOptimizer(model.named_parameters(), rule="adalomo", lr=1e-3)
        for batch in loader:
            opt.backward(model(**batch).loss)
            scheduler.step()

    Plain `loss.backward()` does the same under policy "immediate" without a loss scale.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts) of either, as `torch.optim` takes them. A group
            may have its own hyperparameters, "rounding" and "state_storage", and its own "rule"; what a group with its
            own rule does not set is that rule's default, `lr` included. Frozen parameters cost nothing; one that is
            unfrozen later joins at the next `backward`.
        rule: a name (`lowmem.rules.table()`), an `UpdateRule`, a `torch.optim.Optimizer` class, or its import path.
        model: the module that the parameters are of. FSDP2 needs it. With it,
            norms over all gradients are summed in the order of `model.parameters()`, as `clip_grad_norm_` would.
        **options: the attributes of `FusedConfig`, whose documentation is the reference, and hyperparameters of `rule`.

    Attributes:
        config: the options.
        compiled: whether updates are compiled, which takes some seconds in the first step.

    Raises:
        ConfigError: an unknown rule, option or hyperparameter, or a value out of range.
        UnsupportedError: a combination that cannot be exact.
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
        groups = [_listed(group) for group in (groups if isinstance(groups[0], dict) else [{"params": groups}])]
        placement = placements.find(config.placement, (param for group in groups for param in group["params"]))
        self._parameters = Parameters(config, placement, model)
        self._records = self._parameters.records
        self._cycle = StepCycle(config.seed)
        habits.watch()
        self._hooks = Hooks(self._records, self._cycle, self._on_gradient)
        self._opt_called = False
        self._created = False
        try:
            super().__init__(groups, {})
            self.defaults = {**rules.resolve(rule).defaults, **config.given}
            placement.adopt(self._records.values(), model)
            self._parameters.complete()
            self.compiled = decide_compilation(config.compile, self._records.values())
            if any(placement.shard.quantized(param) is not None for param in self._records):
                QuantizedWeight.compiled = self.compiled
            self._clipping = Clipping(self._parameters)
            self._updates = Updates(self._parameters, self._cycle, self._clipping, self.compiled)
            self._report = Report(self._parameters, self._updates)
            self._loop = StepLoop(self._parameters, self._hooks, self._updates, self._report)
            self._saving = Saving(self._loop)
            self._created = True
        except BaseException:
            self.remove()  # the hooks of the groups that were added
            raise

    @classmethod
    def from_config(
        cls, params: Iterable[Any], config: FusedConfig, model: nn.Module | None = None
    ) -> "FusedOptimizer":
        """An optimizer with the options of `config`, of rule "adalomo" where it names none."""
        options = {option.name: getattr(config, option.name) for option in fields(config)}
        return cls(params, model=model, **{**options, "rule": config.rule or "adalomo"})

    # -- parameters ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checks its hyperparameters and hooks its trainable parameters."""
        parameters, where = self._parameters, f"parameter group {len(self.param_groups)}: "
        rule, group = self.config.complete(_named(_listed(param_group), first=len(self._records)), where)
        rule = parameters.same_rule(rule, where)
        placement = placements.find(self.config.placement, group["params"])
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
        parameters.groups.append(AddedGroup(group, rule, {**group}, len(group["params"])))
        records: dict[Tensor, ParamRecord] = {}
        try:
            records = parameters.new_records(group, rule)
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
        """Removes every hook. The optimizer can still be saved, and updates nothing from then on."""
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
        self._parameters.group_memory.clear()

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
        """Where parameters are: "local", "replicated", "zero3" or "fsdp2"."""
        return self._parameters.placement.name

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside are micro-batches; the first one outside completes their step and updates the weights.

        So does `step()`, which takes the micro-batches so far as all of the step. `zero_grad()` drops them.

            for n, batch in enumerate(batches, 1):
                with opt.accumulate() if n < len(batches) else nullcontext():
                    opt.backward(model(**batch).loss / len(batches))

        Raises:
            UnsupportedError: the policy stores no gradients; "auto" becomes "deferred" here.
        """
        with self._hooks.during(in_accumulate=True):
            self._loop.choose_policy()
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards inside update nothing of this optimizer, and free the gradients of its parameters.

        The discriminator of a GAN is to judge, and not to move:

            with discriminator_opt.paused():
                generator_opt.backward(-discriminator(generator(noise)).mean())
        """
        with self._hooks.during(paused=True):
            yield

    # -- the step --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Callable[[], Tensor]) -> Tensor:
        """Runs the backward of a scalar `loss`, or of the one that a callable returns, and updates its parameters.

        Returns:
            The loss, detached and without the loss scale.

        Raises:
            StepError: the loss is not a scalar or has no graph, a gradient is left over in `.grad`, the life cycle of
                the step is violated (a second backward, a hook that fires twice, a torn step), the loss depends on
                parameters of another `FusedOptimizer` that is not `paused`, or the gradients of the last
                `max_nonfinite_steps` steps were not finite.
        """
        return self._loop.backward(loss, last=not self._hooks.accumulating)

    def _on_gradient(self, record: ParamRecord, offered: Sequence[Contribution]) -> None:
        """Called by the hook of a parameter when its gradient is complete."""
        self._loop.arrived(record, offered)
        self._opt_called |= self._cycle.last  # LR schedulers ask whether an optimizer step came before theirs

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights by gradients that the training loop has put into `.grad`, and completes a step whose
        micro-batches wait for a last one. Otherwise backward has updated the weights already.

        Args:
            closure: computes the loss, runs its backward and returns it, as for any `torch.optim.Optimizer`.

        Returns:
            What the closure returns.

        Raises:
            StepError: several backwards came before it, outside of `accumulate`, or one and gradients in `.grad`; or
                those cannot be used.
        """
        loss = None
        if self._hooks.postponed and self._is_accelerate_prepared:
            return loss
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [r for r in self._records.values() if r.span.numel and r.param.grad is not None]
        if given or self._cycle.waiting:
            self._loop.backward_of_given(given)
        self._cycle.stepped()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the micro-batches of a step that is not complete, and what lies in `.grad` of frozen parameters.

        Raises:
            StepError: in a loop that calls `step()`, a backward came since, so its gradient has been used already.
        """
        if self._hooks.postponed and self._is_accelerate_prepared:
            return
        if self._cycle.waiting:
            self._loop.drop()
        self._cycle.discard()
        super().zero_grad(set_to_none)

    def accept_torn_step(self) -> None:
        """Continues with the weights as a failed backward left them: some of this step, some of the one before."""
        self._loop.drop()
        self._cycle.accept_torn()

    # -- reports -----------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> LastStep | None:
        """The report of the last step, None before the first one."""
        return self._report.last

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next loss; None if there is no scaling."""
        value = self._clipping.scaler.value
        return None if value is None else float(value)

    @property
    def nonfinite_gradients(self) -> int:
        """The number of gradients with Inf or NaN since the optimizer was made."""
        return int(self._report.nonfinite_gradients)

    @property
    def nonfinite_steps(self) -> int:
        """The number of steps that had a gradient with Inf or NaN since the optimizer was made."""
        return int(self._report.nonfinite_steps)

    @property
    def compile_seconds(self) -> float:
        """Seconds that compiling updates has taken in this process, nearly all of them in the first step."""
        return Compiler.seconds

    @functools.cached_property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate 1.15 (accelerator.py, prepare_optimizer) asks for it as it wraps an optimizer."""
        self._hooks.prepared = True
        return False

    # -- saving ----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `UnsupportedError`: a copy would have no hooks, and update nothing."""
        raise UnsupportedError(
            "a FusedOptimizer cannot be copied or pickled, because its hooks are on the parameters of one model. Save "
            "opt.state_dict(), create an optimizer for the other model, and load_state_dict() it there"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on except the weights, as `torch.optim.Optimizer` has it: states by the
        number of a parameter, and groups with `param_names`. The step, the seed and the like are in the first group,
        under "lowmem".

        States of parameters that have had no update yet are shown as they will begin, and not loaded. Tensors are in
        their own dtype and logical shape: the live ones (copies of small ones), or gathered where parameters are
        sharded, so that every rank has to call it.

        Raises:
            StepError: in the middle of a step, or after one that is torn.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = self._saving.numbered()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            saved = post_hook(self, saved) or saved
        return saved

    def named_state_dict(self, *, lazy: bool = False) -> dict[str, Any]:
        """The same by parameter name, without states of parameters that have had no update. No hooks are called.

        Args:
            lazy: tensors are `TensorSource`s: a shape, a dtype, and `read()`, which gathers one tensor at a time. Every
                rank has to read them, in their order and before the next step.

        Returns:
            "state": name of a parameter → name of a state → value, and "_group0" → what the rule of group 0 remembers
            to clip by norm; "param_groups", with names as "params"; "step", "seed", "loss_scale", "nonfinite" and
            "weights", the dtypes of the parameters.

        Raises:
            StepError: in the middle of a step, or after one that is torn.
        """
        return self._saving.named(lazy=lazy)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned. Tensors are copied to their parameter's device and never cast.

        States that the optimizer has already are freed once the new ones are complete. Rule "adamw" also continues from
        the state of a `torch.optim.AdamW` of the same parameters and groups. With `convert_states` they may have been
        saved in another `state_storage`.

        Raises:
            CheckpointError: it is of other rules or storages, its parameters or groups are not this optimizer's, or it
                is damaged. The optimizer is then as it was, and so it is if a tensor cannot be read.
        """
        state_dict = copy.copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._saving.load(state_dict, numbered=True)
        self._loop.drop()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def load_named_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from what `named_state_dict` returned, as `load_state_dict` does. No hooks are called."""
        self._saving.load(state_dict, numbered=False)
        self._loop.drop()


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group whose `params` can be iterated more than once."""
    params = group["params"]
    if isinstance(params, Tensor):
        return {**group, "params": [params]}
    return group if isinstance(params, set) else {**group, "params": list(params)}


def _named(group: dict[str, Any], first: int) -> dict[str, Any]:
    """A parameter group with names of its parameters, which are numbered from `first` if they have none."""
    params = group["params"]
    if "param_names" in group or any(isinstance(item, tuple) for item in params):
        return group
    return {**group, "params": [(f"param{first + i}", param) for i, param in enumerate(params)]}
