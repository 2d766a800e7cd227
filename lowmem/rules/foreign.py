"""Any `torch.optim.Optimizer` subclass as a rule: it steps on one parameter at a time, as if there were no other."""

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowmem.errors import ConfigError, UnsupportedError, did_you_mean
from lowmem.rules.rule import ENGINE_KEYS, Hyper, ParamSpec, State, UpdateRule
from lowmem.tiles.layout import View
from lowmem.tiles.sweep import Sweep

# Types of states that are held as they are.
_PLAIN = (Tensor, int, float, str, bool, type(None))


def packed(owner: str, values: Mapping[str, Any]) -> State:
    """The state that the class `owner` keeps for a parameter, as tensors and JSON.

    Raises:
        UnsupportedError: a value that is not made of tensors, numbers, strings, lists, tuples and dicts.
    """
    state: State = {}
    try:
        for name, value in values.items():
            if type(value) in _PLAIN:
                state[name] = value
            elif (form := _pack(value, name, state)) != {"tensor": name}:
                state[name] = form
    except TypeError as error:
        raise UnsupportedError(f"{owner} keeps {error}, which cannot be saved. Use another optimizer.") from None
    return state


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `packed`."""
    values = dict(state)
    for name, value in state.items():
        if isinstance(value, dict | list):
            values[name] = _unpack(value, values)
    return values


def _pack(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    """`value` as JSON; the tensors in it go into `tensors`, under names that begin with `name`."""

    def pack_items(items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        return {key: _pack(item, f"{name}.{key}", tensors) for key, item in items}

    cls = type(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if cls in (Tensor, torch.nn.Parameter):
        tensors[name] = value
        return {"tensor": name}
    if cls is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if cls is list:
        return list(pack_items(enumerate(value)).values())
    if cls in (tuple, torch.Size):
        return {cls.__name__: _pack(list(value), name, tensors)}
    if cls is dict and all(isinstance(key, str) for key in value):
        return {"dict": pack_items(value.items())}
    if is_traceable_wrapper_subclass(value) and getattr(sys.modules[cls.__module__], cls.__name__, None) is cls:
        parts, context = value.__tensor_flatten__()
        return {
            "class": [cls.__module__, cls.__name__],
            "parts": pack_items((part, getattr(value, part)) for part in parts),
            "rest": _pack([context, value.shape, value.stride()], name, tensors),
        }
    raise TypeError(f"{name!r} as {cls.__name__}")


def _unpack(form: Any, tensors: dict[str, Any]) -> Any:
    """Undoes `_pack`; the tensors in the value are taken out of `tensors`."""
    match form:
        case list():
            return [_unpack(item, tensors) for item in form]
        case {"tensor": name}:
            return tensors.pop(name)
        case {"dtype": name}:
            return getattr(torch, name)
        case {"tuple": items}:
            return tuple(_unpack(items, tensors))
        case {"Size": items}:
            return torch.Size(items)
        case {"dict": items}:
            return {key: _unpack(item, tensors) for key, item in items.items()}
        case {"class": [module, name], "parts": parts, "rest": rest}:
            cls = getattr(sys.modules[module], name)  # its optimizer has imported it
            return cls.__tensor_unflatten__(_unpack({"dict": parts}, tensors), *_unpack(rest, tensors))
    return form


# Names of distributions that differ from the module that they install.
_DISTRIBUTIONS = {"lomo_optim": "lomo-optim", "optimi": "torch-optimi"}

# Keys of our parameter groups that a class does not expect in its own, and those that its constructor does not take.
_NOT_IN_GROUP = frozenset(("param_names", *ENGINE_KEYS))
_NO_ARGUMENTS = frozenset(("params", "name", "initial_lr", *_NOT_IN_GROUP))

# A class is tried on this many elements: optimizers with few bits per state have full ones for smaller parameters.
_TRIAL_SHAPE = (64, 64)

# Steps of the trial on shards, and the element where it cuts.
_SHARD_STEPS, _CUT = 3, 1500

# The state that holds what a class keeps in its parameter group, where that is allowed.
_GROUP = "group"


@dataclass(frozen=True, kw_only=True)
class ForeignSpec(ParamSpec):
    """The class makes its states itself at the first update. name: of the parameter, for messages."""

    name: str


class ForeignRule(UpdateRule):
    """Runs an optimizer class on one parameter at a time and holds its state for the parameter.

    `state[param]` may consist of tensors, numbers, strings, lists, tuples and dicts. Tensor subclasses, such as the
    low-bit states of torchao, are held as the tensors in them. What differs when parameters are updated one at a time
    is refused: a closure, sparse gradients, state in the parameter group or on the optimizer. Most of it shows in a
    trial on a small tensor. With a rounding other than `nearest` the class steps on a float32 copy of the parameter.

    Raises:
        UnsupportedError: the class cannot run fused; the message says why and names what can.
    """

    keeps = "what the class keeps"
    exactness = "the class's own step(), bit for bit"
    stackable = False
    can_be_skipped = False
    needs_dense_gradient = True

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        self.cls = cls
        self.name = self.source = f"{cls.__module__}.{cls.__qualname__}"  # type: ignore[misc]
        step = inspect.signature(cls.step).parameters
        first, *arguments = inspect.signature(cls).parameters.values()
        if "closure" in step and step["closure"].default is inspect.Parameter.empty:
            self._refuse(
                "needs a closure: it evaluates the loss several times per step, but a fused update happens inside one "
                "backward. Use a first-order optimizer, such as 'adalomo' or torch.optim.AdamW."
            )
        if cls is torch.optim.SparseAdam:
            dense = "torch.optim.AdamW with nn.Embedding(sparse=False)"
            self._refuse(f"takes sparse gradients only, and a fused update reads dense ones. Use {dense}.")
        if first.name == "model":
            other = "an optimizer that takes parameters, or a rule of lowmem, such as 'adalomo'"
            self._refuse(f"takes a whole model, to hook it itself. Use {other}.")
        if isinstance(inspect.getattr_static(cls, "param_groups", None), property):
            self._refuse("drives other optimizers, which would each see all parameters. Use the one that it drives.")
        self.open_ended = any(a.kind is a.VAR_KEYWORD for a in arguments)  # type: ignore[misc]
        # an argument without a default is known by its name; `check` refuses a group that does not set it
        self.defaults = {  # type: ignore[misc]
            a.name: a.default for a in arguments if a.kind not in (a.VAR_KEYWORD, a.VAR_POSITIONAL)
        }
        # optimi can step on one `param` alone, so what it keeps in the group can be kept for each parameter
        self._splits_group = "param" in step
        self._full: set[str] = set()  # states that have an element for each of their parameter's
        self._states_at_once = False  # the class makes its states when it is constructed, not in its first step
        # by the id of our group: an instance, and those of its arguments that its own group does not show
        self._instances: dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}

    def equals(self, other: UpdateRule) -> bool:
        return isinstance(other, ForeignRule) and self.cls is other.cls

    def check(self, hyper: Hyper) -> None:
        for key, value in hyper.items():
            if value is inspect.Parameter.empty:
                raise ConfigError(f"{self.name} has no default for {key!r}; set it")
        if hyper.get("gradient_release"):
            reason = "gradient_release=True registers hooks of its own, and lowmem frees gradients anyway"
            raise UnsupportedError(f"{self.name}: {reason}. Omit it.")

    def adopt(self, hyper: Hyper, sharded: bool) -> None:
        """By trial: steps on a small tensor, and where parameters are sharded also on two shards of one."""
        trial = torch.ones(_TRIAL_SHAPE, dtype=torch.float32, device="cpu").requires_grad_()
        trial.grad = torch.ones_like(trial)
        optimizer = self._construct(trial, hyper)
        for key, value in optimizer.param_groups[0].items():
            if value is not None and key in hyper and hyper[key] is None:
                reason = f"derives {key}={value!r} from its other settings where {key}=None"
                raise ConfigError(f"{self.name} {reason}, and may differ when a run is resumed. Set {key}.")
        self._refuse_state("beside its parameters", [str(key) for key in optimizer.state if key is not trial])
        self._states_at_once = bool(optimizer.state)
        try:
            with _isolated():
                if hasattr(optimizer, "train"):
                    optimizer.train()  # schedule-free optimizers step in training mode only
                state = self._step(optimizer, trial, packed(self.name, optimizer.state.get(trial, {})), hyper)
            self._full |= {name for name, value in state.items() if getattr(value, "shape", None) == trial.shape}
        except UnsupportedError:
            raise
        except Exception:  # a trial that fails shows nothing: the class may need a GPU, or another shape
            pass
        self._instances[id(hyper)] = self._instance(hyper)
        if sharded:
            self._try_shards(hyper)

    def _try_shards(self, hyper: Hyper) -> None:
        """Refuses a class whose steps on two shards of a matrix are not the shards of its steps on the matrix."""
        source = torch.Generator().manual_seed(0)
        start, *grads = (torch.randn(_TRIAL_SHAPE, generator=source) for _ in range(1 + _SHARD_STEPS))
        hyper = {**hyper, "lr": 1e-2} if "lr" in hyper else hyper

        def steps(part: slice | None) -> Tensor:
            param, *gradients = (t.clone() if part is None else t.flatten()[part].clone() for t in (start, *grads))
            optimizer = self._construct(param.requires_grad_(), hyper)
            state = packed(self.name, optimizer.state.get(param, {}))
            for param.grad in gradients:
                state = self._step(optimizer, param, state, hyper)
            return param.detach().flatten()

        try:
            with _isolated():
                full, shards = steps(None), [steps(slice(0, _CUT)), steps(slice(_CUT, None))]
            if torch.allclose(full, torch.cat(shards), rtol=1e-5, atol=1e-7):
                return
            reason = "updates them otherwise"
        except Exception as error:  # a class may raise anything
            reason = f"does not step on them: {error or type(error).__name__}"
        self._refuse(
            f"needs full matrices, and ranks hold flat shards of them ({reason}). It runs with placement 'local' and "
            "'replicated'; here use a rule of lowmem, such as 'adalomo', or an elementwise class: torch.optim.AdamW"
        )

    def is_full(self, state: str) -> bool:
        return state in self._full

    def rounding(self, hyper: Hyper, dtype: torch.dtype) -> str:
        return "nearest"  # by the class itself, without a float32 copy

    def admit(self, param: Tensor, hyper: Hyper) -> None:
        self._construct(param.detach().requires_grad_(), hyper)  # hooks of the class would stay on the parameter itself

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> ForeignSpec:
        return ForeignSpec(View.vector(len(shape)), name=name)

    def update(self, sweep: Sweep, spec: ForeignSpec, state: State, hyper: Hyper, step: int) -> None:
        with sweep.materialized() as param:
            # another instance when an argument changed that only the constructor reads
            optimizer, arguments = self._instances.get(id(hyper), (None, {}))
            if optimizer is None or any(hyper.get(key) != value for key, value in arguments.items()):
                optimizer, _ = self._instances[id(hyper)] = self._instance(hyper)
            try:
                if self._states_at_once and not state:
                    state.update(packed(self.name, self._construct(param, hyper).state[param]))
                new = self._step(optimizer, param, state, hyper)
            except UnsupportedError as error:
                raise UnsupportedError(f"parameter {spec.name!r}: {error}") from None
        state.clear()
        state.update(new)

    def _step(self, optimizer: torch.optim.Optimizer, param: Tensor, state: State, hyper: Hyper) -> State:
        """Steps on `param` with its packed state, and returns the new one."""
        values, stored, own_group = unpacked(state), param.detach(), optimizer.param_groups[0]
        split = values.pop(_GROUP, {}) if self._splits_group else {}
        settings = {key: _like(own_group.get(key), value) for key, value in hyper.items() if key not in _NOT_IN_GROUP}
        group = {**own_group, **settings, **split, "params": [param]}
        group_before, counters_before = _marked(group), _marked(_counters(optimizer))
        optimizer.state.clear()
        optimizer.state[param] = values
        optimizer.param_groups = [group]
        try:
            optimizer.step()
            beside = [str(key) for key in optimizer.state if key is not param]
            values = dict(optimizer.state[param])
        finally:
            optimizer.state.clear()
            optimizer.param_groups = [own_group]  # the other would keep the gradient alive
        if param.untyped_storage()._cdata != stored.untyped_storage()._cdata:  # it put new memory into param.data
            stored.copy_(param.detach())
        changed = _changed(group_before, group)
        if self._splits_group:
            values[_GROUP] = {key: group[key] for key in {**split, **dict.fromkeys(changed)}}
            changed = []
        self._refuse_state("in its parameter group", changed)
        self._refuse_state("on itself", _changed(counters_before, _counters(optimizer)))
        self._refuse_state("beside its parameters", beside)
        return packed(self.name, values)

    def _refuse_state(self, where: str, keys: list[str]) -> None:
        if keys:
            change = "which would change with every parameter instead of every step"
            self._refuse(f"keeps state {where} ({', '.join(keys)}), {change}. Use another optimizer.")

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedError(f"{self.name} {reason}")

    def _instance(self, hyper: Hyper) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """An instance for a parameter group, and its arguments that its own group does not show."""
        optimizer = self._construct(torch.zeros(_TRIAL_SHAPE, device="cpu").requires_grad_(), hyper)
        group = optimizer.param_groups[0]
        group["params"] = []
        return optimizer, {key: value for key, value in self._arguments(hyper).items() if key not in group}

    def _arguments(self, hyper: Hyper) -> dict[str, Any]:
        names = {*self.defaults, *(hyper.keys() - _NO_ARGUMENTS if self.open_ended else ())}
        return {key: value for key, value in hyper.items() if key in names}

    def _construct(self, param: Tensor, hyper: Hyper) -> torch.optim.Optimizer:
        try:
            return self.cls([param], **self._arguments(hyper))
        except Exception as error:  # a class may raise anything
            raise UnsupportedError(f"{self.name} does not accept this: {error or type(error).__name__}") from error


@contextmanager
def _isolated() -> Iterator[None]:
    """A trial leaves no trace, and compiles nothing: torchao's step would take seconds."""
    eager = torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=()), eager:
        yield


def _like(old: Any, value: Any) -> Any:
    """`value` as the class keeps it: torchao has the learning rate as a tensor, where schedulers set a number."""
    return torch.full_like(old, value) if isinstance(old, Tensor) and isinstance(value, int | float) else value


def _counters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer could count with. True and False mark rather that something is done."""
    return {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float, Tensor)) and not isinstance(v, bool)}


def _marked(values: Mapping[str, Any]) -> dict[str, tuple[Any, int]]:
    """Values, with how often those that are tensors have been written to."""
    return {key: (value, value._version if isinstance(value, Tensor) else 0) for key, value in values.items()}


def _changed(marked: Mapping[str, tuple[Any, int]], now: Mapping[str, Any]) -> list[str]:
    """Keys of values that are new, or replaced or written to since they were marked."""
    return [key for key in now if key not in marked] + [
        key
        for key, (value, version) in marked.items()
        if now.get(key) is not value or (isinstance(value, Tensor) and value._version != version)
    ]


def import_optimizer(path: str) -> type[torch.optim.Optimizer]:
    """The optimizer class at an import path such as `torch.optim.AdamW`.

    Raises:
        ConfigError: the module, the name in it, or an optimizer under that name does not exist.
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
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"rule {path!r} is {cls!r}, not a torch.optim.Optimizer class")
    return cls
