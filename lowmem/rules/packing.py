"""States of any make as plain tensors and JSON, and back: lists, tuples, dicts, and tensor subclasses as torchao's."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
