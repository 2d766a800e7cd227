"""Streams the units of a model through the device: residency, and copies of weights and states.

At most two units are on the device: the current unit, and the unit that is expected next.

    layer         0    1    2    3    3    2    1    0      forward, then backward with its updates
    fetched       .    2    3    .    .    1    0    .      while the layer computes; 0 and 1 are still there
    written back                      3    2    1    0      each parameter, as soon as it is updated
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.base import Shard
from lowmem.placements.homes import RESIDENT, WITHOUT_STREAMS, Home
from lowmem.tiles.quantized import QuantizedWeight, plain, tensors_of


@dataclass(eq=False, repr=False)
class Unit:
    """A module whose parameters are fetched together.

    Attributes:
        index: the position among the units of the model.
        homes: parameter → the tensor that stores its elements in `home` (for a quantized weight, its parts).
        home, states: the homes of weights and of optimizer states.
        present: whether the parameters are on the device or are being copied there.
        fetch_event: event at the end of the last copy to the device.
        write_events: parameter → event at the end of the last copy of the parameter and its states to their homes.
    """

    index: int
    module: nn.Module
    homes: dict[Tensor, Tensor] = field(default_factory=dict)
    home: Home = field(init=False)
    states: Home = field(init=False)
    present: bool = False
    fetch_event: Any = None
    write_events: dict[Tensor, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of the unit on the device, in bytes."""
        return sum(home.nbytes for _, home in self.tensors())

    def tensors(self, param: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (tensor on the device, tensor in its home) pairs for one parameter, or for all parameters."""
        for each in self.homes if param is None else (param,):
            yield from zip(tensors_of(each), tensors_of(self.homes[each]), strict=True)

    def __repr__(self) -> str:
        return f"layer {self.index} ({type(self.module).__name__})"


# Functions that do not access the elements of a tensor. Any other function raises `StepError` while the layer is not
# running, including harmless functions that this list omits.
_OF_METADATA = {
    "__delete__", "__get__", "__hash__", "__set__", "_has_compatible_shallow_copy_type", "as_strided",
    "backward", "data_ptr", "detach", "dim",
    "element_size", "empty_like", "get_device", "grad", "is_complex", "is_contiguous", "is_floating_point",
    "is_inference", "is_pinned", "ndimension", "nelement", "new_empty", "new_zeros", "numel", "ones_like",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride",
    "untyped_storage", "view", "view_as", "zeros_like",
}  # fmt: skip


class _Guarded:
    """The class of a streamed parameter while its layer is not running.

    Reading a parameter that is not on the device would crash the process, and writing to it would have no effect.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = "data" if func == Tensor.data.__get__ else func.__name__  # type: ignore[attr-defined]
        if name not in _OF_METADATA and not (name == "to" and _is_there(*args, **(kwargs or {}))):
            raise next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).idle_error(name)
        if func in (torch.autograd.backward, torch.autograd.grad):  # checkpointing computes forwards in them
            args, kwargs = tree_map_only(_Guarded, get_gradient_edge, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        raise self.idle_error("copy.deepcopy")

    def idle_error(self: Any, use: str) -> StepError:
        """Returns the error for a use of the parameter while its layer is not running."""
        unit = self.streaming.owners[self]
        name = next(name for name, each in unit.module.named_parameters() if each is self)
        return StepError(
            f"{use} uses parameter {name!r} of {unit}, which is on the device only while its layer computes. Read it "
            "with lowmem.placements.full_tensor(param), and write it with lowmem.placements.fill(param, tensor)"
        )


class Idle(_Guarded, nn.Parameter):
    __doc__ = _Guarded.__doc__


class IdleQuantized(_Guarded, QuantizedWeight):
    __doc__ = _Guarded.__doc__


_IDLE: dict[type, type] = {nn.Parameter: Idle, QuantizedWeight: IdleQuantized}
_ACTIVE = {idle: active for active, idle in _IDLE.items()}


def _change_class(params: Iterable[Any], classes: dict[type, type]) -> None:
    for param in params:
        param.__class__ = classes.get(type(param), type(param))  # plans have fake parameters


def _is_there(param: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Returns whether `param.to(...)` returns the parameter itself, as in `model.to(device)` of a trainer."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    there = device is None or torch.empty(0, device=device).device == param.device
    return there and dtype in (None, param.dtype)


# The position in a step: the previous unit, the current unit, and the kind of pass.
_Position = tuple[int, int, str]


class Streaming(Shard):
    """Streams the units of one model through a device. It lives as long as its model, with any number of optimizers.

    A parameter that belongs to no unit stays on the device.

    Copies to the device run on one stream, and copies to the host on another. The memory of units is allocated and
    freed on the first stream, which waits for all uses of a unit before it frees the unit.

    Attributes:
        units: the units, in the order of the model.
        owners: parameter → its unit.
        fetched, written: number of bytes copied to the device and back.
        peak: maximum number of bytes of units on the device.
    """

    moves = True

    def __init__(self, units: Iterable[Unit], device: torch.device) -> None:
        self.units = list(units)
        self.device = device
        self.owners = {param: unit for unit in self.units for param in unit.homes}
        self.fetched = self.written = self.peak = 0
        self._in_backward = False  # whether a backward is using a unit
        self._positions: list[_Position] = [(-1, -1, "")]  # where the current unit is in use
        self._following: dict[_Position, int] = {}  # the unit that came next in earlier passes
        self._in_place = device.type == "cpu"  # a CPU uses the homes without copies
        # the streams of torch.cpu do nothing, and their events are None
        self._module: Any = torch.cpu if device.type in WITHOUT_STREAMS else torch.get_device_module(device)
        self._incoming: Any = self._module.Stream(device)
        self._outgoing: Any = self._module.Stream(device)
        self._borrowed: deque[tuple[Any, Any]] = deque()  # states on the device, and the end of their last copy
        self._waited = 0.0  # seconds of completed waits
        self._waits = deque[tuple[Any, Any]]()  # events at the start and end of later waits
        self._active: Unit | None = None  # the unit whose module may use its parameters
        _change_class(self.owners, _IDLE)

    def admit(self, name: str, param: Any) -> None:
        if param.streaming is not self:
            raise UnsupportedError("the parameters belong to several streamed models. Create an optimizer for each one")

    # -- which units are on the device -----------------------------------------------------------------------------

    def demand(self, unit: Unit, kind: str) -> None:
        """Makes a unit present, starts fetching the unit that is expected next, and evicts all others.

        Args:
            kind: the kind of pass: "backward", "train" (a forward that is followed by a backward), or "other".
        """
        self._in_backward = kind == "backward"
        before, current, _ = self._positions[0]
        if unit.index != current:
            self._following |= dict.fromkeys(self._positions, unit.index)
            before = current
            self._positions = []
        position = (before, unit.index, kind)
        if position not in self._positions:
            self._positions.append(position)
        expected = self.units[self._following.get(position, self._neighbor(unit.index, kind))]
        for other in self.units:
            if other not in (unit, expected):
                self.evict(other)
        for each in (unit, expected):
            self.fetch(each)
        self._await(unit.fetch_event)

    def _neighbor(self, index: int, kind: str) -> int:
        """Returns the next unit for a model that runs its units in order, unless earlier passes used another order."""
        last = len(self.units) - 1
        if (kind == "train" and index == last) or (kind == "backward" and index > 0):
            return index - 1
        return (index + 1) % len(self.units)

    def activate(self, unit: Unit | None) -> None:
        """Lets only this layer use its parameters."""
        if unit is not self._active:
            if self._active is not None:
                _change_class(self._active.homes, _IDLE)
            if unit is not None:
                _change_class(unit.homes, _ACTIVE)
            self._active = unit

    def end_backward(self) -> None:
        """Called when a backward has ended, so that no unit is in use."""
        self._in_backward = False
        self.activate(None)

    # -- copies of weights -----------------------------------------------------------------------------------------

    def fetch(self, unit: Unit) -> None:
        """Starts copying a unit to the device."""
        if unit.present:
            return
        unit.present = True
        with self._module.stream(self._incoming):
            if self._in_place:
                unit.home.prefetch()
            else:
                for there, home in unit.tensors():
                    there.untyped_storage().resize_(home.nbytes)
                    _untracked(there).copy_(home, non_blocking=True)
        unit.fetch_event = self._incoming.record_event()
        self.fetched += unit.nbytes
        self.peak = max(self.peak, sum(each.nbytes for each in self.units if each.present))

    def evict(self, unit: Unit) -> None:
        """Frees a unit on the device. Its memory is reused only after all copies and uses of the unit."""
        if not unit.present:
            return
        unit.present = False
        if unit is self._active:  # after a failed forward, or a backward without updates
            self.activate(None)
        self._incoming.wait_stream(self._module.current_stream(self.device))
        for left in filter(None, unit.write_events.values()):
            self._incoming.wait_event(left)
        with self._module.stream(self._incoming):
            if self._in_place:
                unit.home.release()
                unit.states.release()
            else:
                for there, _ in unit.tensors():
                    there.untyped_storage().resize_(0)

    def read(self, param: Tensor) -> Tensor:
        if (unit := self.owners.get(param)) is not None:
            if self._in_backward:  # another unit may be in use
                self.fetch(unit)
                self._await(unit.fetch_event)
            else:
                self.demand(unit, "other")
            if unit.write_events.get(param) is not None:  # written in the previous step, and still on the device
                self._module.current_stream(self.device).wait_event(unit.write_events[param])
        return super().read(param)

    def write(self, param: Tensor, shard: Tensor) -> None:
        """Starts copying a parameter to its home after its update."""
        super().write(param, shard)
        if (unit := self.owners.get(param)) is not None:
            pairs = [(home, there.detach()) for there, home in unit.tensors(param)]
            unit.write_events[param] = self._copy_out(() if self._in_place else pairs)
            self.written += sum(home.nbytes for home, _ in pairs)

    def _copy_out(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Starts copies to homes. Returns the event at their end."""
        self._outgoing.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._outgoing):
            for home, there in pairs:
                home.copy_(there, non_blocking=True)
        return self._outgoing.record_event()

    def stored(self, param: Tensor) -> Tensor:
        """Returns a parameter in its home, after waiting for copies to and from it."""
        unit = self.owners.get(param)
        if unit is None:
            return param
        unit.present |= self._in_place  # pages that are read from a file stay in memory until the unit is evicted
        for copied in (unit.write_events.get(param), unit.fetch_event):
            if copied is not None:
                copied.synchronize()
        return unit.homes[param]

    def _changed(self, param: Tensor) -> Tensor:
        """Returns the home of a parameter for modification. The next use fetches it again."""
        if (unit := self.owners.get(param)) is not None:
            self.evict(unit)
        return self.stored(param)

    def version(self, param: Tensor) -> tuple[Any, ...]:
        return (param._version,)  # not the address: each fetch allocates new memory

    def quantized(self, param: Tensor) -> QuantizedWeight | None:
        return super().quantized(self._changed(param)) if isinstance(param, QuantizedWeight) else None

    def full_tensor(self, param: Tensor) -> Tensor:
        return plain(self.stored(param).detach())

    @torch.no_grad()
    def fill(self, param: Tensor, full: Tensor) -> None:
        self._changed(param).copy_(full)

    # -- copies of states ------------------------------------------------------------------------------------------

    def keep(self, param: Tensor, states: dict[Any, Any]) -> dict[Any, Any]:
        unit = self.owners.get(param)
        if unit is None:
            return states
        return {name: unit.states.keep(value) if moves(value) else value for name, value in states.items()}

    def lend(self, param: Tensor, states: dict[Any, Any]) -> AbstractContextManager[dict[Any, Any]]:
        unit = self.owners.get(param)
        return super().lend(param, states) if unit is None else self._lend(unit, param, states)

    @contextmanager
    def _lend(self, unit: Unit, param: Tensor, states: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """A context in which states are on the device. On exit, modified and new states are copied to their homes.

        Small states stay on the device. Others are on the device for at most two parameters at a time.
        """
        there = states | self._bring(unit, param, {n: home for n, home in states.items() if moves(home)})
        yield there
        copies = []
        new = {name: value for name, value in there.items() if value is not states.get(name)}
        for name, value in new.items():
            home: Any = states.get(name)
            if moves(value) and moves(home) and (value.shape, value.dtype) == (home.shape, home.dtype):
                copies.append((home, value))
            else:
                states[name] = unit.states.keep(value) if moves(value) else value
        unit.write_events[param] = self._copy_out(copies)  # a weight that was written in this context has left before
        self._borrowed.append((new, unit.write_events[param]))
        self.written += sum(home.nbytes for home in states.values() if moves(home))

    def _bring(self, unit: Unit, param: Tensor, homes: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Copies states to a device with separate memory."""
        self.fetched += sum(home.nbytes for home in homes.values())
        while len(self._borrowed) > 1:
            borrowed, left = self._borrowed.popleft()
            self._incoming.wait_event(left)  # the next tensors on either stream may reuse the memory
            self._module.current_stream(self.device).wait_event(left)
            del borrowed
        if self._in_place or not homes:
            return {}
        if unit.write_events.get(param) is not None:
            self._incoming.wait_event(unit.write_events[param])
        with self._module.stream(self._incoming):
            moved = {name: home.to(self.device, non_blocking=True) for name, home in homes.items()}
        self._await(self._incoming.record_event())
        return moved

    # -- waiting ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        if (left := self._outgoing.record_event()) is not None:
            left.synchronize()

    @property
    def waited(self) -> float:
        """Seconds that the device waited for copies. It is 0 on a CPU, which uses the weights in place."""
        self._count_waits()
        return self._waited

    def _count_waits(self) -> None:
        """Adds the durations of completed waits, and drops their events."""
        while self._waits and self._waits[0][1].query():
            start, end = self._waits.popleft()
            self._waited += start.elapsed_time(end) / 1000

    def _await(self, copied: Any) -> None:
        """Makes the device wait for a copy."""
        if copied is None:
            return
        self._count_waits()
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        current = self._module.current_stream(self.device)
        start.record(current)
        current.wait_event(copied)
        end.record(current)
        self._waits.append((start, end))


def _untracked(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same memory whose modifications autograd does not track."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data


def moves(value: Any) -> bool:
    """Returns whether a state leaves the device between uses."""
    return isinstance(value, Tensor) and value.numel() > RESIDENT
