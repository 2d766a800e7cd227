"""An instance of an optimizer class that steps on one parameter of a group at a time.

`pack_state` converts the state of a parameter to tensors and JSON.
"""

import copy
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lowmem.errors import CheckpointError, UnsupportedError
from lowmem.rules.rule import ENGINE_KEYS, Hyper, State

# The key of our parameter group for a class's step counts and similar numbers that are not hyperparameters.
COUNTS = "counts"

# Keys of our parameter groups that are not copied into the groups of a class.
_NOT_IN_GROUP = frozenset(("params", "param_names", COUNTS, *ENGINE_KEYS))

# Types of attributes that may count steps. Attributes of other types are not reset between parameters.
_PLAIN = (Tensor, int, float, str, bool, type(None))


def raise_for_combination(name: str, detail: str) -> NoReturn:
    """Raises `UnsupportedError` for the class `name`."""
    raise UnsupportedError(
        f"{name} combines parameters inside step() ({detail}), but a fused update sees one parameter at a time. If it "
        "clips by the norm over all gradients, disable that and set clip_norm, which is exact. Otherwise, use a class "
        "that treats each parameter separately, such as torch.optim.AdamW, or a rule of lowmem."
    )


class Instance:
    """An optimizer without parameters. Each update gives it one parameter with its state, and then removes both.

    Values outside the states of parameters, such as step counts, are called numbers. Before each parameter, they are
    reset to their values at the start of the step. Changed numbers are written to our parameter group, so they change
    once per step, as in a step on all parameters.

    Attributes:
        eager: whether the class creates the states of parameters in its constructor.
        numbers: the numbers of a new instance.
        changes: numbers that this step has changed; None before its first update.

    Args:
        name: the name of the class.
        optimizer: a new instance.
        arguments: arguments of its constructor. Settings that it derives from them are written to `hyper`.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, arguments: Hyper, hyper: Hyper) -> None:
        self._name = name
        self.optimizer = optimizer
        self.eager = any(isinstance(key, Tensor) for key in optimizer.state)
        self.numbers = self._start = snapshot(optimizer)
        plain = {key: value for key, value in self.numbers.items() if isinstance(value, int | float | str | tuple)}
        derived = {key: plain[key] for key in plain.keys() & arguments if plain[key] != arguments[key]}
        cast(dict[str, Any], hyper).update(derived)
        self._hidden = {key: _copied(value) for key, value in self._hidden_of({**arguments, **derived}).items()}
        self.changes: dict[str, Any] | None = None
        self._release()

    def serves(self, arguments: Hyper) -> bool:
        """Returns whether a new instance with these arguments would differ only in its parameter group."""
        return self._hidden == self._hidden_of(arguments)

    def _hidden_of(self, arguments: Hyper) -> dict[str, Any]:
        """Returns the arguments that are not in the parameter group, or that are None and replaced by a default."""
        return {key: value for key, value in arguments.items() if key not in self.numbers or value is None}

    def begin(self, hyper: Hyper) -> None:
        """Starts a step with the settings and counts of our parameter group."""
        self._start = {**self.numbers}
        self.changes = None
        for key, value in {**hyper, **hyper.get(COUNTS, {})}.items():
            old = self.numbers.get(key)
            if isinstance(old, Tensor) and isinstance(value, int | float):  # torchao's learning rate is a tensor
                self._start[key] = torch.full_like(old, value)
            elif key not in _NOT_IN_GROUP and (value is not None or old is None):
                self._start[key] = unpack(value)

    def step(self, param: Tensor, state: State, hyper: Hyper) -> State:
        """Steps on a parameter with its packed state, and returns the new packed state."""
        optimizer = self.optimizer
        stored = param.detach()
        start = {key: _copied(value) for key, value in self._start.items()}  # alive until `now` is compared by id
        before = {key: _comparable(value, self._start[key]) for key, value in start.items()}
        restore(optimizer, start)
        optimizer.param_groups[0]["params"] = [param]
        optimizer.state[param] = unpack_state(self._name, state)
        try:
            optimizer.step()
            now = snapshot(optimizer)
            values = dict(optimizer.state[param])
        finally:
            self._release()
        if param.untyped_storage()._cdata != stored.untyped_storage()._cdata:
            stored.copy_(param.detach())  # the class assigned a new tensor to param.data
        changed = [key for key, value in now.items() if key not in before or _comparable(value, value) != before[key]]
        changes = {key: number_of(self._name, key, now[key]) for key in changed}
        if self.changes is None:
            self.changes = changes
            group = cast(dict[str, Any], hyper)
            counts = dict(hyper.get(COUNTS, {}))
            for key, number in changes.items():
                (group if key in group else counts)[key] = number
            group[COUNTS] = counts
        elif changes != self.changes:
            keys = [key for key in {**changes, **self.changes} if changes.get(key) != self.changes.get(key)]
            raise_for_combination(self._name, f"{', '.join(keys)} would differ from parameter to parameter")
        return pack_state(self._name, values)

    def _release(self) -> None:
        self.optimizer.state.clear()
        self.optimizer.param_groups = [{"params": []}]


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the values in the parameter group, the attributes (with the prefix "self.") and the values in the state
    that do not belong to a parameter (with the prefix "state.").
    """
    return {
        **{key: value for key, value in optimizer.param_groups[0].items() if key != "params"},
        **{f"self.{key}": value for key, value in vars(optimizer).items() if type(value) in _PLAIN},
        **{f"state.{key}": value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
    }


def restore(optimizer: torch.optim.Optimizer, numbers: dict[str, Any]) -> None:
    """Restores the values of a snapshot, and deletes attributes that are not in it."""
    own = vars(optimizer)
    extra_state = cast(dict[Any, Any], optimizer.state)
    (group,) = optimizer.param_groups
    for key in [key for key, value in own.items() if type(value) in _PLAIN and f"self.{key}" not in numbers]:
        del own[key]
    for key, value in numbers.items():
        if key.startswith("self."):
            own[key.removeprefix("self.")] = value
        elif key.startswith("state."):
            extra_state[key.removeprefix("state.")] = value
        else:
            group[key] = value


def number_of(name: str, key: str, value: Any) -> Any:
    """Converts a number of the class `name` to JSON.

    Raises:
        UnsupportedError: it contains a tensor on a device or with several elements, or it cannot be saved.
    """
    form = pack_state(name, {key: value})
    number = form.pop(key)
    if isinstance(number, Tensor) and number.is_cpu and number.numel() == 1:
        return {"values": number.tolist(), "dtype": str(number.dtype).removeprefix("torch.")}
    if form or isinstance(number, Tensor):
        raise UnsupportedError(
            f"{name} stores a tensor, {key!r}, outside the states of its parameters. Use another optimizer."
        )
    return number


def _copied(value: Any) -> Any:
    """Returns a copy of a value that the class or a user may modify."""
    if isinstance(value, Tensor):
        return value.clone() if value.numel() == 1 else value
    return copy.deepcopy(value) if isinstance(value, dict | list | deque) else value


def _comparable(value: Any, original: Any) -> Any:
    """Returns a value that differs after `value`, a copy of `original`, is modified. Tensors are not read."""
    return (id(value), value._version) if isinstance(value, Tensor) else original


def pack_state(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a parameter's state from the class `owner` to tensors and JSON.

    Raises:
        UnsupportedError: a value contains more than tensors, numbers, strings, containers and objects of the package.
    """
    state: dict[str, Any] = {}
    try:
        for name, value in values.items():
            if (form := _pack(value, name, state, _package(owner))) != {"tensor": name}:
                state[name] = form
    except TypeError as error:
        raise UnsupportedError(f"{owner} stores {error}, which cannot be saved. Use another optimizer.") from None
    return state


def unpack_state(owner: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `pack_state`."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    forms = {name: form for name, form in state.items() if name not in tensors}
    return {**{name: unpack(form, tensors, _package(owner)) for name, form in forms.items()}, **tensors}


def _package(name: str) -> str:
    return name.partition(".")[0]


def _pack(value: Any, name: str, tensors: dict[str, Any], package: str) -> Any:
    """Converts `value` to JSON, and adds its tensors to `tensors` under names that begin with `name`."""

    def pack(key: Any, item: Any) -> Any:
        return _pack(item, f"{name}.{key}", tensors, package)

    cls = type(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if cls in (Tensor, torch.nn.Parameter) or is_fake(value):
        tensors[name] = value
        return {"tensor": name}
    if cls in (torch.dtype, torch.device):
        return {cls.__name__: str(value).removeprefix("torch.")}
    if cls is list:
        return [pack(key, item) for key, item in enumerate(value)]
    if cls in (tuple, torch.Size):
        return {cls.__name__: _pack(list(value), name, tensors, package)}
    if cls is deque:
        return {"deque": _pack(list(value), name, tensors, package), "maxlen": value.maxlen}
    if cls is dict and all(isinstance(key, str | int | float) for key in value):
        return {"dict": [[key, pack(key, item)] for key, item in value.items()]}
    if getattr(sys.modules[cls.__module__], cls.__name__, None) is cls:
        where = [cls.__module__, cls.__name__]
        if hasattr(cls, "__tensor_flatten__"):
            parts, context = value.__tensor_flatten__()
            rest = _pack([context, value.shape, value.stride()], name, tensors, package)
            return {"class": where, "parts": [[part, pack(part, getattr(value, part))] for part in parts], "rest": rest}
        if _package(cls.__module__) == package and hasattr(value, "__dict__") and not isinstance(value, Tensor):
            return {"object": where, "vars": [[key, pack(key, item)] for key, item in vars(value).items()]}
    raise TypeError(f"{name!r} as {cls.__name__}")


def unpack(form: Any, tensors: dict[str, Any] | None = None, package: str = "") -> Any:
    """Undoes `pack_state` for one value, and removes its tensors from `tensors`."""
    tensors = {} if tensors is None else tensors

    def items(pairs: Any) -> dict[Any, Any]:
        return {key: unpack(item, tensors, package) for key, item in pairs}

    match form:
        case list():
            return [unpack(item, tensors, package) for item in form]
        case {"values": values, "dtype": name}:
            return torch.tensor(values, dtype=getattr(torch, name), device="cpu")
        case {"tensor": name}:
            return tensors.pop(name)
        case {"dtype": name}:
            return getattr(torch, name)
        case {"device": name}:
            return torch.device(name)
        case {"tuple": values}:
            return tuple(unpack(values, tensors, package))
        case {"Size": values}:
            return torch.Size(unpack(values, tensors, package))
        case {"deque": values, "maxlen": maxlen}:
            return deque(unpack(values, tensors, package), maxlen)
        case {"dict": pairs}:
            return items(pairs)
        case {"class": [module, name], "parts": parts, "rest": rest}:
            cls: Any = getattr(sys.modules.get(module), name, None)  # the optimizer has already imported the module
            unflatten = getattr(cls, "__tensor_unflatten__", None)
            if unflatten is None or not issubclass(cls, Tensor):
                raise CheckpointError(f"the saved state has an object of {module}.{name}, which is not a tensor class")
            return unflatten(items(parts), *unpack(rest, tensors, package))
        case {"object": [module, name], "vars": pairs} if _package(module) == package:
            value = object.__new__(getattr(sys.modules[module], name))
            vars(value).update(items(pairs))
            return value
    return form
