"""Weights that are stored in host memory or in files, and are on the device only while their layer computes."""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.placements.base import Placement, ReadyGradients, Reducer
from lowmem.placements.homes import RESIDENT, FileHome, Home, require_room
from lowmem.placements.ranks import in_group
from lowmem.placements.streaming import Streaming, Unit
from lowmem.tiles.quantized import QuantizedWeight, tensors_of


def stream(
    model: nn.Module,
    device: torch.device | str | int,
    *,
    home: str | Path = "host",
    device_memory: int | None = None,
) -> Streaming:
    """Moves the repeated layers of a model to a home, and everything else to a device. Afterwards, the weights of a
    layer are on the device only while it computes.

    Call it before creating the optimizer. Use activation checkpointing: without it, the activations of all layers are
    on the device, although the weights are streamed.

        lowmem.stream(model, "cuda")
        opt = lowmem.FusedOptimizer(model.named_parameters(), model=model)

    Args:
        model: a model on the host.
        device: the compute device.
        home: "host" for pinned memory (a CPU uses the weights in place), or a folder for unnamed files, which are
            written in every step and deleted when the process ends.
        device_memory: bytes for weights on the device. As many of the last layers as fit stay there. None: none stay.

    Returns:
        An object that counts the copied bytes. For a model that is already streamed, the same object.

    Raises:
        ConfigError: two layers and everything else exceed `device_memory`, or `home` does not have enough space.
        UnsupportedError: there are several ranks, no repeated layers, or a parameter that is sharded or a subclass.
    """
    if (already := streaming_of(model)) is not None:
        return already
    if in_group() and dist.get_world_size() > 1:
        raise UnsupportedError("lowmem.stream supports one process. For several, use ZeRO-3 or FSDP2")
    device = torch.empty(0, device=device).device  # includes the index
    units = find_units(model)
    units = units[: _number_that_streams(model, units, device_memory)]
    streamed: set[Tensor] = {param for unit in units for param in unit.homes}
    make_home: Callable[[], Home] = partial(Home, device)
    if home != "host" and not any(map(is_fake, model.parameters())):  # they are fake in a plan
        require_room(Path(home), sum(unit.nbytes for unit in units))
        make_home = partial(FileHome, Path(home))
    _move_others(model, streamed, device)
    for unit in units:
        unit.home = make_home()
        unit.states = make_home()
        for weight in unit.homes:
            _move_home(unit, weight, device)
    streaming = Streaming(units, device)
    for unit in units:
        _Hooks(streaming, unit).register()
    for param in model.parameters():
        param.streaming = streaming  # type: ignore[attr-defined]
    return streaming


def streaming_of(model: nn.Module) -> Streaming | None:
    """Returns the `Streaming` object of a model, or None."""
    return next((param.streaming for param in model.parameters() if hasattr(param, "streaming")), None)


def _number_that_streams(model: nn.Module, units: list[Unit], device_memory: int | None) -> int:
    """Returns the number of units to stream so that the weights on the device need at most `device_memory` bytes."""
    if device_memory is None:
        return len(units)
    tensors = {each for tensor in (*model.parameters(), *model.buffers()) for each in tensors_of(tensor)}
    total = sum(tensor.nbytes for tensor in tensors)
    sizes = [unit.nbytes for unit in units]
    for count in range(len(units) + 1):
        needed = total - sum(sizes[:count]) + sum(sorted(sizes[:count])[-2:])
        if needed <= device_memory:
            return count
    largest = max(units, key=lambda unit: unit.nbytes)
    raise ConfigError(
        f"device_memory is {device_memory:,} bytes, but two layers and the weights that stay on the device need "
        f"{needed:,}. The largest layer is {largest} with {largest.nbytes:,}"
    )


def _move_others(model: nn.Module, streamed: Collection[Tensor], device: torch.device) -> None:
    """Moves everything that is not streamed to the device."""
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param not in streamed:
                # a view of a mapped file would keep the entire file in memory
                param.data = param.data.to(device, copy=device.type == "cpu")
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _move_home(unit: Unit, param: Tensor, device: torch.device) -> None:
    """Moves a weight to its home. On the device it has no elements, unless the home is used in place."""
    if type(param) not in (nn.Parameter, QuantizedWeight) and not is_fake(param):
        raise UnsupportedError(f"lowmem.stream does not support parameters of class {type(param).__name__}")
    home = unit.homes[param] = _map(unit.home.keep, param.detach())
    if device.type == "cpu":
        param.data = home
        return
    param.data = _map(lambda part: torch.empty_like(part, device=device), home)
    for part in tensors_of(param):
        part.untyped_storage().resize_(0)


def _map(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies a function to a tensor, or to each part of a quantized weight."""
    if isinstance(tensor, QuantizedWeight):
        return tensor.by_group(lambda part, _: change(part))
    return change(tensor)


def find_units(model: nn.Module) -> list[Unit]:
    """Finds the repeated layers of a model, and their parameters that no other module uses.

    The classes of layers are listed in `_no_split_modules` of the model or of a submodule. Without such a list, the
    layers are the children of the module list with the most elements.

    Raises:
        UnsupportedError: the model does not have repeated layers.
    """
    modules = list(model.modules())
    classes = {name for module in modules for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in modules if type(module).__name__ in classes]
    if not layers:
        lists = [module for module in modules if isinstance(module, nn.ModuleList) and len(set(map(type, module))) == 1]
        largest = max(lists, key=lambda each: sum(param.numel() for param in each.parameters()), default=())
        layers = list(largest)
    inner = {inside for layer in layers for inside in itertools.islice(layer.modules(), 1, None)}
    homes: dict[nn.Module, dict[Tensor, Tensor]] = {layer: {} for layer in layers if layer not in inner}
    owner = {module: layer for layer in homes for module in layer.modules()}
    users: dict[Tensor, set[nn.Module | None]] = {}
    for module in modules:
        for param in module.parameters(recurse=False):
            users.setdefault(param, set()).add(owner.get(module))
    for weight, used_by in users.items():
        only_user = next(iter(used_by))
        if only_user is not None and len(used_by) == 1 and weight.numel() > RESIDENT:
            homes[only_user][weight] = weight.detach()
    layers = [layer for layer in homes if homes[layer]]
    if len(layers) < 2:
        raise UnsupportedError(
            "lowmem.stream finds no repeated layers with parameters of more than "
            f"{RESIDENT} elements in a {type(model).__name__}. List their class in model._no_split_modules"
        )
    return [Unit(index, layer, homes[layer]) for index, layer in enumerate(layers)]


# -- hooks of modules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hooks:
    """The hooks of a unit's module, which fetch the unit when the module runs."""

    streaming: Streaming
    unit: Unit

    def register(self) -> None:
        module = self.unit.module
        module.register_forward_pre_hook(self.before_forward, prepend=True)
        module.register_forward_hook(self.after_forward, with_kwargs=True)
        module.register_state_dict_post_hook(partial(self.replace_saved))  # torch sets an attribute of the hook
        module.register_load_state_dict_pre_hook(self.before_load)
        module.register_load_state_dict_post_hook(self.after_load)

    def enter(self, kind: str) -> None:
        self.streaming.demand(self.unit, kind)
        self.streaming.activate(self.unit)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        # reentrant checkpointing runs forwards inside backward
        if torch._C._current_graph_task_id() != -1:
            self.enter("backward")
        else:
            self.enter("train" if torch.is_grad_enabled() else "other")

    def after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Makes the backward of each output fetch the unit first.

        transformers 5.23, modeling_layers.py: checkpointing wraps `forward`, so recomputation runs no module hooks.
        """
        passed_on = set(map(id, tree_leaves((args, kwargs))))  # T5's blocks return the position bias of the first block
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in passed_on:
                tensor.register_hook(self.before_backward)
        if torch._C._current_graph_task_id() == -1:
            self.streaming.activate(None)

    def before_backward(self, grad: Tensor) -> None:
        self.enter("backward")

    def replace_saved(self, module: nn.Module, saved: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, param in module.named_parameters(remove_duplicate=False):
            # with keep_vars, the saved tensor is the parameter
            if param in self.unit.homes and saved.get(prefix + name, param) is not param:
                saved[prefix + name] = self.streaming.stored(param)

    def before_load(self, module: nn.Module, saved: Any, prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UnsupportedError("load_state_dict(assign=True) would replace streamed parameters. Use assign=False")
        for param in self.unit.homes:
            self.streaming.read(param)
        self.streaming.activate(self.unit)

    def after_load(self, module: nn.Module, keys: Any) -> None:
        self.streaming.activate(None)
        for param in self.unit.homes:
            self.streaming.write(param, param)


# -- the placement -------------------------------------------------------------------------------------------------


class _Reducer(Reducer):
    """A reducer that notifies a `Streaming` at the end of each backward."""

    def __init__(self, streaming: Streaming) -> None:
        self._streaming = streaming

    def flush(self) -> ReadyGradients:
        self.drop()
        return ()

    def drop(self) -> None:
        self._streaming.end_backward()


class Streamed(Placement):
    """Parameters of a model that is streamed by `stream`."""

    name = "streamed"

    def __init__(self, streaming: Streaming) -> None:
        super().__init__(streaming, _Reducer(streaming))
