"""Converts the state that a third-party optimizer stores for a parameter to tensors and JSON, and back."""

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lowmem.errors import UnsupportedError


def pack_state(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the state that the class `owner` stores for a parameter to tensors and JSON.

    Raises:
        UnsupportedError: a value consists of anything but tensors, numbers, strings, containers of them and objects of
            the class's own package.
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
    """Returns `value` as JSON. Its tensors are added to `tensors`, under names that begin with `name`."""

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
    """Undoes `pack_state` for one value. Its tensors are removed from `tensors`."""
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
        case {"deque": values, "maxlen": most}:
            return deque(unpack(values, tensors, package), most)
        case {"dict": pairs}:
            return items(pairs)
        case {"class": [module, name], "parts": parts, "rest": rest}:
            cls = getattr(sys.modules[module], name)  # its optimizer has imported it
            return cls.__tensor_unflatten__(items(parts), *unpack(rest, tensors, package))
        case {"object": [module, name], "vars": pairs} if _package(module) == package:
            value = object.__new__(getattr(sys.modules[module], name))
            vars(value).update(items(pairs))
            return value
    return form
