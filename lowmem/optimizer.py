"""The fused optimizer: a `torch.optim.Optimizer` whose work happens in backward."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowmem import placements, rules
from lowmem.errors import ConfigError, StepError, UnsupportedError, did_you_mean
from lowmem.placements.record import ParamRecord, listed
from lowmem.rules import UpdateRule
from lowmem.step import policies
from lowmem.step import state_dict as states
from lowmem.step.clipping import Clipping
from lowmem.step.cycle import StepCycle
from lowmem.step.loss_scaler import DynamicScale, LossScale
from lowmem.step.policies import repeatable
from lowmem.step.report import LastStep, Outcome
from lowmem.step.updates import Updates
from lowmem.tiles.storage import ROUNDINGS
from lowmem.tiles.tile import CompiledTile

logger = logging.getLogger(__name__)

# With fewer trainable elements the seconds that compilation takes are longer than what it saves.
COMPILE_FROM = 1 << 25

# Keys of a parameter group that torch, its learning-rate schedulers or the user put there beside hyperparameters.
_GROUP_KEYS = {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr"}


class FusedOptimizer(torch.optim.Optimizer):
    """Updates every parameter during backward, the moment its gradient exists, and frees the gradient.

        opt = lowmem.FusedOptimizer(model.named_parameters(), rule="adalomo", lr=1e-3)
        for batch in loader:
            opt.backward(model(**batch).loss)
            scheduler.step()

    Plain `loss.backward()` does the same under policy `immediate` where there is no loss scale. `step()` and
    `zero_grad()` may be called.

    Gradients are unscaled, clamped by `clip_value`, then clipped by `clip_norm`, as by `scaler.unscale_`,
    `clip_grad_value_` and `clip_grad_norm_` in this order. (AdaLomo measures before it clamps, as its source does.)

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts) of either, as `torch.optim` takes them. Frozen
            parameters cost nothing; one that is unfrozen later joins at the next `backward`.
        rule: a name (`lowmem.rules.table()`), an `UpdateRule`, a `torch.optim.Optimizer` class, or its import path.
        lr: learning rate; the rule's own default if None.
        policy: "immediate": in the hook. "two_pass": backward twice, first to measure. "deferred": gradients wait in a
            store until the step is decided. "auto": the cheapest that is exact for what is asked, also later on
            (`policy_reason` says why).
        clip_norm: the norm over all gradients is at most this, as with `torch.nn.utils.clip_grad_norm_`; refused under
            "immediate". In float32 on a CPU the same bits.
        norm_type: of `clip_norm`: 2.0, or inf for the largest element.
        clip_value: gradients are clamped to ± this.
        loss_scale: `backward` multiplies the loss with it and gradients are divided by it: a number, "dynamic", or a
            `DynamicScale`. After an overflow "two_pass" and "deferred" leave the whole step out, as
            `torch.amp.GradScaler` does; "immediate" leaves out the parameters whose gradients are not finite.
        replay: of "two_pass": "graph" runs backward through the same graph twice; "forward" computes the loss anew with
            the same random numbers and wants `backward` to be given a callable (modules that count their forwards, such
            as BatchNorm, count both); "auto" is "graph", but under ZeRO-3, which gathers for one backward only.
        store: of "deferred": "host" (page-locked where there is a GPU), "device", or "disk": a memory-mapped file in
            `store_dir`. "host" if None. Giving it asks for "deferred".
        accumulation_dtype: micro-batches are summed in "float32" (4 bytes per element in the store), or in the dtype of
            the "gradient" (2 for bfloat16, rounded at every micro-batch, as `.grad` is). A step of one micro-batch
            stores it as it is.
        rounding: "nearest", "stochastic" or "compensated" (keeps 2 bytes a parameter): how a float32 result becomes a
            bfloat16 or float16 weight. float32 weights hold every result exactly.
        placement: "local"; "replicated": every rank of a process group has all parameters and data of its own, and
            gradients are averaged; "zero3" and "fsdp2": the ranks share the parameters, as DeepSpeed or `fully_shard`
            has cut them; "auto" tells by the parameters and the process group.
        compile: True, False, or "auto": compile the sweep where there is a compiler and enough to win.
        seed: of stochastic rounding.
        batching: small parameters of equal shape wait for each other and are updated as one stack, to the same bits.
        **hyper: hyperparameters of the rule, which a group may override.

    Attributes:
        policy, policy_reason: which it is, and why.
        replay: "graph" or "forward", under "two_pass".
        compiled: whether the sweep goes through torch.compile, which takes up to a minute in the first step.

    Raises:
        ConfigError: an unknown rule, policy or hyperparameter, or a value out of range.
        UnsupportedError: a combination that cannot be honoured exactly.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: str | UpdateRule | type = "adalomo",
        *,
        lr: float | None = None,
        policy: str = "auto",
        clip_norm: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
        loss_scale: float | str | DynamicScale | None = None,
        replay: str = "auto",
        store: str | None = None,
        store_dir: str | None = None,
        accumulation_dtype: str = "float32",
        rounding: str = "nearest",
        placement: str = "auto",
        compile: bool | str = "auto",
        seed: int = 0,
        batching: bool = True,
        **hyper: Any,
    ) -> None:
        self.rule = rules.resolve(rule)
        self.rounding = rounding
        if rounding not in ROUNDINGS:
            raise ConfigError(f"rounding {rounding!r} is unknown; known are {', '.join(ROUNDINGS)}")
        if not isinstance(batching, bool):
            raise ConfigError(f"batching={batching!r}; allowed are True and False")
        if lr is not None:
            hyper["lr"] = lr
        self._check_names(hyper, "")
        self._cycle = StepCycle()
        self._records: dict[Tensor, ParamRecord] = {}
        self._complete = False  # all the groups are here that it is made with
        self._accumulating = False
        groups = list(params)
        if not groups:
            raise ConfigError("no parameters were given")
        self._wanted_placement = placement
        self._wanted = policies.PolicySettings(policy, replay, store, store_dir, accumulation_dtype)
        try:
            super().__init__(groups, {**self.rule.defaults, **hyper})
            self._complete = True
            self._refuse_unknown_parameters()
            self.compiled = decide_compilation(compile, self._records.values())
            device = next((record.param.device for record in self._records.values()), torch.device("cpu"))
            self._clipping = Clipping(
                self.rule,
                self.param_groups,
                self._records,
                self.state,
                clip_norm=clip_norm,
                norm_type=norm_type,
                clip_value=clip_value,
                scale=LossScale(loss_scale, device),
                placement=self._placement,
            )
            self._updates = Updates(
                self.rule,
                self.state,
                self._cycle,
                placement=self._placement,
                clipping=self._clipping,
                rounding=rounding,
                seed=seed,
                batching=batching,
                compiled=self.compiled,
            )
            self._outcome = Outcome(self._updates, self._clipping, device)
            self._choose_policy()
        except BaseException:
            self.remove()  # the hooks of the groups that were fine
            raise

    # -- parameters ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checks its hyperparameters and hooks its trainable parameters."""
        self._check_names(param_group, f"parameter group {len(self.param_groups)}: ")
        group = listed(param_group, first=len(self._records))
        placement = placements.find(self._wanted_placement, group["params"])
        if not self._records:
            self._placement = placement
        elif type(placement) is not type(self._placement):
            raise UnsupportedError(
                f"parameter group {len(self.param_groups)} is in placement {placement.name}, those before it in "
                f"{self._placement.name}; make an optimizer for each"
            )
        super().add_param_group(group)
        self.param_groups[-1].setdefault("param_names", [])  # torch leaves it out where there are no parameters
        records: dict[Tensor, ParamRecord] = {}
        try:
            records = self._records_of(self.param_groups[-1])
            self._placement.adopt(records.values())
            if self._placement.ranks is not None and records:
                self.rule.refuse_pieces(self.param_groups[-1])
            for record in records.values():
                self._attach(record)
            self._records.update(records)
            if self._complete:
                self._refuse_unknown_parameters()
                self._choose_policy()
        except BaseException:  # the group is added whole or not at all
            for param, record in records.items():
                record.detach()
                self._records.pop(param, None)
            self.param_groups.pop()
            raise

    def _records_of(self, group: dict[str, Any]) -> dict[Tensor, ParamRecord]:
        self.rule.check(group)
        taken = {record.name for record in self._records.values()}
        records: dict[Tensor, ParamRecord] = {}
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if name in taken or param in records:
                raise ConfigError(f"parameter {name!r} is given twice; each parameter and each name may stand once")
            taken.add(name)
            self._placement.admit(name, param)
            records[param] = ParamRecord(name, param, group, self._placement.span(param))
        return records

    def _attach(self, record: ParamRecord) -> None:
        """Hooks a parameter that wants a gradient and has no hook yet; one without elements has nothing to update."""
        param = record.param
        if record.handle is not None or not param.requires_grad or not record.span.numel:
            return
        self._settle(record)
        record.attach(self._on_gradient)

    def _settle(self, record: ParamRecord) -> None:
        """Decides how a parameter is updated, by what its group says now."""
        param = record.param
        try:
            self.rule.admit(param, record.group)
            record.plan = self.rule.plan(record.name, record.span.shape, record.group)
            record.alike.clear()
            record.layout = self._placement.layout(record, record.plan.view)
        except UnsupportedError as error:
            raise UnsupportedError(f"parameter {record.name!r} of shape {list(record.span.shape)} {error}") from None

    def remove(self) -> None:
        """Takes every hook away; the optimizer does nothing from here on."""
        for record in self._records.values():
            record.detach()
        self._records.clear()

    def _check_names(self, given: Mapping[str, Any], where: str) -> None:
        known = self.rule.defaults
        if self.rule.open_ended:
            return
        for key in given:
            if key not in known and key not in _GROUP_KEYS:
                raise ConfigError(
                    f"{where}rule {self.rule.name!r} has no hyperparameter {key!r}.{did_you_mean(key, known)} "
                    f"It has {', '.join(known)}."
                )

    def _refuse_unknown_parameters(self) -> None:
        known = [record.name for record in self._records.values()]
        for group in self.param_groups if known else []:
            for name in self.rule.names(group):
                if name not in known:
                    raise ConfigError(
                        f"rule {self.rule.name!r}: no parameter is called {name!r}.{did_you_mean(name, known)}"
                    )

    # -- the policy ------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """When updates happen: "immediate", "two_pass" or "deferred"."""
        return self._policy.name

    @property
    def placement(self) -> str:
        """Where parameters live: "local", "replicated", "zero3" or "fsdp2"."""
        return self._placement.name

    def sum_norms_in_order(self, params: Iterable[Tensor]) -> None:
        """Norms over all gradients are summed in the order of `params`, where it is not that of the groups: what
        `clip_grad_norm_` is given decides its last bits. `last_step` lists norms in the same order.
        """
        for param in params:
            if param in self._records:
                self._records[param] = self._records.pop(param)

    def _wish(self) -> policies.Wish:
        scale = self._clipping.scale
        options = (self.rule.needs_norm(group) for group in self.param_groups)
        norm = next((option for option in options if option is not None), None)
        scaled = scale.value is not None and not self.rule.can_be_held_back
        return policies.Wish(
            norm=f"clip_norm={self._clipping.norm!r}" if self._clipping.norm is not None else norm,
            skips="loss_scale with an optimizer from elsewhere" if scaled else None,
            prefers_whole="a dynamic loss scale" if scale.dynamic else None,
            accumulates=self._accumulating,
        )

    def _choose_policy(self) -> None:
        """Takes the policy that does what is asked by now; says so where it was left to us.

        Raises:
            UnsupportedError: the policy that was asked for cannot.
        """
        on_cpu = all(record.param.device.type == "cpu" for record in self._records.values())
        graph_stays = self._placement.graph_stays
        chosen, reason = policies.choose(self._wanted, self._wish(), on_cpu=on_cpu, graph_stays=graph_stays)
        current: policies.Policy | None = getattr(self, "_policy", None)
        if current is not None and (chosen == current.name or current.adds):
            return
        self.policy_reason = reason
        self._policy = policies.make(chosen, self._wanted, self._updates, self._clipping, self._records)
        self._cycle.adds = self._policy.adds
        self.replay = self._wanted.replay_of(chosen, graph_stays=graph_stays)
        if current is not None or chosen != "immediate":
            logger.info("policy %s: %s", chosen, reason)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside are micro-batches; the first one outside completes their step and updates the weights.

            for n, batch in enumerate(batches, 1):
                with opt.accumulate() if n < len(batches) else nullcontext():
                    opt.backward(model(**batch).loss / len(batches))

        Raises:
            UnsupportedError: the policy keeps no gradients; "auto" becomes "deferred" here.
        """
        outer, self._accumulating = self._accumulating, True
        try:
            self._choose_policy()
            yield
        finally:
            self._accumulating = outer

    # -- the step --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Callable[[], Tensor]) -> Tensor:
        """Runs the backward of a scalar `loss`, or of what a callable returns, and updates every parameter in it.

        Returns:
            The loss, detached and without the loss scale.

        Raises:
            StepError: the loss is no scalar or has no graph, a gradient is left over in `.grad`, or the step life cycle
                is broken (a second backward, a hook that fires twice, a torn step).
        """
        self._outcome.settle()
        self._outcome.refuse_hopeless()
        self._begin_rule()
        again = None
        if self.replay == "forward":
            if isinstance(loss, Tensor):
                raise StepError("replay='forward' computes the loss twice: pass a callable, opt.backward(lambda: loss)")
            loss = again = repeatable(loss, (record.param.device for record in self._records.values()))
        value = loss if isinstance(loss, Tensor) else loss()
        _refuse_loss(value)
        for record in self._records.values():
            self._attach(record)  # it may have been frozen until now
            record.refuse_leftover()
        self._cycle.begin(explicit=True)
        try:
            complete = self._policy.run(value, again, last=not self._accumulating)
            if complete:
                self._finish(value.detach())
        except BaseException as error:
            self._fail(error)
            raise
        return value.detach()

    def _fail(self, error: BaseException) -> None:
        waited = self._cycle.waiting
        if not self._cycle.idle:
            self._cycle.fail(f"its backward ended with {type(error).__name__}")
        self._policy.drop()
        self._placement.died()
        if self._cycle.torn is not None:
            error.add_note(f"{self._cycle.torn}; the optimizer refuses to go on until a checkpoint is loaded")
        elif waited:
            error.add_note(f"the {waited} micro-batch(es) before it were dropped with it; begin the step again")

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing is left to do: backward has updated the weights. Loops may call it as they always do.

        Raises:
            StepError: a closure was given.
        """
        if closure is not None:
            raise StepError("step(closure) is not available: updates happen in backward. Call opt.backward(loss).")
        self._cycle.stepped()

    def accept_torn_step(self) -> None:
        """Goes on with the weights as a dead backward left them: some of this step, some of the one before."""
        self._policy.drop()
        self._cycle.reset(self._cycle.step)

    @property
    def seed(self) -> int:
        """Of stochastic rounding."""
        return self._updates.seed

    @property
    def last_step(self) -> LastStep | None:
        """The report of the last step, None before the first one."""
        return self._outcome.last

    @property
    def clip_norm(self) -> float | None:
        """The norm over all gradients is at most this."""
        return self._clipping.norm

    @property
    def loss_scale(self) -> float | None:
        """What the next loss is multiplied with; None if there is no scaling."""
        value = self._clipping.scale.value
        return None if value is None else float(value)

    @property
    def nonfinite_gradients(self) -> int:
        """How many gradients with Inf or NaN were met since the optimizer was made."""
        return int(self._outcome.nonfinite)

    @property
    def compile_seconds(self) -> float:
        """How long compiling sweeps has taken in this process: in the first step, and where another kind of tensor came
        later. It is a third of that where PyTorch's cache on disk knows them.
        """
        return CompiledTile.seconds

    @property
    def nonfinite_steps(self) -> int:
        """How many steps met a gradient with Inf or NaN since the optimizer was made."""
        return int(self._outcome.nonfinite_steps)

    def _on_gradient(self, record: ParamRecord, _: Tensor) -> None:
        """The hook: the gradient of one parameter is complete."""
        if self._cycle.idle:
            self._policy.allow_plain_backward()
            self._outcome.settle()
            self._begin_rule()
        if self._cycle.fired(record.name):
            self._policy.drop()  # what a plain backward that died has left
            self._policy.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_plain)  # type: ignore[attr-defined]
        try:
            self._policy.take(record, self._placement.take(record.param))
        except UnsupportedError as error:
            raise UnsupportedError(f"parameter {record.name!r} {error}") from None

    def _begin_rule(self) -> None:
        self._choose_policy()  # a group's options may ask for another by now
        for group in self.param_groups:
            self.rule.begin(group, self._cycle.step + (not self._cycle.waiting))

    def _finish_plain(self) -> None:
        self._policy.flush()
        self._finish()

    def _finish(self, loss: Tensor | None = None) -> None:
        """Every backward of the step is over: closes it and leaves its report."""
        self._cycle.refuse_nothing()
        with torch.no_grad():
            self._policy.complete()
            self._placement.settle(self._records.values())
            self._cycle.end()
            self._outcome.close(self._records.values(), self._policy, self.replay, loss)
        self._opt_called = True  # LR schedulers ask whether an optimizer step came before theirs

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on but the weights: states by parameter name, groups, step, seed.

        Tensors are in their own dtype and logical shape: the live ones, or where ranks share parameters, gathered from
        all, so that every rank has to call it (`lowmem.hf.checkpoint.save_optimizer` gathers one at a time).

        Raises:
            StepError: in the middle of a step, or after one that was torn.
        """
        state: dict[str, dict[str, Any]] = {}
        described = self.described()
        for entry in self.entries():
            state.setdefault(entry.of, {})[entry.name] = entry.whole()
        return {**described, "state": state}

    def entries(self) -> Iterator[states.Entry]:
        """The states in `state_dict`, one at a time."""
        return states.entries(self._records.values(), self._updates, self._clipping)

    def described(self) -> dict[str, Any]:
        """What is in `state_dict` beside the states: numbers and words.

        Raises:
            StepError: as `state_dict` does.
        """
        self._outcome.settle()
        self._cycle.refuse_open("save")
        groups = [
            {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": group["param_names"]}
            for group in self.param_groups
        ]
        return {
            "rule": self.rule.name,
            "rounding": self.rounding,
            "seed": self._updates.seed,
            "step": self._cycle.step,
            "loss_scale": self._clipping.scale.state_dict(),
            "counts": self._outcome.state_dict(),
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from what `state_dict` gave. Tensors are copied to their parameter's device and never cast.

        Raises:
            CheckpointError: it is of another rule or rounding, or its parameters or groups are not this optimizer's.
        """
        states.refuse_others(state_dict, {"rule": self.rule.name, "rounding": self.rounding}, self.param_groups)
        self._clipping.scale.check_saved(state_dict.get("loss_scale"))
        states.restore(state_dict, self._records.values(), self._updates, self._clipping)
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved_group.items() if k != "params"})
        for record in self._records.values():
            if record.handle is not None:
                self._settle(record)
        self._clipping.scale.load_state_dict(state_dict.get("loss_scale"))
        self._updates.seed = state_dict["seed"]
        self._policy.drop()
        self._outcome.load_state_dict(state_dict.get("counts"))
        self._cycle.reset(state_dict["step"])


def _refuse_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise StepError(f"the loss is {what}; it must be a tensor of one element, as .mean() gives")
    if not loss.requires_grad:
        raise StepError("the loss has no graph: every parameter is frozen, or it was computed under no_grad")


def decide_compilation(wanted: bool | str, records: Collection[ParamRecord]) -> bool:
    """Whether to compile: as asked, or with "auto" where it pays.

    Raises:
        ConfigError: it is none of True, False and "auto", or True where there is no compiler.
    """
    if wanted not in (True, False, "auto"):
        raise ConfigError(f"compile={wanted!r}; allowed are True, False and 'auto'")
    if wanted is False:
        return False
    devices = {record.param.device.type for record in records}
    missing = next((device for device in devices if not has_compiler(device)), None)
    if missing is not None:
        if wanted is True:
            raise ConfigError(f"compile=True, but there is no compiler for {missing!r}; use compile=False")
        return False
    return wanted is True or sum(record.span.held for record in records if record.param.requires_grad) >= COMPILE_FROM


def has_compiler(device: str) -> bool:
    """Whether torch.compile has what it needs for a type of device."""
    if device == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return importlib.util.find_spec("triton") is not None
