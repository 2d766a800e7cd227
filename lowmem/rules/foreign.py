"""Any `torch.optim.Optimizer` subclass as a rule: it steps on one parameter at a time, as if that were all there is."""

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowmem.errors import ConfigError, UnsupportedError, did_you_mean
from lowmem.rules.rule import ENGINE_KEYS, Hyper, ParamSpec, State, UpdateRule
from lowmem.tiles.layout import View
from lowmem.tiles.sweep import Sweep

# States that are held as they are.
_PLAIN = (Tensor, int, float, str, bool, type(None))


def packed(kept: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps for a parameter, as tensors and JSON; undone by `unpacked`.

    Raises:
        TypeError: it is neither made of tensors, numbers, strings, lists, tuples and dicts, nor a tensor subclass that
            can be taken apart.
    """
    state: dict[str, Any] = {}
    for name, value in kept.items():
        if type(value) in _PLAIN:
            state[name] = value
            continue
        form = _pack(value, name, state)
        if form != {"tensor": name}:
            state[name] = form
    return state


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `packed` was given."""
    kept = dict(state)
    for name, value in state.items():
        if isinstance(value, dict | list):
            kept[name] = _unpack(value, kept)
    return kept


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
    """The value that `_pack` was given; its tensors are taken out of `tensors`."""
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


# Distributions that are not called like the module they install.
_DISTRIBUTIONS = {"lomo_optim": "lomo-optim", "optimi": "torch-optimi"}

# Keys of a parameter group that are no arguments, even of a constructor that takes any.
_NO_ARGUMENTS = ("params", "param_names", "name", "initial_lr", *ENGINE_KEYS)

# A class is tried on this many elements: from here on low-bit optimizers keep theirs in few bits.
_TRIAL_SHAPE = (64, 64)

# Steps, and elements of the first part, of the trial whether a class treats each element by itself.
_PART_STEPS, _PART = 3, 1500

# The state that holds what a class keeps in its parameter group, where that is allowed.
_GROUP = "group"


class ForeignRule(UpdateRule):
    """Runs an optimizer class on each parameter in turn; what it keeps for the parameter is held and saved by us.

    The class may keep in `state[param]` what is made of tensors, numbers, strings, lists, tuples and dicts. Tensor
    subclasses, such as the low-bit states of torchao, are held as the tensors that they are made of. Refused is what
    would not be the same one parameter at a time: a closure, sparse gradients, state kept in the parameter group or on
    the optimizer. Most of it shows before the first update, when the class takes a step on a small tensor of our own.

    The class may need temporary memory of its own; with a rounding other than `nearest` it steps on a float32 copy of
    the one parameter.

    Raises:
        UnsupportedError: the class cannot run fused; the message says why and names what can.
    """

    keeps = "what the class keeps"
    exactness = "the class's own step(), bit for bit"
    stackable = False
    can_be_skipped = False

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        self.cls = cls
        self.name = self.source = f"{cls.__module__}.{cls.__qualname__}"  # type: ignore[misc]
        step = inspect.signature(cls.step).parameters
        if "closure" in step and step["closure"].default is inspect.Parameter.empty:
            raise UnsupportedError(
                f"{self.name} needs a closure: it evaluates the loss several times a step, but a fused update happens "
                "inside one backward. Use a first-order optimizer, such as 'adalomo' or torch.optim.AdamW."
            )
        if cls is torch.optim.SparseAdam:
            raise UnsupportedError(
                f"{self.name} takes sparse gradients only, and a fused update reads dense ones. "
                "Use torch.optim.AdamW with nn.Embedding(sparse=False)."
            )
        first, *arguments = inspect.signature(cls).parameters.values()
        if first.name == "model":
            raise UnsupportedError(
                f"{self.name} takes a whole model, to hook it itself. Use an optimizer that takes parameters, "
                "or a rule of lowmem, such as 'adalomo'."
            )
        if isinstance(inspect.getattr_static(cls, "param_groups", None), property):
            raise UnsupportedError(
                f"{self.name} drives other optimizers, which would each see all parameters. Use the one that it drives."
            )
        self.open_ended = any(  # type: ignore[misc]
            a.kind is inspect.Parameter.VAR_KEYWORD for a in arguments
        )
        # one without a default is known by name, and looked for in `check`
        self.defaults = {  # type: ignore[misc]
            a.name: a.default
            for a in arguments
            if a.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        }
        # optimi can step on one `param` alone, so what it keeps in the group may be kept for each parameter apart
        self._splits_group = "param" in step
        self._full: set[str] = set()  # states that have an element for each of their parameter's
        self._states_at_once = False  # the class makes its states when it is constructed, not in its first step
        # by the id of our group: an instance, and those of its arguments that its own group does not show
        self._made: dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}

    def check(self, hyper: Hyper) -> None:
        for key, value in hyper.items():
            if value is inspect.Parameter.empty:
                raise ConfigError(f"{self.name} has no default for {key!r}; set it")
        if hyper.get("gradient_release"):
            raise UnsupportedError(
                f"{self.name}: gradient_release=True registers hooks of its own, and lowmem frees gradients anyway. "
                "Leave it out."
            )

    def adopt(self, hyper: Hyper, sharded: bool) -> None:
        """By trial: takes a step on a small tensor, and where parameters are sharded also on two parts of one."""
        trial = torch.ones(_TRIAL_SHAPE, dtype=torch.float32, device="cpu").requires_grad_()
        trial.grad = torch.ones_like(trial)
        optimizer = self._construct(trial, hyper)
        for key, value in optimizer.param_groups[0].items():
            if value is not None and key in hyper and hyper[key] is None:
                raise ConfigError(
                    f"{self.name} derives {key}={value!r} from its other settings where {key}=None, and may derive "
                    f"something else when a run is resumed. Set {key}."
                )
        self._refuse_state("beside its parameters", [str(key) for key in optimizer.state if key is not trial])
        self._states_at_once = bool(optimizer.state)
        self._try(optimizer, trial, hyper)
        self._made[id(hyper)] = self._prepared(hyper)
        if sharded:
            self._try_parts(hyper)

    def _try_parts(self, hyper: Hyper) -> None:
        """Steps on two parts of a matrix have to be the parts of the steps on all of it."""
        source = torch.Generator().manual_seed(0)
        start, *grads = (torch.randn(_TRIAL_SHAPE, generator=source) for _ in range(1 + _PART_STEPS))
        moving = {**hyper, "lr": 1e-2} if "lr" in hyper else hyper
        cut = (slice(0, _PART), slice(_PART, None))
        try:
            with _isolated():
                full = self._steps(start.clone(), grads, moving).flatten()
                parts = [
                    self._steps(start.flatten()[part].clone(), [grad.flatten()[part] for grad in grads], moving)
                    for part in cut
                ]
            reason = None if torch.allclose(full, torch.cat(parts), rtol=1e-5, atol=1e-7) else "updates them otherwise"
        except Exception as error:  # a class may raise anything
            reason = f"does not step on them: {error or type(error).__name__}"
        if reason is not None:
            raise UnsupportedError(
                f"{self.name} needs full matrices, and ranks hold flat shards of them ({reason}). It runs with "
                "placement 'local' and 'replicated'; here use a rule of lowmem, such as 'adalomo', or a class that "
                "treats each element by itself, such as torch.optim.AdamW"
            )

    def _steps(self, param: Tensor, grads: Sequence[Tensor], hyper: Hyper) -> Tensor:
        """Where a class goes from `param`, given these gradients."""
        param.requires_grad_()
        made = self._construct(param, hyper)
        kept = dict(made.state.get(param, {}))
        for grad in grads:
            param.grad = grad
            kept = self._step(made, param, kept, hyper)
        return param.detach()

    def is_full(self, state: str, spec: Any) -> bool:
        return state in self._full

    def admit(self, param: Tensor, hyper: Hyper) -> None:
        self._construct(param.detach().requires_grad_(), hyper)  # hooks of the class would stay on the parameter itself

    def spec(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> ParamSpec:
        return ParamSpec(View.vector(len(shape)))  # states are made by the class itself at the first update

    def update(self, sweep: Sweep, spec: ParamSpec, state: State, hyper: Hyper, step: int) -> None:
        with sweep.materialized() as param:
            kept = unpacked(state)
            if self._states_at_once and not kept:
                kept = dict(self._construct(param, hyper).state[param])
            kept = self._held(self._step(self._optimizer(hyper), param, kept, hyper))
        state.clear()
        state.update(kept)

    def _step(self, made: torch.optim.Optimizer, param: Tensor, kept: dict[str, Any], hyper: Hyper) -> dict[str, Any]:
        """Lets `made` step on `param`, of which it has `kept` so far; returns what it keeps now."""
        own_group = made.param_groups[0]
        split = kept.pop(_GROUP, {}) if self._splits_group else {}
        given = {
            key: _like(own_group.get(key), value)
            for key, value in hyper.items()
            if key not in ("param_names", *ENGINE_KEYS)
        }
        group = {**own_group, **given, **split, "params": [param]}
        stored = param.detach()
        before_group, before_self = _marked(group), _marked(_counters(made))
        made.state.clear()
        made.state[param] = kept
        made.param_groups = [group]
        try:
            made.step()
            beside = [str(key) for key in made.state if key is not param]
            kept = dict(made.state[param])
        finally:
            made.state.clear()
            made.param_groups = [own_group]  # the other would keep the gradient alive
        if param.untyped_storage()._cdata != stored.untyped_storage()._cdata:  # it put new memory into param.data
            stored.copy_(param.detach())
        changed = _changed(before_group, group)
        if self._splits_group:
            kept[_GROUP] = {key: group[key] for key in {**split, **dict.fromkeys(changed)}}
            changed = []
        self._refuse_state("in its parameter group", changed)
        self._refuse_state("on itself", _changed(before_self, _counters(made)))
        self._refuse_state("beside its parameters", beside)
        return kept

    def _held(self, kept: Mapping[str, Any]) -> State:
        try:
            return packed(kept)
        except TypeError as error:
            raise UnsupportedError(f"{self.name} keeps {error}, which cannot be saved. Use another.") from None

    def _refuse_state(self, where: str, keys: list[str]) -> None:
        if keys:
            raise UnsupportedError(
                f"{self.name} keeps state {where} ({', '.join(keys)}), which would change with every parameter "
                "instead of every step. Use another optimizer."
            )

    def _try(self, made: torch.optim.Optimizer, trial: Tensor, hyper: Hyper) -> None:
        """Refuses what shows in a first step. One that fails shows nothing: it may need a GPU, or another shape."""
        with _isolated():
            try:
                if hasattr(made, "train"):
                    made.train()  # as schedule-free ones ask for
                kept = self._held(self._step(made, trial, dict(made.state.get(trial, {})), hyper))
                self._full |= {name for name, value in kept.items() if getattr(value, "shape", None) == trial.shape}
            except UnsupportedError:
                raise
            except Exception:
                return

    def _optimizer(self, hyper: Hyper) -> torch.optim.Optimizer:
        """The instance for a parameter group; another one when an argument changed that only the constructor reads."""
        made, read = self._made.get(id(hyper), (None, {}))
        if made is None or any(hyper.get(key) != value for key, value in read.items()):
            made, read = self._made[id(hyper)] = self._prepared(hyper)
        return made

    def _prepared(self, hyper: Hyper) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        made = self._construct(torch.zeros(_TRIAL_SHAPE, device="cpu").requires_grad_(), hyper)
        group = made.param_groups[0]
        group["params"] = []
        return made, {key: value for key, value in self._arguments(hyper).items() if key not in group}

    def _arguments(self, hyper: Hyper) -> dict[str, Any]:
        return {
            key: value
            for key, value in hyper.items()
            if key in self.defaults or (self.open_ended and key not in _NO_ARGUMENTS)
        }

    def _construct(self, param: Tensor, hyper: Hyper) -> torch.optim.Optimizer:
        try:
            return self.cls([param], **self._arguments(hyper))
        except Exception as error:  # whatever the class thinks fit
            raise UnsupportedError(f"{self.name} does not accept this: {error or type(error).__name__}") from error


@contextmanager
def _isolated() -> Iterator[None]:
    """A trial leaves no trace, and compiles nothing: torchao's step would take seconds."""
    eager = torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=()), eager:
        yield


def _like(own: Any, value: Any) -> Any:
    """`value` as the class keeps it: torchao has the learning rate as a tensor, where schedulers set a number."""
    return torch.full_like(own, value) if isinstance(own, Tensor) and isinstance(value, int | float) else value


def _counters(made: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer could count with. True and False are rather notes that something is done."""
    return {k: v for k, v in vars(made).items() if isinstance(v, (int, float, Tensor)) and not isinstance(v, bool)}


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
    except Exception as error:  # a package that does not fit its surroundings raises what it likes
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ConfigError(
                f"rule {path!r}: {package} is not installed; pip install {_DISTRIBUTIONS.get(package, package)}, "
                "or mend the path"
            ) from error
        raise ConfigError(
            f"rule {path!r}: cannot import {module_name!r} ({error}); mend its package or the path"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"rule {path!r}: {module_name} has no {attribute!r}.{did_you_mean(attribute, dir(module))}")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"rule {path!r} is {found!r}, not a torch.optim.Optimizer class")
    return found
