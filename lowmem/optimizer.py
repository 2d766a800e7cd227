"""The fused optimizer: a `torch.optim.Optimizer` whose updates happen during backward."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from lowmem import placements, rules
from lowmem.errors import ConfigError, StepError, UnsupportedError, did_you_mean
from lowmem.options import FusedConfig
from lowmem.placements.base import Reduced
from lowmem.placements.record import ParamRecord, listed
from lowmem.rules import UpdateRule
from lowmem.step import distributed_checkpoint, habits
from lowmem.step.changes import Changes
from lowmem.step.clipping import Clipping
from lowmem.step.cycle import StepCycle
from lowmem.step.hooks import GivenGradients, Hooks
from lowmem.step.policies import POLICIES, Needs, Policy, choose, repeatable, replay_of
from lowmem.step.report import LastStep, Report
from lowmem.step.saving import Saving
from lowmem.step.updates import Updates, decide_compilation, refuse_misfits, settle, takes_computed
from lowmem.tiles.gradients import ComputedGradient, Contribution, Gradient
from lowmem.tiles.graph import Compiler

logger = logging.getLogger(__name__)


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
        model: the module that the parameters are of. FSDP2 needs it; elsewhere it lets wrappers be refused. With it,
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
        self.config = FusedConfig(rule, **options)
        self._model = model
        self._rules: list[UpdateRule] = []  # of the groups, in their order
        self._added: list[tuple[dict[str, Any], dict[str, Any], int]] = []
        self._cycle = StepCycle()
        self._policies: list[Policy] = []  # the last one is in use; a list, which the wrapper of Lightning shares
        self._records: dict[Tensor, ParamRecord] = {}
        habits.watch()
        self._hooks = Hooks(self._records, self._cycle, self._on_gradient)
        self._complete = False  # the groups of the constructor are all added
        self._confirmed = False  # that the parameters are where they were when the optimizer was made
        groups = self.config.param_groups(params) if self.config.groups else list(params)
        if not groups:
            raise ConfigError("no parameters were given")
        try:
            super().__init__(groups, {})
            self.defaults = {**rules.resolve(rule).defaults, **self.config.given}
            self._placement.adopt(self._records.values(), self._model)
            self._complete = True
            self._order_records()
            self._refuse_unknown_names()
            self.compiled = decide_compilation(self.config.compile, self._records.values())
            device = next((record.param.device for record in self._records.values()), torch.device("cpu"))
            config, shard = self.config, self._placement.shard
            self._clipping = Clipping(self.param_groups, self._records, self.state, config, device, shard.ranks)
            self._updates = Updates(
                self.state,
                self._cycle,
                self._placement,
                self._clipping,
                Changes(self._records, device),
                config,
                self.compiled,
            )
            self._report = Report(self._updates, device, config.max_nonfinite_steps)
            self._saving = Saving(self._records, self.param_groups, self.state, shard, self._updates, self._report)
            self._choose_policy()
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
        where = f"parameter group {len(self.param_groups)}: "
        rule, group = self.config.complete(listed(param_group, first=len(self._records)), where)
        same = next((other for other in self._rules if other.name == rule.name), rule)
        if not rule.equals(same):
            raise ConfigError(
                f"{where}its rule is called {rule.name!r} as another one before it is, and saved states go by names. "
                "Give one of them another name, or make what differs between them a hyperparameter (`defaults`)"
            )
        rule = same
        placement = placements.find(self.config.placement, group["params"])
        if not self._records:
            self._placement = placement
        elif type(placement) is not type(self._placement):
            raise UnsupportedError(
                f"{where}its placement is {placement.name}, that of the groups before it {self._placement.name}; "
                "shard all parameters of an optimizer in one way"
            )
        defaults, self.defaults = self.defaults, {}  # those of the default rule are in the group if they belong there
        try:
            super().add_param_group(group)
        finally:
            self.defaults = defaults
        group = self.param_groups[-1]
        group.setdefault("param_names", [])  # torch leaves it out where there are no parameters
        records: dict[Tensor, ParamRecord] = {}
        self._rules.append(rule)
        try:
            records = self._records_of(group, rule)
            if self._complete:
                self._placement.adopt(records.values(), self._model)
            sharded = self._placement.shard.ranks is not None and bool(records)
            if sharded:  # first: a shard is refused for its own shape
                rule.adopt(group, sharded)
            for record in records.values():
                self._hooks.add(record)
                self._claim(record)
                record.refuse_leftover()
            if not sharded:  # last: a parameter is refused by its name
                rule.adopt(group, sharded)
            self._records.update(records)
            if self._complete:
                self._order_records()
                self._refuse_unknown_names()
                self._choose_policy()
        except BaseException:  # the group is added completely or not at all
            for param, record in records.items():
                self._hooks.discard(record)
                self._records.pop(param, None)
            self.param_groups.pop()
            self._rules.pop()
            raise
        self._added.append((group, dict(group), len(group["params"])))
        self._confirmed = False

    def _records_of(self, group: dict[str, Any], rule: UpdateRule) -> dict[Tensor, ParamRecord]:
        names = {record.name for record in self._records.values()}
        shard = self._placement.shard
        records: dict[Tensor, ParamRecord] = {}
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if name in names or param in records:
                raise ConfigError(f"parameter {name!r} is given twice; each parameter and each name may occur once")
            names.add(name)
            shard.admit(name, param)
            records[param] = ParamRecord(name, param, group, rule, shard.span(param))
        return records

    def _claim(self, record: ParamRecord) -> None:
        """Decides how a parameter is updated, once it requires a gradient, and again if its form has changed."""
        shard = self._placement.shard
        form = shard.form(record.param)
        if form == record.form or not record.param.requires_grad or not record.span.numel:
            return
        if record.param.is_complex() and (self.config.loss_scale or self.config.clip_value or shard.ranks):
            raise UnsupportedError(
                f"parameter {record.name!r} is complex, and such are trained without loss_scale and clip_value, and "
                "not sharded. Make it real, with the two parts as last dimension, and use torch.view_as_complex(param)"
            )
        if record.form is not None and (record.extra or self.state.get(record.param)):
            refuse_misfits(record, self.state[record.param], shard)
        settle(record, shard)
        record.computes = takes_computed(record, self._placement)
        self._hooks.claim(record)
        record.form = form

    def _order_records(self) -> None:
        """Norms are summed, and reported, in the order of the model's parameters."""
        for param in self._model.parameters() if self._model is not None else ():
            if param in self._records:
                self._records[param] = self._records.pop(param)

    def remove(self) -> None:
        """Removes every hook. The optimizer can still be saved, and updates nothing from then on."""
        self._hooks.remove()

    def _refuse_unknown_names(self) -> None:
        known = [record.name for record in self._records.values()]
        for rule, group in zip(self._rules, self.param_groups, strict=True) if known else ():
            for name in set(rule.names(group)) - set(known):
                raise ConfigError(f"rule {rule.name!r}: no parameter is called {name!r}.{did_you_mean(name, known)}")

    # -- the policy ------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """When updates happen: "immediate", "two_pass" or "deferred"."""
        return self._policy.name

    @property
    def policy_reason(self) -> str:
        """Why this policy was chosen."""
        return self._policy.reason

    @property
    def replay(self) -> str | None:
        """How "two_pass" gets its second pass, "graph" or "forward"; None under another policy."""
        return self._policy.replay

    @property
    def _policy(self) -> Policy:
        return self._policies[-1]

    @property
    def placement(self) -> str:
        """Where parameters are: "local", "replicated", "zero3" or "fsdp2"."""
        return self._placement.name

    def _choose_policy(self, loss: Tensor | None = None) -> None:
        """Chooses the policy for what is asked by now, and logs the reason if it was chosen automatically.

        Raises:
            UnsupportedError: the policy that was asked for cannot.
        """
        on_cpu = all(record.param.is_cpu for record in self._records.values())
        replays_graph = self._placement.replays_graph
        asked = {"accumulation": self._hooks.accumulating, "reentrant": habits.reentrant(loss)}
        needs = Needs.of(self._rules, self.param_groups, self._clipping, **asked)
        name, reason = choose(self.config, needs, on_cpu=on_cpu, replays_graph=replays_graph)
        if self._policies and (name == self.policy or self._policy.accumulates):
            return
        policy = POLICIES[name](self.config, self._updates, self._placement, self._records)
        policy.reason, policy.replay = reason, replay_of(name, self.config, replays_graph=replays_graph)
        self._policies.append(policy)
        self._cycle.accumulates = policy.accumulates
        if len(self._policies) > 1 or name != "immediate":
            logger.info("policy %s: %s", name, reason)

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
        outer, self._hooks.in_accumulate = self._hooks.in_accumulate, True
        try:
            self._choose_policy()
            yield
        finally:
            self._hooks.in_accumulate = outer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards inside update nothing of this optimizer, and free the gradients of its parameters.

        The discriminator of a GAN is to judge, and not to move:

            with discriminator_opt.paused():
                generator_opt.backward(-discriminator(generator(noise)).mean())
        """
        outer, self._hooks.paused = self._hooks.paused, True
        try:
            yield
        finally:
            self._hooks.paused = outer

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
        return self._backward(loss, last=not self._hooks.accumulating)

    def _backward(self, loss: Tensor | Callable[[], Tensor], last: bool) -> Tensor:
        """As `backward`; `last` is False for a micro-batch that others of its step will follow."""
        if self._hooks.removed or self._hooks.paused:
            state = "was removed by remove()" if self._hooks.removed else "is inside its paused()"
            raise StepError(f"backward() of an optimizer that {state}: nothing would be updated")
        self._begin_rules()
        again = None
        if self.replay == "forward":
            if isinstance(loss, Tensor):
                raise StepError("replay='forward' computes the loss twice: pass a callable, opt.backward(lambda: loss)")
            loss = again = repeatable(loss, (record.param.device for record in self._records.values()))
        value = loss if isinstance(loss, Tensor) else loss()
        _refuse_loss(value)
        if self.policy == "two_pass" and self._placement.shard.ranks is None:  # it measures chosen leaves
            self._choose_policy(value)
        for record in self._records.values():
            self._claim(record)  # it may have been frozen until now
            record.refuse_leftover()
        self._cycle.begin(explicit=True)
        try:
            for loss, inputs, retain_graph in self._policy.passes(value, again):
                self._begin_pass(last)
                scaled = self._clipping.scaler.scaled(loss)
                with self._hooks.alone(scaled):
                    torch.autograd.backward(scaled, inputs=inputs, retain_graph=retain_graph)
                self._end_pass(last)
            if last:
                self._finish(value.detach())
        except BaseException as error:
            self._fail(error)
            raise
        return value.detach()

    def _on_gradient(self, record: ParamRecord) -> None:
        """The gradient of one parameter is complete."""
        offered = self._hooks.offered(record.param)
        if record.param.grad is None and not offered:  # its autograd function returned none
            if not self._cycle.idle:
                self._use(self._placement.reducer.skip(record))
            return
        if self._cycle.idle:
            self._begin_plain(record)
        self._cycle.fired(record.name)
        grad = self._policy.accumulate(record, self._gradient(record, offered))
        if grad is not None:
            self._update(record, grad)

    def _gradient(self, record: ParamRecord, offered: list[Contribution]) -> Gradient:
        """The sum of what backward has put into `.grad` and what is computed as it is read."""
        if not offered:
            return self._placement.reducer.take(record.param)
        computed = ComputedGradient(record.span.shape, record.param.device, offered)
        if record.param.grad is None:
            return computed
        grad = self._placement.reducer.take(record.param)
        computed.add_to(grad)
        return grad

    def _begin_plain(self, first: ParamRecord) -> None:
        """A plain `loss.backward()` has begun, and the gradient of `first` is complete."""
        self._hooks.refuse_company(first)
        self._begin_rules()
        self._policy.allow_plain_backward()
        for record in self._records.values():
            self._claim(record)
        self._cycle.begin(explicit=False, nests=habits.nests(self._records.values()))
        if not self._cycle.waiting:
            self._drop()  # left over from a plain backward that failed
        self._begin_pass(last=not self._hooks.accumulating)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_plain)  # type: ignore[attr-defined]

    def _update(self, record: ParamRecord, grad: Gradient) -> None:
        """The way of a gradient: reduced over ranks, then used when the policy says so."""
        reduced = self._placement.reducer.reduce(record, grad)
        del grad
        self._use(reduced)

    def _use(self, gradients: Reduced) -> None:
        for record, grad in gradients:
            self._cycle.notice(record.name)
            self._policy.ready(record, grad)
            del grad  # not to be held while the next one is made

    def _begin_pass(self, last: bool) -> None:
        self._policy.begin(last)
        if last or not self._placement.reducer.accumulates_first:
            self._placement.reducer.begin(self._records.values(), self._policy.sums())

    @torch.no_grad()
    def _end_pass(self, last: bool) -> None:
        """A backward has ended: the gradients in flight arrive."""
        for record, grad in self._policy.leftovers():
            self._update(record, grad)
        if last or not self._placement.reducer.accumulates_first:
            self._use(self._placement.reducer.flush())
        if not last:
            self._placement.settle(self._records.values())
            self._cycle.wait()

    def _end_plain(self) -> None:
        last = not self._hooks.accumulating
        self._end_pass(last)
        if last:
            self._finish()

    def _finish(self, loss: Tensor | None = None) -> None:
        """Every backward of the step is over: closes the step and leaves its report."""
        self._cycle.refuse_nothing()
        with torch.no_grad():
            decision = self._policy.complete()
            if decision is None or not decision.skipped:
                for rule, group in zip(self._rules, self.param_groups, strict=True):
                    rule.end(group)
            self._placement.settle(self._records.values())
            self._cycle.end()
            self._report.close(self._policy, decision, loss)
        self._opt_called = True  # LR schedulers ask whether an optimizer step came before theirs

    def _settle(self) -> None:
        """The host learns how the last step ended."""
        self._cycle.settle(*self._report.settle())

    def _begin_rules(self) -> None:
        self._settle()
        self._report.raise_if_diverged()
        if self.config.compile is True and Compiler.failure is not None:
            raise ConfigError(f"compile=True, but compiling failed; use 'auto' or False: {Compiler.failure}")
        habits.refuse_edits(self.param_groups, self._added)
        if not self._confirmed:
            self._placement.confirm(self._records.values(), self._settings())
            self._confirmed = True
        self._choose_policy()  # the options of a group may ask for another by now
        for rule, group in zip(self._rules, self.param_groups, strict=True):
            rule.begin(group, self._cycle.step + (not self._cycle.waiting))

    def _settings(self) -> dict[str, Any]:
        """What all ranks have to agree on."""
        others = ("rule", "lr", "hyper", "groups", "store_dir")  # are in the groups, or a rank's own
        settings = {name: value for name, value in vars(self.config).items() if name not in others}
        settings["seed"] = self._updates.seed
        for n, group in enumerate(self.param_groups):
            for key in group.keys() - {"params", "param_names"}:
                settings[f"{key} of parameter group {n}"] = group[key]
        return {**settings, "number of trained parameters": sum(param.requires_grad for param in self._records)}

    def _drop(self) -> None:
        self._policy.drop()
        self._placement.reducer.drop()

    def _fail(self, error: BaseException) -> None:
        waiting = self._cycle.waiting
        if not self._cycle.idle:
            self._cycle.fail(f"its backward ended with {type(error).__name__}")
        self._drop()
        self._placement.recover()
        if self._cycle.torn is not None:
            error.add_note(f"{self._cycle.torn}; the optimizer refuses to continue until a checkpoint is loaded")
        elif waiting:
            error.add_note(f"the {waiting} micro-batch(es) before it were dropped with it; begin the step again")

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
        if distributed_checkpoint.wants_initial_states():
            return None  # `state_dict` makes them
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [r for r in self._records.values() if r.span.numel and r.param.grad is not None]
        if given or self._cycle.waiting:
            self._backward_of(given)
        self._cycle.stepped()
        return loss

    def _backward_of(self, given: Sequence[ParamRecord]) -> None:
        """Ends a step by the backward of a loss whose gradients are those in `.grad`."""
        for record in given:
            self._hooks.refuse_given(record, scaled=self._clipping.scaler.value is not None)
        self._cycle.loop_steps = True
        params, grads = [record.param for record in given], [record.param.grad for record in given]
        for param in params:
            param.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), device=next(iter(self._records)).device, requires_grad=True)
            self._backward(lambda: GivenGradients.apply(grads, leaf, *params), last=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the micro-batches of a step that is not complete, and what lies in `.grad` of frozen parameters.

        Raises:
            StepError: in a loop that calls `step()`, a backward came since, so its gradient has been used already.
        """
        if self._cycle.waiting:
            self._drop()
        self._cycle.discard()
        super().zero_grad(set_to_none)

    def accept_torn_step(self) -> None:
        """Continues with the weights as a failed backward left them: some of this step, some of the one before."""
        self._drop()
        self._cycle.reset(self._cycle.step)

    # -- reports -----------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> LastStep | None:
        """The report of the last step, None before the first one."""
        return self._report.last

    @property
    def loss_scale(self) -> float | None:
        """What the next loss is multiplied by; None if there is no scaling."""
        value = self._clipping.scaler.value
        return None if value is None else float(value)

    @property
    def nonfinite_gradients(self) -> int:
        """How many gradients with Inf or NaN there were since the optimizer was made."""
        return int(self._report.nonfinite_gradients)

    @property
    def nonfinite_steps(self) -> int:
        """How many steps had a gradient with Inf or NaN since the optimizer was made."""
        return int(self._report.nonfinite_steps)

    @property
    def compile_seconds(self) -> float:
        """How long compiling sweeps has taken in this process, nearly all of it in the first step."""
        return Compiler.seconds

    # -- saving ----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `UnsupportedError`: a copy would have no hooks, and update nothing."""
        raise UnsupportedError(
            "a FusedOptimizer cannot be copied or pickled, because its hooks are on the parameters of one model. Save "
            "opt.state_dict(), create an optimizer for the other model, and load_state_dict() it there"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on except the weights: states by parameter name, groups, step, seed.

        Tensors are in their own dtype and logical shape: the live ones (copies of small ones), or gathered where
        parameters are sharded, so that every rank has to call it (`lowmem.hf.checkpoint.save_optimizer` gathers one at
        a time).

        Raises:
            StepError: in the middle of a step, or after one that is torn.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if distributed_checkpoint.asks_for_states():
            for record in self._records.values():
                self._claim(record)
            saved = self._saving.numbered()
        else:
            saved = {**self._saving.metadata(), "state": self._saving.gathered()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            saved = post_hook(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned. Tensors are copied to their parameter's device and never cast.

        Rule "adamw" also continues from the state of a `torch.optim.AdamW` of the same parameters and groups.

        Raises:
            CheckpointError: it is of other rules or storages, its parameters or groups are not this optimizer's, or it
                is damaged. The optimizer is then as it was.
        """
        state_dict = copy.copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._saving.load(state_dict)
        self._drop()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _refuse_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise StepError(f"the loss is {what}; it must be a tensor of one element, as .mean() returns")
    if not loss.requires_grad:
        raise StepError("the loss has no graph: every parameter is frozen, or it was computed under no_grad")
