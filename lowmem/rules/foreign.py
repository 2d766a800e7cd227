"""Any `torch.optim.Optimizer` subclass as a rule: it steps on one parameter at a time, as if that were all there is."""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import ConfigError, UnsupportedError, did_you_mean
from lowmem.layout import View
from lowmem.rules.rule import Hyper, Plan, State, UpdateRule
from lowmem.sweep import Sweep


class ForeignRule(UpdateRule):
    """Runs an optimizer class on each parameter in turn; what it keeps for the parameter is held and saved by us.

    The class may keep whatever it likes in `state[param]`. Refused is what would not be the same one parameter at a
    time: a closure, sparse gradients, state kept in the parameter group. The class may need temporary memory of its
    own; with a rounding other than `nearest` it steps on a float32 copy of the one parameter.

    Raises:
        UnsupportedError: the class cannot run fused; the message says why and names what can.
    """

    keeps = "what the class keeps"
    stackable = False

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        self.cls = cls
        self.name = self.source = f"{cls.__module__}.{cls.__qualname__}"  # type: ignore[misc]
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedError(
                f"{self.name} needs a closure: it evaluates the loss several times a step, but a fused update happens "
                "inside one backward. Use a first-order optimizer, such as 'adalomo' or torch.optim.AdamW."
            )
        if cls is torch.optim.SparseAdam:
            raise UnsupportedError(
                f"{self.name} takes sparse gradients only, and a fused update reads dense ones. "
                "Use torch.optim.AdamW with nn.Embedding(sparse=False)."
            )
        arguments = list(inspect.signature(cls).parameters.values())[1:]
        self.open_ended = any(  # type: ignore[misc]
            a.kind is inspect.Parameter.VAR_KEYWORD for a in arguments
        )
        self._arguments = {a.name for a in arguments}
        self.defaults = {  # type: ignore[misc]
            a.name: a.default for a in arguments if a.default is not inspect.Parameter.empty
        }
        self._optimizer: torch.optim.Optimizer | None = None
        self._states_at_once = False  # the class makes its states when it is constructed, not in its first step
        self._group: dict[str, Any] = {}

    def check(self, hyper: Hyper) -> None:
        self._construct(torch.nn.Parameter(torch.zeros(2, 2)), hyper)

    def admit(self, param: Tensor, hyper: Hyper) -> None:
        self._construct(param, hyper)

    def plan(self, name: str, shape: tuple[int, ...], hyper: Hyper) -> Plan:
        return Plan(View.vector(len(shape)))  # states are made by the class itself at the first update

    def update(self, sweep: Sweep, plan: Plan, state: State, hyper: Hyper, step: int) -> None:
        with sweep.materialized() as param:
            if self._optimizer is None or (self._states_at_once and not state):
                made = self._construct(param, hyper)
                self._states_at_once = bool(made.state)
                if not state:
                    state.update(made.state.get(param, {}))
                self._optimizer, self._group = made, made.param_groups[0]
            group = {**self._group, **{k: v for k, v in hyper.items() if k != "param_names"}, "params": [param]}
            before = dict(group)
            self._optimizer.param_groups = [group]
            self._optimizer.state.clear()
            self._optimizer.state[param] = state
            self._optimizer.step()
            self._optimizer.state.clear()
            self._optimizer.param_groups, self._group["params"] = [], []  # they would keep the gradient alive
        changed = [key for key, value in before.items() if group.get(key) is not value]
        if changed or len(group) != len(before):
            raise UnsupportedError(
                f"{self.name} keeps state in its parameter group ({', '.join(changed) or 'new keys'}), which would "
                "change with every parameter instead of every step. Use another optimizer."
            )

    def _construct(self, param: Tensor, hyper: Hyper) -> torch.optim.Optimizer:
        arguments = {k: v for k, v in hyper.items() if k in self._arguments or self.open_ended}
        try:
            return self.cls([param], **arguments)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"{self.name} does not accept this: {error}") from error


def import_optimizer(path: str) -> type[torch.optim.Optimizer]:
    """The optimizer class at an import path such as `torch.optim.AdamW`.

    Raises:
        ConfigError: the module, the name in it, or an optimizer under that name does not exist.
    """
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"rule {path!r}: cannot import {module_name!r} ({error}); install its package or mend the path"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"rule {path!r}: {module_name} has no {attribute!r}.{did_you_mean(attribute, dir(module))}")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"rule {path!r} is {found!r}, not a torch.optim.Optimizer class")
    return found
