"""Weights that have their home in host memory, and are on the device only while their layer computes.

The repeated layers of a model are its units. At most two units are on the device: the one that computes, and the one
that is expected next.

    layer         0    1    2    3    3    2    1    0      forward, then backward with its updates
    fetched       .    2    3    .    .    1    0    .      while the layer computes; 0 and 1 are still there
    written back                      3    2    1    0      each parameter as soon as it is updated
"""

import itertools
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowmem.errors import StepError, UnsupportedError
from lowmem.placements.base import Placed, Placement, Reduced, Reducer, Shard
from lowmem.tiles.quantized import QuantizedWeight

# Parameters up to this number of elements stay on the device. They are updated in stacks, after their unit has left.
RESIDENT = 1 << 14

# Devices that compute on the host.
_WITHOUT_STREAMS = ("cpu", "meta")


@dataclass(eq=False)
class Unit:
    """A module whose parameters are fetched together.

    Attributes:
        index: its position among the units of the model.
        homes: parameter → its elements on the host.
        file: the homes, if they are in a file that is mapped into memory. A CPU uses them where they are.
        present: the parameters are on the device, or are arriving.
        lent: its module may use the parameters.
        arrived: the end of the last copy to the device.
        left: parameter → the end of its last copy to its home.
    """

    index: int
    module: nn.Module
    homes: dict[Tensor, Tensor] = field(default_factory=dict)
    file: mmap.mmap | None = None
    present: bool = False
    lent: bool = True
    arrived: Any = None
    left: dict[Tensor, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes that the unit takes on the device."""
        return sum(home.nbytes for home in self.homes.values())


# Functions that do not read the elements of a tensor.
_OF_METADATA = {
    "__delete__", "__get__", "__hash__", "__set__", "_has_compatible_shallow_copy_type", "as_strided",
    "backward", "data_ptr", "detach", "dim",
    "element_size", "empty_like", "get_device", "grad", "is_complex", "is_contiguous", "is_floating_point",
    "is_inference", "is_pinned", "ndimension", "nelement", "new_empty", "new_zeros", "numel", "ones_like",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride",
    "untyped_storage", "view", "view_as", "zeros_like",
}  # fmt: skip


class Idle(nn.Parameter):
    """The class of a streamed parameter while its layer does not compute.

    To read the memory of one that is not on the device would end the process, and a change would be lost.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _OF_METADATA and not (func.__name__ == "to" and _is_there(*args, **(kwargs or {}))):
            params = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
            raise StepError(
                f"{func.__name__}() uses {_named(params[0])}, which is on the device only while its layer computes. "
                "Read it with lowmem.placements.full_tensor(param), and write it with lowmem.placements.fill(param, "
                "tensor)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _is_there(param: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Returns whether `param.to(...)` returns the parameter itself, as in `model.to(device)` of a trainer."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    there = device is None or torch.empty(0, device=device).device == param.device
    return there and dtype in (None, param.dtype)


def _named(param: Tensor) -> str:
    _, unit = _where(param)
    assert unit is not None
    name = next(name for name, each in unit.module.named_parameters() if each is param)
    return f"parameter {name!r} of layer {unit.index} ({type(unit.module).__name__})"


# The position in a step: the unit before, the present one, and the kind of pass.
_Place = tuple[int, int, str]


class Streaming:
    """Streams the units of one model past a device. It lives as long as its model, with any number of optimizers.

    Copies to the device run on one stream, and copies to the host on another one. The memory of units is allocated,
    freed and allocated again on the first one, which waits for everything that uses a unit before it frees it.

    Attributes:
        units: in the order of the model.
        owners: parameter → its unit.
        fetched, written: bytes that were copied to the device and back.
        peak: the maximum number of bytes of units on the device.
    """

    def __init__(self, units: Iterable[Unit], device: torch.device) -> None:
        self.units, self.device = list(units), device
        self.owners = {param: unit for unit in self.units for param in unit.homes}
        self.fetched = self.written = self.peak = 0
        self._in_backward = False  # a backward has a unit in use
        self._current, self._places = -1, list[_Place]()  # the present unit, and where it was in use
        self._following: dict[_Place, int] = {}  # the unit that came next in earlier passes
        self._module: Any = None if device.type in _WITHOUT_STREAMS else torch.get_device_module(device)
        self._incoming: Any = self._module and self._module.Stream(device)
        self._outgoing: Any = self._module and self._module.Stream(device)
        for unit in self.units:
            self._adopt(unit)
        self.lend(None)

    def _adopt(self, unit: Unit) -> None:
        """Frees the parameters of a unit, and fetches it from now on when its module computes."""
        for param, home in unit.homes.items():
            in_place = unit.file is not None and self._module is None
            param.data = home if in_place else torch.empty_like(home, device=self.device)
        self._free(unit)
        unit.module.register_forward_pre_hook(partial(_before_forward, self, unit), prepend=True)
        unit.module.register_forward_hook(partial(_after_forward, self, unit), with_kwargs=True)
        unit.module.register_state_dict_post_hook(partial(_replace_saved, self, unit))
        unit.module.register_load_state_dict_pre_hook(partial(_before_load, self, unit))
        unit.module.register_load_state_dict_post_hook(partial(_after_load, self, unit))

    # -- which units are on the device -----------------------------------------------------------------------------

    def demand(self, unit: Unit, kind: str) -> None:
        """Makes a unit present, and starts to fetch the unit that is expected after it. All others leave.

        Args:
            kind: of the pass: "backward", "train" (a forward that is followed by a backward), or "other".
        """
        self._in_backward = kind == "backward"
        before = self._places[0][0] if self._places else -1
        if unit.index != self._current:
            self._following |= dict.fromkeys(self._places, unit.index)
            before, self._current, self._places = self._current, unit.index, []
        place = before, unit.index, kind
        if place not in self._places:
            self._places.append(place)
        expected = self.units[self._following.get(place, self._neighbor(unit.index, kind))]
        for other in self.units:
            if other not in (unit, expected):
                self.evict(other)
        for each in (unit, expected):
            self.fetch(each)
        self._wait(unit)

    def _neighbor(self, index: int, kind: str) -> int:
        """Returns the unit that comes next in a model that runs its units in order, unless it has run otherwise."""
        last = len(self.units) - 1
        back = index == last if kind == "train" else kind == "backward" and index > 0
        return index - 1 if back else (index + 1) % len(self.units)

    def read(self, unit: Unit, params: Iterable[Tensor]) -> None:
        """Makes a unit present, so that some of its parameters can be changed."""
        if self._in_backward:  # another unit may be in use
            self.fetch(unit)
            self._wait(unit)
        else:
            self.demand(unit, "other")
        for param in params:
            if param in unit.left:  # written in the step before, and still on the device
                self._module.current_stream(self.device).wait_event(unit.left[param])

    def lend(self, unit: Unit | None) -> None:
        """Lets a layer use its parameters, and no other one."""
        for each in self.units:
            if each.lent is not (each is unit):
                each.lent = each is unit
                for param in each.homes:
                    param.__class__ = nn.Parameter if each.lent else Idle

    def end_backward(self) -> None:
        """Called when no unit is in use."""
        self._in_backward = False
        self.lend(None)

    # -- copies ----------------------------------------------------------------------------------------------------

    def fetch(self, unit: Unit) -> None:
        """Starts to copy a unit to the device."""
        if unit.present:
            return
        unit.present = True
        self._on_stream(self._incoming, partial(self._copy_in, unit))
        unit.arrived = self._incoming and self._incoming.record_event()
        self.fetched += unit.nbytes
        self.peak = max(self.peak, sum(each.nbytes for each in self.units if each.present))

    def _copy_in(self, unit: Unit) -> None:
        for param, home in unit.homes.items():
            if param.data_ptr() != home.data_ptr():
                param.untyped_storage().resize_(home.nbytes)
                param.data.copy_(home, non_blocking=True)  # of param.data, autograd does not count versions
        if unit.file is not None:
            unit.file.madvise(mmap.MADV_WILLNEED)  # the kernel reads ahead

    def evict(self, unit: Unit) -> None:
        """Frees a unit on the device, whose copies and uses are ordered before the memory is used again."""
        if not unit.present:
            return
        unit.present = False
        if unit.lent:  # after a failed forward, or a backward without updates
            self.lend(None)
        if self._incoming is not None:
            self._incoming.wait_stream(self._module.current_stream(self.device))
            for left in unit.left.values():
                self._incoming.wait_event(left)
        self._on_stream(self._incoming, partial(self._free, unit))

    def _free(self, unit: Unit) -> None:
        for param, home in unit.homes.items():
            if param.data_ptr() != home.data_ptr():
                param.untyped_storage().resize_(0)
        if unit.file is not None:
            unit.file.madvise(mmap.MADV_DONTNEED)  # changed pages are still written to the file

    def write(self, unit: Unit, param: Tensor) -> None:
        """Starts to copy a parameter to its home, after its update."""
        if self._outgoing is not None:
            self._outgoing.wait_stream(self._module.current_stream(self.device))
        if param.data_ptr() != unit.homes[param].data_ptr():
            self._on_stream(self._outgoing, lambda: unit.homes[param].copy_(param.data, non_blocking=True))
        if self._outgoing is not None:
            unit.left[param] = self._outgoing.record_event()
        self.written += unit.homes[param].nbytes

    def home(self, unit: Unit, param: Tensor) -> Tensor:
        """Returns the elements of a parameter on the host."""
        for copied in (unit.left.get(param), unit.arrived):
            if copied is not None:
                copied.synchronize()
        return unit.homes[param]

    def _wait(self, unit: Unit) -> None:
        if unit.arrived is not None:
            self._module.current_stream(self.device).wait_event(unit.arrived)

    def _on_stream(self, stream: Any, act: Callable[[], Any]) -> None:
        if stream is None:
            act()
        else:
            with self._module.stream(stream):
                act()


# -- hooks of modules ----------------------------------------------------------------------------------------------


def _before_forward(streaming: Streaming, unit: Unit, module: nn.Module, args: Any) -> None:
    # reentrant checkpointing runs forwards inside of a backward
    in_backward = torch._C._current_graph_task_id() != -1
    streaming.demand(unit, "backward" if in_backward else "train" if torch.is_grad_enabled() else "other")
    streaming.lend(unit)


def _after_forward(
    streaming: Streaming, unit: Unit, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Makes the backward of each output fetch the unit first.

    transformers 5.23, modeling_layers.py: checkpointing surrounds `forward`, so it does not run the hooks of modules.
    """
    passed_on = set(map(id, tree_leaves((args, kwargs))))  # T5's blocks return the position bias of the first one
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in passed_on:
            tensor.register_hook(partial(_before_backward, streaming, unit))
    if torch._C._current_graph_task_id() == -1:
        streaming.lend(None)


def _before_backward(streaming: Streaming, unit: Unit, grad: Tensor) -> None:
    streaming.demand(unit, "backward")
    streaming.lend(unit)


def _names(unit: Unit, module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, param in module.named_parameters(remove_duplicate=False):
        if param in unit.homes:
            yield prefix + name, param


def _replace_saved(
    streaming: Streaming, unit: Unit, module: nn.Module, saved: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for name, param in _names(unit, module, prefix):
        if name in saved:
            saved[name] = streaming.home(unit, param)


def _before_load(streaming: Streaming, unit: Unit, module: nn.Module, *args: Any) -> None:
    streaming.read(unit, unit.homes)
    streaming.lend(unit)


def _after_load(streaming: Streaming, unit: Unit, module: nn.Module, keys: Any) -> None:
    streaming.lend(None)
    for param in unit.homes:
        streaming.write(unit, param)


# -- the placement -------------------------------------------------------------------------------------------------


class _Home(Shard):
    """A full parameter with a home on the host, or one that stays on the device."""

    def admit(self, name: str, param: Tensor) -> None:
        if isinstance(param, QuantizedWeight):
            raise UnsupportedError(f"parameter {name!r} is quantized, which placement='streamed' does not support")

    def read(self, param: Tensor) -> Tensor:
        streaming, unit = _where(param)
        if unit is not None:
            streaming.read(unit, (param,))
        return super().read(param)

    def write(self, param: Tensor, shard: Tensor) -> None:
        streaming, unit = _where(param)
        if unit is not None:
            streaming.write(unit, param)

    def stored(self, param: Tensor) -> Tensor:
        streaming, unit = _where(param)
        return param if unit is None else streaming.home(unit, param)

    def full_tensor(self, param: Tensor) -> Tensor:
        return self.stored(param).detach()

    @torch.no_grad()
    def fill(self, param: Tensor, full: Tensor) -> None:
        self.stored(param).copy_(full)
        streaming, unit = _where(param)
        if unit is not None:  # the next use fetches the new elements
            streaming.evict(unit)


class _Reducer(Reducer):
    """A reducer that notices the end of each backward."""

    def __init__(self) -> None:
        self.streaming: Streaming | None = None

    def flush(self) -> Reduced:
        self.drop()
        yield from ()

    def drop(self) -> None:
        if self.streaming is not None:
            self.streaming.end_backward()


class Streamed(Placement):
    """Parameters of a model whose repeated layers are streamed past the device.

    The device is the device of the other parameters. Move those there with `move_resident` before the optimizer is
    created; layers are never on the device as a whole.
    """

    name = "streamed"

    def __init__(self) -> None:
        self._reducer = _Reducer()
        super().__init__(_Home(), self._reducer)

    def adopt(self, records: Collection[Placed], model: nn.Module | None) -> None:
        super().adopt(records, model)
        if model is None:
            raise UnsupportedError(
                "placement='streamed' needs the model, because its layers fetch their weights: "
                "FusedOptimizer(model.named_parameters(), model=model, placement='streamed', ...)"
            )
        self._reducer.streaming = stream(model)


def stream(model: nn.Module, folder: Path | None = None) -> Streaming:
    """Streams a model from now on. Returns the same object each time.

    Args:
        model: with the parameters that stay on the device already there.
        folder: of files for the homes, which are mapped into memory; None for host memory.
    """
    for param in model.parameters():
        if hasattr(param, "streaming"):
            return param.streaming  # type: ignore[no-any-return]
    units = find_units(model)
    streamed = {param for unit in units for param in unit.homes}
    devices = {param.device for param in model.parameters() if param not in streamed}
    devices = devices or {param.device for param in streamed}
    if len(devices) > 1:
        raise UnsupportedError(
            f"placement='streamed' needs one device for the parameters that stay there, but they are on {devices}"
        )
    (device,) = devices
    for unit in units:
        if folder is None:
            unit.homes = {weight: _make_home(weight, device) for weight in unit.homes}
        else:
            _map_homes(unit, folder / f"unit{unit.index}")
    streaming = Streaming(units, device)
    for param in model.parameters():
        param.streaming = streaming  # type: ignore[attr-defined]
    return streaming


def _where(param: Any) -> tuple[Streaming, Unit | None]:
    """Returns what streams a parameter, and its unit; None if it stays on the device."""
    return param.streaming, param.streaming.owners.get(param)


def _make_home(param: Tensor, device: torch.device) -> Tensor:
    """Returns the elements of a parameter in host memory, which are its own memory if nothing is pinned."""
    pinned = device.type not in _WITHOUT_STREAMS
    if not pinned and param.device.type == "cpu":
        return param.detach()
    return torch.empty(param.shape, dtype=param.dtype, device="cpu", pin_memory=pinned).copy_(param.detach())


def _map_homes(unit: Unit, path: Path) -> None:
    """Moves the elements of a unit to a file."""
    with path.open("wb+") as file:
        file.truncate(unit.nbytes)
        unit.file = mmap.mmap(file.fileno(), unit.nbytes)
    start = 0
    for param in unit.homes:
        home = torch.frombuffer(unit.file, dtype=param.dtype, count=param.numel(), offset=start).view(param.shape)
        unit.homes[param] = home.copy_(param.detach())
        start += home.nbytes


def find_units(model: nn.Module) -> list[Unit]:
    """Finds the repeated layers of a model, with the parameters that nothing else uses.

    Layers are of a class in `_no_split_modules` of the model or of a part of it. Without such a list, they are the
    children of the module list with the most elements.

    Raises:
        UnsupportedError: there are no repeated layers.
    """
    modules = list(model.modules())
    classes = {name for module in modules for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in modules if type(module).__name__ in classes]
    if not layers:
        lists = [module for module in modules if isinstance(module, nn.ModuleList) and len(set(map(type, module))) == 1]
        largest = max(lists, key=lambda each: sum(param.numel() for param in each.parameters()), default=())
        layers = list(largest)
    inner = {inside for layer in layers for inside in itertools.islice(layer.modules(), 1, None)}
    units = [Unit(0, layer) for layer in layers if layer not in inner]
    unit: Unit | None
    owner = {module: unit for unit in units for module in unit.module.modules()}
    users: dict[Tensor, set[Unit | None]] = {}
    for module in modules:
        for param in module.parameters(recurse=False):
            users.setdefault(param, set()).add(owner.get(module))
    for weight, used_by in users.items():
        unit = next(iter(used_by))
        if unit is None or len(used_by) > 1 or weight.numel() <= RESIDENT or not weight.is_contiguous():
            continue
        if type(weight) not in (nn.Parameter, Idle):
            raise UnsupportedError(f"placement='streamed' does not support parameters of {type(weight).__name__}")
        unit.homes[weight] = weight.detach()
    units = [each for each in units if each.homes]
    if len(units) < 2:
        raise UnsupportedError(
            "placement='streamed' finds no repeated layers with parameters of more than "
            f"{RESIDENT} elements in a {type(model).__name__}. List their class in model._no_split_modules"
        )
    for index, each in enumerate(units):
        each.index = index
    return units


def move_resident(model: nn.Module, device: torch.device | str) -> None:
    """Moves everything to a device, except for the parameters that will be streamed."""
    streamed = {param for unit in find_units(model) for param in unit.homes}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param not in streamed:
                param.data = param.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
