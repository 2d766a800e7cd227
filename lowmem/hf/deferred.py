"""Weights that stay in mapped files, in the dtype of the files, until their layer is sharded or streamed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import core_model_loading


@contextmanager
def loading(*, converts: bool) -> Iterator[None]:
    """A context in which a trainer loads its model. If `converts`, weights keep the dtype of the files until they are
    sharded or streamed.
    """
    if not converts:
        yield
        return

    def materialize(weight: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        mapped: Tensor = weight[...]
        now = dtype in (None, mapped.dtype) or torch.device(device or "cpu").type != "cpu"
        return mapped.to(device, dtype) if now else _Deferred([mapped], dtype)

    sharded = patch("torch.distributed.fsdp.fully_shard", shard_unit)  # of a reference model, by TRL
    with patch.object(core_model_loading, "_materialize_copy", materialize), sharded:
        yield


class _Deferred(Tensor):
    """A weight in mapped files, which is converted when an operation uses it or when its unit is sharded."""

    held: list[Tensor]  # one tensor, in a list that aliases share
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, held: list[Tensor], dtype: torch.dtype | None) -> "_Deferred":
        new: Any = torch.Tensor._make_wrapper_subclass(cls, held[0].shape, dtype=dtype)  # type: ignore[attr-defined]
        new.held = held
        return new  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held, args[0].dtype)
        for used in (each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)):
            used.held[0] = used.held[0].to(used.dtype)
        args, kwargs = tree_map_only(cls, lambda used: used.held[0], (args, kwargs or {}))
        return func(*args, **kwargs)


def convert(weight: Tensor) -> None:
    """Converts a weight if it is deferred. It stays the same object, so that it stays tied."""
    if isinstance(weight, _Deferred):
        value = weight.held[0].to(weight.dtype)
        trained = nn.Parameter(value, weight.requires_grad) if isinstance(weight, nn.Parameter) else value
        torch.utils.swap_tensors(weight, trained)


def shard_unit(modules: Any, **options: Any) -> Any:
    """Converts the deferred weights of a unit, and calls `fully_shard`."""
    unit = nn.ModuleList(modules if isinstance(modules, list | tuple) else [modules])
    for weight in (*unit.parameters(), *unit.buffers()):
        convert(weight)
    return fully_shard(modules, **options)
