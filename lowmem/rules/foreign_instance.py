"""An object of an optimizer class, which steps on one parameter of a group at a time."""

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.rules.foreign_state import PLAIN, pack_state, unpack, unpack_state
from lowmem.rules.rule import ENGINE_KEYS, Hyper, State

# The key of our parameter group for numbers that a class counts with, other than hyperparameters.
COUNTS = "counts"

# Keys of our parameter groups that a class does not expect in its own.
_NOT_IN_GROUP = frozenset(("params", "param_names", COUNTS, *ENGINE_KEYS))


def refuse_combination(name: str, detail: str) -> NoReturn:
    """Raises `UnsupportedError` for the class `name`."""
    raise UnsupportedError(
        f"{name} combines parameters inside step() ({detail}), and a fused update sees one at a time. Where it clips "
        "by the norm over all gradients, switch that off and set clip_norm, which is exact; else use a class that "
        "treats each parameter by itself, such as torch.optim.AdamW, or a rule of lowmem."
    )


class Instance:
    """An optimizer, and what it counts with apart from the states of parameters: its numbers.

    They are values in its parameter group and, under names that begin with "self." and "state.", those on itself and in
    its state apart from parameters. For every parameter of a step they are at first as they were when the step began;
    those that the step changes are put into our parameter group. So they change once in a step, as in one on all
    parameters.

    Attributes:
        eager: it makes the states of parameters when it is constructed.
        numbers: those of a new object.
        changes: those that this step has changed; None before its first update.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        if hasattr(optimizer, "train"):
            optimizer.train()  # schedule-free optimizers step in training mode only
        self.optimizer = optimizer
        self.eager = any(isinstance(key, Tensor) for key in optimizer.state)
        self.numbers = self._start = self.now()
        self.changes: dict[str, Any] | None = None
        self._name = name

    def now(self) -> dict[str, Any]:
        """The numbers as they are."""
        group, own = self.optimizer.param_groups[0], vars(self.optimizer)
        return {
            **{key: value for key, value in group.items() if key != "params"},
            **{f"self.{key}": value for key, value in own.items() if type(value) in PLAIN},
            **{f"state.{key}": value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)},
        }

    def derived(self, hyper: Hyper) -> dict[str, Any]:
        """Settings of which the class has made other ones: a limit from a rate, or a rate of its own for a group."""
        values = {key: value for key, value in self.numbers.items() if isinstance(value, int | float | str | tuple)}
        return {key: value for key, value in values.items() if key in hyper and value != hyper[key]}

    def begin(self, hyper: Hyper) -> None:
        """A step begins with the settings and the counts of our group."""
        settings = {key: value for key, value in {**hyper, **hyper.get(COUNTS, {})}.items() if key not in _NOT_IN_GROUP}
        self._start = {**self.numbers}
        for key, value in settings.items():
            if value is not None or self.numbers.get(key) is None:
                self._start[key] = _like(self.numbers.get(key), value)
        self.changes = None

    def step(self, param: Tensor | None, state: State, hyper: Hyper) -> State:
        """Steps on a parameter with its packed state, and returns the new one; or counts a step without gradients."""
        optimizer, start = self.optimizer, self._place(param)
        stored = None if param is None else param.detach()
        if param is not None:
            optimizer.state[param] = unpack_state(self._name, state)
        versions = {key: value._version for key, value in start.items() if isinstance(value, Tensor)}
        try:
            optimizer.step()
            now, values = self.now(), {} if param is None else dict(optimizer.state[param])
        finally:
            self.release()
        if (
            stored is not None
            and param is not None
            and param.untyped_storage()._cdata != stored.untyped_storage()._cdata
        ):
            stored.copy_(param.detach())  # it put new memory into param.data
        changes = {
            key: number_of(self._name, key, value)
            for key, value in now.items()
            if key not in start
            or value is not start[key]
            or (key in versions and value._version != versions[key])
            or (isinstance(value, dict | list | deque) and value != self._start[key])
        }
        if self.changes is None:
            self.changes = changes
            group = cast(dict[str, Any], hyper)
            group.update({key: number for key, number in changes.items() if key in hyper})
            group[COUNTS] = {**group.get(COUNTS, {}), **{key: n for key, n in changes.items() if key not in hyper}}
        elif changes != self.changes:
            keys = [key for key in {**changes, **self.changes} if changes.get(key) != self.changes.get(key)]
            refuse_combination(self._name, f"{', '.join(keys)} would differ from parameter to parameter")
        return pack_state(self._name, values)

    def _place(self, param: Tensor | None) -> Mapping[str, Any]:
        """Puts a parameter, or none, and the numbers with which the step began into place; returns the numbers."""
        start = {key: _own(value) for key, value in self._start.items()}
        own = vars(self.optimizer)
        for key in [key for key, value in own.items() if type(value) in PLAIN and f"self.{key}" not in start]:
            del own[key]
        beside, group = cast(dict[Any, Any], self.optimizer.state), {"params": [] if param is None else [param]}
        for key, value in start.items():
            if key.startswith("self."):
                own[key.removeprefix("self.")] = value
            elif key.startswith("state."):
                beside[key.removeprefix("state.")] = value
            else:
                group[key] = value
        self.optimizer.param_groups = [group]
        return start

    def release(self) -> None:
        """Lets go of parameters and their gradients."""
        self.optimizer.state.clear()
        self.optimizer.param_groups = [{"params": []}]


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
        raise UnsupportedError(f"{name} keeps a tensor, {key!r}, apart from the states of parameters. Use another one.")
    return number


def _own(value: Any) -> Any:
    """A copy of what the class may write to."""
    if isinstance(value, Tensor):
        return value.clone() if value.numel() == 1 else value
    return copy.deepcopy(value) if isinstance(value, dict | list | deque) else value


def _like(old: Any, value: Any) -> Any:
    """`value` as the class keeps it: torchao has the learning rate as a tensor, where schedulers set a number."""
    if isinstance(value, dict) and value.keys() == {"values", "dtype"}:
        return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
    return torch.full_like(old, value) if isinstance(old, Tensor) and isinstance(value, int | float) else unpack(value)
