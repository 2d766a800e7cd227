"""The values of fake tensors that a plan knows, such as token ids, and assumptions about the others."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_KNOWN = 1 << 24  # maximum number of known values in a computed tensor
_CONSTANT = 1 << 16  # and in a constant


class KnownValues(TorchDispatchMode):
    """Provides the values that code reads from fake tensors. Values computed from the batch and from constants are
    known, such as the positions of images. Other integers are 1, other numbers 1/2, and elements of a mask are True.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known = WeakIdKeyDictionary()  # fake tensor → the same values on the CPU

    def fake(self, value: Tensor, device: torch.device) -> Tensor:
        """Creates a fake tensor with this value."""
        self.known[result := torch.empty_like(value, device=device)] = value
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = self._has_known_values(func, tensors, kwargs)
        if known and (torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags):
            value, device = self._compute(func, args, kwargs), tensors[0].device
            return tree_map_only(Tensor, lambda each: self.fake(each, device), value)
        result = self._assume(func, args)
        if result is None:
            result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if known and 0 < sum(each.numel() for each in results) <= (_KNOWN if tensors else _CONSTANT):
            self.known.update(zip(results, tree_leaves(self._compute(func, args, kwargs)), strict=True))
        elif func._schema.is_mutable and isinstance(args[0], Tensor):
            self.known.pop(args[0], None)
        return result

    def _has_known_values(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Returns whether the result of an operation can be computed from known values."""
        if func.namespace != "aten" or kwargs.get("pin_memory") or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        changes = func._schema.is_mutable
        return all(each in self.known or (type(each) is Tensor and each.is_cpu and not changes) for each in tensors)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Computes the result of an operation on known values, on the CPU."""
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        args, kwargs = tree_map_only(Tensor, lambda tensor: self.known.get(tensor, tensor), (args, kwargs))
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _assume(self, func: Any, args: Any) -> Any:
        """Returns a result for an operation that fake tensors do not support without known values, or None."""
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return True
            return 0.5 if args[0].is_floating_point() else 1
        if func is aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and len(args[1]) == 1:
            mask = args[1][0]
            if mask is None or mask.dtype != torch.bool:
                return None
            if func is not aten.index.Tensor:
                return torch.empty_like(args[0])
            count = self._compute(lambda each: int(each.sum()), (mask,), {}) if mask in self.known else mask.numel()
            return args[0].new_empty((count, *args[0].shape[mask.ndim :]))
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # its fake kernel requires bfloat16
            return _grouped_product(*args[:3])
        return None


def _grouped_product(left: Tensor, right: Tensor, offsets: Any = None) -> Tensor:
    """Returns a fake tensor with the shape of a grouped matrix product."""
    groups: Any = ()
    if left.ndim == 3:
        groups = right.shape[:-2]
    elif right.ndim == 2:
        groups = offsets.shape
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))
