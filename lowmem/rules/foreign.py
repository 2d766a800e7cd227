"""Any `torch.optim.Optimizer` subclass as a rule. It updates each parameter separately."""

import importlib
import inspect
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lowmem.errors import ConfigError, UnsupportedError, did_you_mean
from lowmem.rules.foreign_instance import COUNTS, Instance, number_of, pack_state, raise_for_combination, snapshot
from lowmem.rules.foreign_trial import Grads, RecordedGroup, isolated, random_states, trial_inputs, trial_shapes
from lowmem.rules.rule import GROUP_KEYS, Hyper, ParamSpec, State, UpdateRule
from lowmem.tiles.layout import View
from lowmem.tiles.sweep import Sweep

logger = logging.getLogger(__name__)

# Modules whose distribution has a different name.
_DISTRIBUTIONS = {"lomo_optim": "lomo-optim", "optimi": "torch-optimi"}

# Keys of our parameter groups that are not passed to a constructor unless its signature names them.
_NO_ARGUMENTS = GROUP_KEYS | {COUNTS}

# The element of a matrix at which a trial cuts it into two shards.
_CUT = 1500


@dataclass(frozen=True, kw_only=True)
class ForeignSpec(ParamSpec):
    """Spec without states: the class creates them at the first update. hyper: the parameter's group, not a copy."""

    name: str
    hyper: Hyper = field(compare=False, repr=False)


class ForeignRule(UpdateRule):
    """Runs an optimizer class on one parameter at a time, and stores its state for each parameter.

    A state may consist of tensors, numbers, strings, containers of them and objects from the class's package. Tensor
    subclasses, such as the low-bit states of torchao, are stored as their inner tensors. Numbers in the class's
    parameter group, its attributes or its global state count steps and are stored in our parameter group.

    A trial on small tensors compares steps on all of them with steps on one at a time. It raises for classes that
    combine parameters or do not run. Except with rounding `nearest`, the class steps on a float32 copy of a parameter.

    Raises:
        ConfigError: the class does not read an option.
        UnsupportedError: the class cannot run fused. The message gives the reason and an alternative.
    """

    keeps = "the states of the class"
    exactness = "the class's own step(), bit for bit"
    elementwise = True  # `adopt` rejects a class that is not elementwise if parameters are sharded
    materializes = True

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        self.cls = cls
        self.name = self.source = f"{cls.__module__}.{cls.__qualname__}"  # type: ignore[misc]
        first, *arguments = inspect.signature(cls).parameters.values()
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            self._refuse(
                "needs a closure: it evaluates the loss several times per step, but a fused update happens inside one "
                "backward. Use a first-order optimizer, such as 'adalomo' or torch.optim.AdamW."
            )
        if first.name == "model":
            other = "an optimizer that takes parameters, or a rule of lowmem, such as 'adalomo'"
            self._refuse(f"takes a whole model to register hooks on it. Use {other}.")
        driven = any(a.name in ("optimizer", "base_optimizer") for a in (first, *arguments))
        if driven or isinstance(getattr(cls, "param_groups", None), property):
            self._refuse("wraps other optimizers, each of which would see all parameters. Use the wrapped optimizer.")
        self._open_ended = any(a.kind is a.VAR_KEYWORD for a in arguments)
        # arguments without a default are included; `check` raises for a group that does not set them
        self.defaults = {  # type: ignore[misc]
            a.name: a.default for a in arguments if a.kind not in (a.VAR_KEYWORD, a.VAR_POSITIONAL)
        }
        self._full: set[str] = set()  # names of states with the parameter's shape
        self._on_host: set[str] = set()  # names of states on the CPU while the parameter is on another device
        self._shape: tuple[int, ...] = (64, 64)  # a parameter shape that the constructor accepts
        self._counts = False  # whether the class has numbers that change
        self._instances: dict[int, Instance] = {}  # by the id of our group
        self._dtypes: dict[str, torch.dtype] = {}  # dtypes of parameters when they were first admitted

    def equals(self, other: UpdateRule) -> bool:
        return isinstance(other, ForeignRule) and self.cls is other.cls

    def takes(self, key: str, of_group: bool) -> bool:
        return of_group or self._open_ended or key in self.defaults  # a trial raises for options that are not read

    def check(self, hyper: Hyper) -> None:
        for key, value in hyper.items():
            if value is inspect.Parameter.empty:
                raise ConfigError(f"{self.name} has no default for {key!r}; set it")
        if hyper.get("gradient_release"):
            reason = "gradient_release=True registers its own hooks, and lowmem frees gradients anyway"
            raise UnsupportedError(f"{self.name}: {reason}. Omit it.")

    # -- the trial -------------------------------------------------------------------------------------------------

    def adopt(self, hyper: Hyper, sharded: bool) -> None:
        """Tries the class on the parameters' device. Settings that the class derives from others are set in `hyper`."""
        self._instances.pop(id(hyper), None)  # left by a deleted group with the same id
        params = [param for param in hyper["params"] if param.requires_grad]
        devices = [param.device for param in params if not (param.is_meta or is_fake(param))]
        device = devices[0] if devices else torch.device("cpu")
        rates = [{**hyper, "lr": 1e-2}, hyper] if "lr" in hyper else [hyper]  # a tiny learning rate hides differences
        failure = None
        for settings, shapes, omit in itertools.product(rates, trial_shapes(params, sharded), (True, False)):
            try:
                with isolated():
                    self._try(settings, *trial_inputs(shapes, omit, device), sharded)
                break
            except (ConfigError, UnsupportedError):
                raise
            except Exception as error:  # a class may raise anything
                failure = error
        else:
            raise UnsupportedError(f"{self.name} does not run: {failure or type(failure).__name__}") from failure
        instance = self._instances[id(hyper)] = self._new_instance(hyper)
        manager = getattr(instance.optimizer, "mng", None)  # bitsandbytes 0.50, optim/optimizer.py
        if manager is not None and (manager.index2config or manager.pid2config or manager.module_weight_config_triple):
            self._refuse(
                "has settings for individual parameters in this process (override_config, StableEmbedding), which it "
                "finds by their index. Put these parameters in a separate param group, with another rule or other "
                "settings."
            )
        if hasattr(self.cls, "eval") and len(self._instances) == 1:
            logger.warning("lowmem does not call %s.eval(): weights are evaluated and saved as in training", self.name)

    def _try(self, hyper: Hyper, starts: Sequence[Tensor], grads: Grads, sharded: bool) -> None:
        """Raises if steps on one parameter at a time differ from steps on all of them."""
        self._shape = tuple(starts[0].shape)
        params = [start.clone().requires_grad_() for start in starts]
        together = self._create(params, hyper, groups=1 + bool(self._instances))
        group = together.param_groups[0]
        before = random_states()
        for step in grads:
            torch.manual_seed(0)
            for param, grad in zip(params, step, strict=True):
                param.grad = None if grad is None else grad.clone()
            together.step()
        if random_states()[: len(before)] != before:
            self._refuse("draws random numbers from Python or NumPy once per step. Use another optimizer.")
        if isinstance(group, RecordedGroup) and (unread := self._extra(hyper).keys() - group.read):
            key = min(unread)
            raise ConfigError(f"{self.name} does not read {key!r}.{did_you_mean(key, self.defaults)} Omit it")
        alone, numbers, _ = self._one_at_a_time(hyper, starts, grads)
        now = snapshot(together)
        if any(number_of(self.name, key, now.get(key)) != number for key, number in numbers.items()) or not all(
            torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in zip(params, alone, strict=True)
        ):
            raise_for_combination(self.name, "steps on one parameter differ from steps on all of them")
        if sharded:
            self._try_shards(hyper, starts[-1], [step[-1] for step in grads if step[-1] is not None])

    def _try_shards(self, hyper: Hyper, start: Tensor, grads: Sequence[Tensor]) -> None:
        """Raises if steps on two shards of a matrix differ from steps on the matrix."""
        # SGDP of pytorch_optimizer differs where a gradient is nearly orthogonal to the rows
        along = (grads[0] * start).sum(-1, keepdim=True) / start.square().sum(-1, keepdim=True) * start
        grads = [grads[0] - along + 0.004 * start * (grads[0].norm() / start.norm()), *grads]
        try:
            (full,), _, (state,) = self._one_at_a_time(hyper, [start], [[grad] for grad in grads])
            # states of other sizes are not sharded, and trying long vectors may take minutes
            if all(v.numel() in (1, start.numel()) for v in state.values() if isinstance(v, Tensor)):
                parts, *cut = (tensor.flatten().tensor_split([_CUT]) for tensor in (start, *grads))
                shards, *_ = self._one_at_a_time(hyper, parts, [[*each] for each in cut])
                if torch.allclose(full.flatten(), torch.cat(shards), rtol=1e-5, atol=1e-7, equal_nan=True):
                    return
            reason = "updates them differently"
        except Exception as error:  # a class may raise anything
            reason = f"does not step on them: {error or type(error).__name__}"
        self._refuse(
            f"needs full matrices, but each rank has a flat shard ({reason}). It runs with placement 'local' and "
            "'replicated'. Here, use a rule of lowmem, such as 'adalomo', or an elementwise class, such as "
            "torch.optim.AdamW"
        )

    def _one_at_a_time(
        self, hyper: Hyper, starts: Sequence[Tensor], grads: Grads
    ) -> tuple[list[Tensor], dict[str, Any], list[State]]:
        """Steps as in training, and returns the weights, the numbers that changed, and the states."""
        params = [start.clone() for start in starts]
        states = [State() for _ in starts]
        group = {**hyper}
        changed = set[str]()
        instance = self._new_instance(group)
        for step in grads:
            torch.manual_seed(0)
            instance.begin(group)
            for n, grad in enumerate(step):
                if grad is not None:
                    param = params[n].detach().requires_grad_()
                    param.grad = grad.clone()
                    states[n] = self._step(instance, param, states[n], group)
            changed.update(instance.changes or ())
        for param, state in zip(params, states, strict=True):
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            self._full |= {key for key, value in tensors.items() if value.shape == param.shape}
            self._on_host |= {key for key, value in tensors.items() if value.is_cpu and not param.is_cpu}
        self._counts |= bool(changed)
        return params, {key: group[COUNTS].get(key, group.get(key)) for key in changed}, states

    # -- updates ---------------------------------------------------------------------------------------------------

    def unspecified_state(self, state: str, hyper: Hyper) -> Literal["full", "device", "host"]:
        # torch.optim stores step counts, and NAdam's mu_product, on the host unless a kernel reads them
        counts = state.rpartition(".")[2] == "step" or state in self._on_host
        if counts and not (hyper.get("capturable") or hyper.get("fused")):
            return "host"
        return "full" if state in self._full else "device"

    def rounding(self, hyper: Hyper, dtype: torch.dtype) -> str:
        return "nearest"  # the class updates the stored weight itself, without a float32 copy

    def admit(self, name: str, param: Tensor, hyper: Hyper) -> None:
        try:  # not on the parameter itself, where hooks of the class would stay registered
            self._create([param.detach().requires_grad_()], hyper)
        except Exception as error:  # a class may raise anything
            raise UnsupportedError(f"is not accepted by {self.name}: {error or type(error).__name__}") from error
        self._dtypes.setdefault(name, param.dtype)

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> ForeignSpec:
        return ForeignSpec(View.vector(len(shape)), name=name, hyper=hyper)

    def scalars(self, hyper: Hyper, step: int) -> dict[str, float]:
        instance = self._instances.get(id(hyper))
        if instance is None or not instance.serves(self._arguments(hyper)):
            instance = self._instances[id(hyper)] = self._new_instance(hyper)
        instance.begin(hyper)
        return {}  # the class has its own numbers

    def update(self, sweep: Sweep, spec: ForeignSpec, state: State) -> None:
        with sweep.materialized() as param:
            try:
                new = self._step(self._instances[id(spec.hyper)], param, state, spec.hyper, self._dtypes[spec.name])
            except UnsupportedError as error:
                raise UnsupportedError(f"parameter {spec.name!r}: {error}") from None
        state.clear()
        state.update(new)

    def end(self, hyper: Hyper) -> None:
        instance = self._instances[id(hyper)]
        if self._counts and instance.changes is None:  # no parameter of the group had a gradient
            instance.step(torch.zeros(self._shape).requires_grad_(), {}, hyper)

    def _step(
        self, instance: Instance, param: Tensor, state: State, hyper: Hyper, first: torch.dtype | None = None
    ) -> State:
        if not state and instance.eager:  # the class creates states in its constructor
            then = param.detach().to(first).requires_grad_()
            state = pack_state(self.name, self._create([then], hyper).state[then])
        return instance.step(param, state, hyper)

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedError(f"{self.name} {reason}")

    def _new_instance(self, hyper: Hyper) -> Instance:
        optimizer = self._create([torch.zeros(self._shape).requires_grad_()], hyper)
        return Instance(self.name, optimizer, self._arguments(hyper), hyper)

    def _extra(self, hyper: Hyper) -> dict[str, Any]:
        """Returns the keys of a parameter group that are not in the constructor's signature."""
        return {key: value for key, value in hyper.items() if key not in self.defaults and key not in _NO_ARGUMENTS}

    def _arguments(self, hyper: Hyper) -> dict[str, Any]:
        named = {key: value for key, value in hyper.items() if key in self.defaults}
        return {**named, **self._extra(hyper)} if self._open_ended else named

    def _create(self, params: list[Tensor], hyper: Hyper, groups: int = 1) -> torch.optim.Optimizer:
        """Returns a new object of the class, with the parameters in this number of groups."""
        extra = self._extra(hyper)
        recorded = [RecordedGroup({"params": params[n::groups], **extra}) for n in range(groups)]
        optimizer = self.cls(recorded if extra or groups > 1 else params, **self._arguments(hyper))
        if hasattr(optimizer, "train"):
            optimizer.train()  # schedule-free optimizers step in training mode only
        return optimizer


def import_optimizer(path: str) -> type[torch.optim.Optimizer | UpdateRule]:
    """Imports the class of an optimizer or rule from a path such as `torch.optim.AdamW`.

    Raises:
        ConfigError: the module or the class does not exist.
    """
    module_name, _, attribute = path.rpartition(".")
    package = module_name.partition(".")[0]
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a package that does not work here may raise anything
        reason = f"cannot import {module_name!r} ({error}); repair its package or correct the path"
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            distribution = _DISTRIBUTIONS.get(package, package)
            reason = f"{package} is not installed; pip install {distribution}, or correct the path"
        raise ConfigError(f"rule {path!r}: {reason}") from error
    cls = getattr(module, attribute, None)
    if cls is None:
        raise ConfigError(f"rule {path!r}: {module_name} has no {attribute!r}.{did_you_mean(attribute, dir(module))}")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer | UpdateRule)):
        raise ConfigError(f"rule {path!r} is {cls!r}, not a torch.optim.Optimizer class or an UpdateRule")
    return cls
