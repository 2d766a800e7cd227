"""An object of an optimizer class, which steps on one parameter of a group at a time."""

import copy
from collections import deque
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.rules.foreign_state import pack_state, unpack, unpack_state
from lowmem.rules.rule import ENGINE_KEYS, Hyper, State

# The key of our parameter group for numbers that a class counts with, other than hyperparameters.
COUNTS = "counts"

# Keys of our parameter groups that a class does not expect in its own.
_NOT_IN_GROUP = frozenset(("params", "param_names", COUNTS, *ENGINE_KEYS))

# Types of what a class counts with on itself. Values of other types stay as its last step left them.
_PLAIN = (Tensor, int, float, str, bool, type(None))


def refuse_combination(name: str, detail: str) -> NoReturn:
    """Raises `UnsupportedError` for the class `name`."""
    raise UnsupportedError(
        f"{name} combines parameters inside step() ({detail}), but a fused update sees one parameter at a time. If it "
        "clips by the norm over all gradients, disable that and set clip_norm, which is exact. Otherwise, use a class "
        "that treats each parameter separately, such as torch.optim.AdamW, or a rule of lowmem."
    )


class Instance:
    """An optimizer without parameters: it is given one for a step, with its state, and nothing of it stays.

    What it counts with apart from the states of parameters are its numbers. For every parameter of a step they are at
    first as they were when the step began; those that the step changes are put into our parameter group. So they change
    once in a step, as in one on all parameters.

    Attributes:
        eager: it makes the states of parameters when it is constructed.
        numbers: those of a new object.
        changes: those that this step has changed; None before its first update.

    Args:
        name: of the class.
        optimizer: a new object of it.
        arguments: those that it was made with. Settings that it has made from others, a limit from a rate, or a rate of
            its own for a group, are put into `hyper`.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, arguments: Hyper, hyper: Hyper) -> None:
        self._name, self.optimizer = name, optimizer
        self.eager = any(isinstance(key, Tensor) for key in optimizer.state)
        self.numbers = self._start = numbers_of(optimizer)
        plain = {key: value for key, value in self.numbers.items() if isinstance(value, int | float | str | tuple)}
        derived = {key: plain[key] for key in plain.keys() & arguments if plain[key] != arguments[key]}
        cast(dict[str, Any], hyper).update(derived)
        self._hidden = {key: _own(value) for key, value in self._hidden_of({**arguments, **derived}).items()}
        self.changes: dict[str, Any] | None = None
        self._release()

    def serves(self, arguments: Hyper) -> bool:
        """Returns whether a new object with these arguments would be the same, apart from what its parameter group
        shows.
        """
        return self._hidden == self._hidden_of(arguments)

    def _hidden_of(self, arguments: Hyper) -> dict[str, Any]:
        """Arguments that its parameter group does not show, and those for which it takes a value of its own."""
        return {key: value for key, value in arguments.items() if key not in self.numbers or value is None}

    def begin(self, hyper: Hyper) -> None:
        """A step begins with the settings and the counts of our group."""
        self._start, self.changes = {**self.numbers}, None
        for key, value in {**hyper, **hyper.get(COUNTS, {})}.items():
            old = self.numbers.get(key)
            if isinstance(old, Tensor) and isinstance(value, int | float):  # torchao has its rate as a tensor
                self._start[key] = torch.full_like(old, value)
            elif key not in _NOT_IN_GROUP and (value is not None or old is None):
                self._start[key] = unpack(value)

    def step(self, param: Tensor, state: State, hyper: Hyper) -> State:
        """Steps on a parameter with its packed state, and returns the new one."""
        optimizer, stored = self.optimizer, param.detach()
        start = {key: _own(value) for key, value in self._start.items()}
        before = {key: _comparable(value, self._start[key]) for key, value in start.items()}
        self._place(start)
        optimizer.param_groups[0]["params"] = [param]
        optimizer.state[param] = unpack_state(self._name, state)
        try:
            optimizer.step()
            now, values = numbers_of(optimizer), dict(optimizer.state[param])
        finally:
            self._release()
        if param.untyped_storage()._cdata != stored.untyped_storage()._cdata:
            stored.copy_(param.detach())  # it put new memory into param.data
        changes = {
            key: number_of(self._name, key, value)
            for key, value in now.items()
            if key not in before or _comparable(value, value) != before[key]
        }
        if self.changes is None:
            self.changes, group, counts = changes, cast(dict[str, Any], hyper), dict(hyper.get(COUNTS, {}))
            for key, number in changes.items():
                (group if key in group else counts)[key] = number
            group[COUNTS] = counts
        elif changes != self.changes:
            keys = [key for key in {**changes, **self.changes} if changes.get(key) != self.changes.get(key)]
            refuse_combination(self._name, f"{', '.join(keys)} would differ from parameter to parameter")
        return pack_state(self._name, values)

    def _place(self, numbers: dict[str, Any]) -> None:
        own, beside = vars(self.optimizer), cast(dict[Any, Any], self.optimizer.state)
        for key in [key for key, value in own.items() if type(value) in _PLAIN and f"self.{key}" not in numbers]:
            del own[key]
        (group,) = self.optimizer.param_groups
        for key, value in numbers.items():
            if key.startswith("self."):
                own[key.removeprefix("self.")] = value
            elif key.startswith("state."):
                beside[key.removeprefix("state.")] = value
            else:
                group[key] = value

    def _release(self) -> None:
        self.optimizer.state.clear()
        self.optimizer.param_groups = [{"params": []}]


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values in its parameter group and, with "self." and "state." in front of their names, those on itself and in
    its state apart from parameters.
    """
    return {
        **{key: value for key, value in optimizer.param_groups[0].items() if key != "params"},
        **{f"self.{key}": value for key, value in vars(optimizer).items() if type(value) in _PLAIN},
        **{f"state.{key}": value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
    }


def number_of(name: str, key: str, value: Any) -> Any:
    """A number that the class `name` counts with, as JSON.

    Raises:
        UnsupportedError: it is, or contains, a tensor of several elements or on a device, or cannot be saved.
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


def _own(value: Any) -> Any:
    """A copy of what the class or a user may write to."""
    if isinstance(value, Tensor):
        return value.clone() if value.numel() == 1 else value
    return copy.deepcopy(value) if isinstance(value, dict | list | deque) else value


def _comparable(value: Any, original: Any) -> Any:
    """`original`, of which `value` is a copy, or of a tensor what changes when it is written to, without reading it."""
    return (id(value), value._version) if isinstance(value, Tensor) else original
