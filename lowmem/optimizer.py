"""The fused optimizer: a `torch.optim.Optimizer` whose work happens in backward."""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from lowmem import placements, policies, rules
from lowmem.errors import CheckpointError, ConfigError, StepError, UnsupportedError, did_you_mean
from lowmem.last_step import LastStep
from lowmem.rounding import ROUNDINGS
from lowmem.rules import UpdateRule
from lowmem.scaling import static_scale
from lowmem.slots import Slot, listed
from lowmem.updates import RESIDUAL, Updates

# With fewer trainable elements the seconds that compilation takes are longer than what it saves.
COMPILE_FROM = 1 << 25

# Keys of a parameter group that torch, its learning-rate schedulers or the user put there beside hyperparameters.
_GROUP_KEYS = {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr"}


@dataclass(frozen=True)
class FusedConfig:
    """The settings of a `FusedOptimizer` but for parameters and learning rate, as trainers and YAML files hold them.

    `hyper` holds hyperparameters of the rule. Settings are checked when the config is made.

    Raises:
        ConfigError, UnsupportedError: as `FusedOptimizer` would.
    """

    rule: str = "adalomo"
    policy: str = "auto"
    clip_norm: float | None = None
    clip_value: float | None = None
    loss_scale: float | str | None = None
    rounding: str = "nearest"
    compile: str | bool = "auto"
    seed: int = 0
    batching: bool = True
    hyper: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.build([{"params": []}], lr=1e-3)

    def build(self, params: Iterable[Any], **hyper: Any) -> "FusedOptimizer":
        """The optimizer over `params`; `hyper` (lr, weight_decay, ...) gives way to this config's own `hyper`."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "hyper"}
        return FusedOptimizer(params, **settings, **{**hyper, **self.hyper})


class FusedOptimizer(torch.optim.Optimizer):
    """Updates every parameter during backward, the moment its gradient exists, and frees the gradient.

        opt = lowmem.FusedOptimizer(model.named_parameters(), rule="adalomo", lr=1e-3)
        for batch in loader:
            opt.backward(model(**batch).loss)
            scheduler.step()

    Plain `loss.backward()` does the same where there is no loss scale. `step()` and `zero_grad()` may be called.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts) of either, as `torch.optim` takes them. Frozen
            parameters cost nothing; one that is unfrozen later joins at the next `backward`.
        rule: a name (`lowmem.rules.table()`), an `UpdateRule`, a `torch.optim.Optimizer` class, or its import path.
        lr: learning rate; the rule's own default if None.
        policy: "immediate", or "auto" for the cheapest policy that is exact for what is asked.
        clip_norm: refused under "immediate".
        clip_value: gradients are clamped to ± this, after the loss scale is taken out and before the rule sees them.
        loss_scale: `backward` multiplies the loss with it and gradients are divided by it. A parameter whose gradient
            is not finite is left untouched.
        rounding: "nearest", "stochastic" or "compensated" (keeps 2 bytes a parameter): how a float32 result becomes a
            bfloat16 or float16 weight. float32 weights hold every result exactly.
        placement: "auto" or "local".
        compile: True, False, or "auto": compile the sweep where there is a compiler and enough to win.
        seed: of stochastic rounding.
        batching: small parameters of equal shape wait for each other and are updated as one stack, to the same bits.
        **hyper: hyperparameters of the rule, which a group may override.

    Attributes:
        last_step: `LastStep`, None before the first one.
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
        clip_value: float | None = None,
        loss_scale: float | str | None = None,
        rounding: str = "nearest",
        placement: str = "auto",
        compile: bool | str = "auto",
        seed: int = 0,
        batching: bool = True,
        **hyper: Any,
    ) -> None:
        self.rule = rules.resolve(rule)
        self.policy = policies.choose(policy, clip_norm=clip_norm)
        self.loss_scale = static_scale(loss_scale)
        self.clip_value = _positive("clip_value", clip_value)
        self.rounding = rounding
        self.last_step: LastStep | None = None
        if rounding not in ROUNDINGS:
            raise ConfigError(f"rounding {rounding!r} is unknown; known are {', '.join(ROUNDINGS)}")
        if compile not in (True, False, "auto"):
            raise ConfigError(f"compile={compile!r}; allowed are True, False and 'auto'")
        if not isinstance(batching, bool):
            raise ConfigError(f"batching={batching!r}; allowed are True and False")
        if self.loss_scale is not None and isinstance(self.rule, rules.ForeignRule):
            raise UnsupportedError(
                f"loss_scale={self.loss_scale:g} with {self.rule.name}: under policy 'immediate' an overflowing update "
                "must be left out parameter by parameter, which a foreign optimizer cannot do. Use a rule of lowmem, "
                "or train in bfloat16 without a loss scale."
            )
        if lr is not None:
            hyper["lr"] = lr
        self._check_names(hyper, "")
        self._cycle = policies.StepCycle()
        self._slots: dict[Tensor, Slot] = {}
        self._complete = False  # all the groups are here that it is made with
        self._nonfinite: Tensor | None = None  # a count that stays on the device
        groups = list(params)
        if not groups:
            raise ConfigError("no parameters were given")
        self._wanted_placement = placement
        try:
            super().__init__(groups, {**self.rule.defaults, **hyper})
            self._complete = True
            self._refuse_unknown_parameters()
            self.compiled = self._decide_compile(compile)
        except BaseException:
            self.remove()  # the hooks of the groups that were fine
            raise
        self._updates = Updates(
            self.rule,
            self.state,
            self._cycle,
            rounding=rounding,
            seed=seed,
            factor=None if self.loss_scale is None else 1.0 / self.loss_scale,
            limit=self.clip_value,
            batching=batching,
            compiled=self.compiled,
        )

    @property
    def seed(self) -> int:
        """Of stochastic rounding."""
        return self._updates.seed

    # -- parameters ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checks its hyperparameters and hooks its trainable parameters."""
        self._check_names(param_group, f"parameter group {len(self.param_groups)}: ")
        group = listed(param_group, first=len(self._slots))
        self._placement = placements.find(self._wanted_placement, group["params"])
        super().add_param_group(group)
        self.param_groups[-1].setdefault("param_names", [])  # torch leaves it out where there are no parameters
        slots: dict[Tensor, Slot] = {}
        try:
            slots = self._slots_of(self.param_groups[-1])
            for slot in slots.values():
                self._attach(slot)
            self._slots.update(slots)
            if self._complete:
                self._refuse_unknown_parameters()
        except BaseException:  # the group is added whole or not at all
            for param, slot in slots.items():
                slot.detach()
                self._slots.pop(param, None)
            self.param_groups.pop()
            raise

    def _slots_of(self, group: dict[str, Any]) -> dict[Tensor, Slot]:
        self.rule.check(group)
        policies.refuse_norm(self.policy, self.rule.needs_norm(group))
        taken = {slot.name for slot in self._slots.values()}
        slots: dict[Tensor, Slot] = {}
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if name in taken or param in slots:
                raise ConfigError(f"parameter {name!r} is given twice; each parameter and each name may stand once")
            taken.add(name)
            slots[param] = Slot(name, param, group)
        return slots

    def _attach(self, slot: Slot) -> None:
        """Hooks a parameter that wants a gradient and has no hook yet; one without elements has nothing to update."""
        param = slot.param
        if slot.handle is not None or not param.requires_grad or not param.numel():
            return
        self._settle(slot)
        slot.attach(self._on_gradient)

    def _settle(self, slot: Slot) -> None:
        """Decides how a parameter is updated, by what its group says now."""
        param = slot.param
        try:
            self.rule.admit(param, slot.group)
            slot.plan = self.rule.plan(slot.name, tuple(param.shape), slot.group)
            slot.layout = self._placement.layout(param, slot.plan.view)
        except UnsupportedError as error:
            raise UnsupportedError(f"parameter {slot.name!r} of shape {list(param.shape)} {error}") from None

    def remove(self) -> None:
        """Takes every hook away; the optimizer does nothing from here on."""
        for slot in self._slots.values():
            slot.detach()
        self._slots.clear()

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
        known = [slot.name for slot in self._slots.values()]
        for group in self.param_groups if known else []:
            for name in self.rule.names(group):
                if name not in known:
                    raise ConfigError(
                        f"rule {self.rule.name!r}: no parameter is called {name!r}.{did_you_mean(name, known)}"
                    )

    def _decide_compile(self, wanted: bool | str) -> bool:
        if wanted is False:
            return False
        devices = {slot.param.device.type for slot in self._slots.values()}
        missing = next((device for device in devices if not _has_compiler(device)), None)
        if missing is not None:
            if wanted is True:
                raise ConfigError(f"compile=True, but there is no compiler for {missing!r}; use compile=False")
            return False
        trainable = sum(slot.param.numel() for slot in self._slots.values() if slot.param.requires_grad)
        return wanted is True or trainable >= COMPILE_FROM

    # -- the step --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | Callable[[], Tensor]) -> Tensor:
        """Runs the backward of a scalar `loss`, or of what a callable returns, and updates every parameter in it.

        Returns:
            The loss, detached and without the loss scale.

        Raises:
            StepError: the loss is no scalar or has no graph, a gradient is left over in `.grad`, or the step life cycle
                is broken (a second backward, a hook that fires twice, a torn step).
        """
        if not isinstance(loss, Tensor):
            loss = loss()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise StepError(f"the loss is {what}; it must be a tensor of one element, as .mean() gives")
        if not loss.requires_grad:
            raise StepError("the loss has no graph: every parameter is frozen, or it was computed under no_grad")
        for slot in self._slots.values():
            self._attach(slot)  # it may have been frozen until now
            slot.refuse_leftover()
        self._begin_rule()
        self._cycle.begin(explicit=True)
        try:
            (loss if self.loss_scale is None else loss * self.loss_scale).backward()
        except BaseException as error:
            self._cycle.fail(f"its backward ended with {type(error).__name__}")
            self._updates.drop()
            if self._cycle.torn is not None:
                error.add_note(f"{self._cycle.torn}; the optimizer refuses to go on until a checkpoint is loaded")
            raise
        self._finish()
        return loss.detach()

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
        self._cycle.reset(self._cycle.step)

    @property
    def nonfinite_gradients(self) -> int:
        """How many gradients with Inf or NaN were met since the optimizer was made."""
        return 0 if self._nonfinite is None else int(self._nonfinite)

    def _on_gradient(self, slot: Slot, _: Tensor) -> None:
        """The hook: the gradient of one parameter is complete."""
        if self.loss_scale is not None and self._cycle.idle:
            raise StepError(f"with loss_scale={self.loss_scale:g} the loss must be scaled: call opt.backward(loss)")
        if self._cycle.idle:
            self._begin_rule()
        if self._cycle.fired(slot.name):
            self._updates.drop()  # what a plain backward that died has left
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]
        with torch.no_grad():
            try:
                self._updates.put(slot, self._placement.reduce(slot.param), self._placement)
            except UnsupportedError as error:
                raise UnsupportedError(f"parameter {slot.name!r} {error}") from None

    def _begin_rule(self) -> None:
        for group in self.param_groups:
            self.rule.begin(group, self._cycle.step + 1)

    def _finish(self) -> None:
        """Backward is over: closes the step and leaves its report."""
        self._cycle.end()
        with torch.no_grad():
            if self.rule.every_parameter:
                self._update_without_gradient()
            self._updates.flush()
        fired = [slot for slot in self._slots.values() if self._cycle.has_fired(slot.name)]
        squares = [cast(Tensor, slot.square_sum) for slot in fired]
        norms = torch.stack([s.to(squares[0].device) for s in squares]).sqrt()
        self.last_step = LastStep(
            self._cycle.step,
            self.policy,
            self.loss_scale,
            norms,
            tuple(slot.name for slot in fired),
            self._describe_measured(),
        )
        nonfinite = norms.isfinite().logical_not().sum()
        self._nonfinite = nonfinite if self._nonfinite is None else self._nonfinite + nonfinite
        self._opt_called = True  # LR schedulers ask whether an optimizer step came before theirs

    def _describe_measured(self) -> Callable[[], dict[str, float | str]]:
        """The rule's statistics of this step, worked out when they are asked for."""
        measured = [slot for slot in self._slots.values() if slot.measured]
        if not measured:
            return dict
        names, device = [slot.name for slot in measured], measured[0].param.device
        values = {
            name: torch.stack([slot.measured[name].to(device) for slot in measured]) for name in measured[0].measured
        }
        for slot in measured:
            slot.measured = {}
        return functools.partial(self.rule.statistics, names, values)

    def _update_without_gradient(self) -> None:
        for slot in self._slots.values():
            if slot.handle is not None and not self._cycle.has_fired(slot.name):
                zero = torch.zeros((), dtype=slot.param.dtype, device=slot.param.device)
                self._updates.put(slot, zero.expand_as(slot.param), self._placement)

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on but the weights: states by parameter name, groups, step, seed.

        Tensors are the live ones, in their own dtype.

        Raises:
            StepError: in the middle of a step, or after one that was torn.
        """
        self._cycle.refuse_open("save")
        state = {}
        for param, slot in self._slots.items():
            kept = dict(self.state.get(param, {}))
            if slot.residual is not None:
                kept[RESIDUAL] = slot.residual
            if kept:
                state[slot.name] = kept
        groups = [
            {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": group["param_names"]}
            for group in self.param_groups
        ]
        return {
            "rule": self.rule.name,
            "rounding": self.rounding,
            "seed": self._updates.seed,
            "step": self._cycle.step,
            "state": state,
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from what `state_dict` gave. Tensors are copied to their parameter's device and never cast.

        Raises:
            CheckpointError: it is of another rule or rounding, or its parameters or groups are not this optimizer's.
        """
        for key, own in (("rule", self.rule.name), ("rounding", self.rounding)):
            if state_dict.get(key) != own:
                raise CheckpointError(f"the saved optimizer has {key} {state_dict.get(key)!r}, this one {own!r}")
        saved_groups = state_dict["param_groups"]
        names = [group["param_names"] for group in self.param_groups]
        if [group["params"] for group in saved_groups] != names:
            saved, own_names = {n for g in saved_groups for n in g["params"]}, {n for g in names for n in g}
            odd = sorted(saved ^ own_names)
            raise CheckpointError(
                f"the saved optimizer has {len(saved_groups)} group(s) of {len(saved)} parameters, this one "
                f"{len(names)} of {len(own_names)}; " + (f"they differ in {odd[:5]}" if odd else "in another order")
            )
        slots = {slot.name: slot for slot in self._slots.values()}
        saved_of = {name: group for group in saved_groups for name in group["params"]}
        for name, kept in state_dict["state"].items():
            self._check_state(slots[name], kept, saved_of[name])
        self.state.clear()
        for slot in slots.values():
            slot.residual = None
        for name, kept in state_dict["state"].items():
            slot = slots[name]
            copied = {key: self._own_copy(key, value, slot) for key, value in kept.items()}
            slot.residual = copied.pop(RESIDUAL, None)
            self.state[slot.param] = copied
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: v for k, v in saved_group.items() if k != "params"})
        for slot in slots.values():
            if slot.handle is not None:
                self._settle(slot)
        self._updates.seed = state_dict["seed"]
        self._cycle.reset(state_dict["step"])

    def _check_state(self, slot: Slot, kept: Mapping[str, Any], saved_group: Mapping[str, Any]) -> None:
        have = {name: (tuple(t.shape), t.dtype) for name, t in kept.items() if isinstance(t, Tensor)}
        if isinstance(self.rule, rules.ForeignRule):  # only the class knows what else it keeps
            have = {name: kind for name, kind in have.items() if name == RESIDUAL}
        plan = self.rule.plan(slot.name, tuple(slot.param.shape), {**slot.group, **saved_group})
        want = self._updates.kept(plan, slot.param)
        if want != have:
            raise CheckpointError(
                f"the saved state of {slot.name!r} has {_listing(have)}, this optimizer's {_listing(want)}"
            )

    def _own_copy(self, key: str, value: Any, slot: Slot) -> Any:
        if not isinstance(value, Tensor):
            return value
        # torch.optim keeps its step counts on the host unless they take part in a kernel
        counts = isinstance(self.rule, rules.ForeignRule) and key.rpartition(".")[2] == "step"
        on_host = counts and not (slot.group.get("capturable") or slot.group.get("fused"))
        return value.detach().to("cpu" if on_host else slot.param.device, copy=True)


def _listing(states: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    parts = [f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in states.items()]
    return ", ".join(parts) or "none"


def _positive(option: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ConfigError(f"{option}={value!r} is not a number > 0; leave it out for no clipping")
    return value


def _has_compiler(device: str) -> bool:
    if device == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return importlib.util.find_spec("triton") is not None
