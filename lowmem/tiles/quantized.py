"""Quantized weights that act as ordinary matrices in a model.

For autograd, a quantized weight is a matrix of its original dtype, such as bfloat16, with ordinary gradients. It stores
integers and a scale per group. Below autograd, a product dequantizes the matrix, and an embedding dequantizes the rows
that it looks up. So autograd saves the quantized tensor, and each product in backward dequantizes it again.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from lowmem.errors import StepError, UnsupportedError
from lowmem.tiles.graph import Function, Sizes, compiled, trace
from lowmem.tiles.layout import block_starts
from lowmem.tiles.storage import ROUNDED_DTYPES, Integer, Part, StoredTensor, Uniform

logger = logging.getLogger(__name__)

# Number of elements that are dequantized or quantized at a time.
CPU_BLOCK = 1 << 17
GPU_BLOCK = 1 << 22

aten = torch.ops.aten

# Operations, with all their overloads, that read an ordinary matrix: products, and the expansion of their operands.
PRODUCTS = {
    aten.mm, aten.addmm, aten.mv, aten.addmv, aten.bmm, aten.baddbmm, aten.addbmm, aten._grouped_mm, aten.linear,
    aten.expand,
}  # fmt: skip

# Operations that write to their first operand and read the others.
IN_PLACE = {aten.copy_, aten.addmm_, aten.addmv_, aten.baddbmm_, aten.addbmm_}

# Methods that read or share the memory of a tensor.
OF_MEMORY = {
    Tensor.share_memory_, Tensor.storage, Tensor.untyped_storage, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__,
    Tensor.tolist, Tensor.apply_, Tensor.map_,
}  # fmt: skip


class QuantizedWeight(Tensor):
    """A quantized matrix, or a stack of matrices.

    Attributes:
        format: the storage. None of its parts is the tensor itself.
        parts: the tensors of the storage, each [..., rows, columns / group], or transposed views of them.
        cast_from: the weight that autocast cast to this one (they share parts), and its version at that time.
        compiled: whether `dequantize` is compiled in this process. Set by the last optimizer of quantized weights;
            False after compiling fails.
    """

    format: Integer
    parts: tuple[Tensor, ...]
    cast_from: tuple["QuantizedWeight", int] | None = None
    compiled: ClassVar[bool] = False

    def __new__(cls, format: Integer, parts: tuple[Tensor, ...], dtype: torch.dtype) -> "QuantizedWeight":
        codes = parts[0]
        with torch.inference_mode(False):  # an inference tensor could not be trained
            new: QuantizedWeight = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
            )
        new.format, new.parts = format, parts
        return new

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, format: Integer, name: str = "the weight") -> "QuantizedWeight":
        """Quantizes a matrix by rounding to nearest. The number of columns must be a multiple of the group size. Raises
        `UnsupportedError` if an element is not finite, since its whole group would become NaN.
        """
        *lines, columns = weight.shape
        parts = (weight.new_empty((*lines, columns // p.group), dtype=p.dtype) for p in format.parts)
        new = cls(format, tuple(parts), weight.dtype)
        matrix, values = new._as_matrix(), weight.reshape(new._as_matrix().shape)
        for rows in _blocks(matrix) if not is_fake(weight) else ():
            value = values[rows].float()
            for part, codes in zip(matrix.parts, format.encode(value, Uniform.half(value)), strict=True):
                part[rows] = codes.to(part.dtype)
            if not value.is_meta and not matrix._decoded(rows).to(weight.dtype).isfinite().all():
                raise UnsupportedError(
                    f"{name} contains Inf, NaN or a number near the {weight.dtype} maximum in rows {rows.start} to "
                    f"{min(rows.stop, len(matrix)) - 1}, which {format} cannot represent. Correct it, or exclude its "
                    "module: quantize_(model, ..., skip=[...])"
                )
        return new

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """Returns the matrix as an ordinary tensor."""
        if self.transposed:
            return self.by_group(lambda part, _: part.mT).dequantize().mT
        if self.compiled and not _get_current_dispatch_mode():
            try:
                decoder = _decoder(self.format, self.dtype, self.device)
            except Exception as error:
                QuantizedWeight.compiled = False
                logger.warning("weights are dequantized without compiled code: %s: %s", type(error).__name__, error)
            else:
                return decoder(*(part.reshape(-1).contiguous() for part in self.parts))[0].view(self.shape)
        matrix = self._as_matrix()
        plain = matrix.parts[0].new_empty(matrix.shape, dtype=self.dtype)
        for rows in _blocks(matrix):
            plain[rows] = matrix._decoded(rows)
        return plain.view(self.shape)

    @property
    def transposed(self) -> bool:
        """True if groups run along columns, as in a transposed view for a product."""
        codes = self.parts[0]
        return codes.ndim > 1 and codes.stride(-2) == 1  # a row has at least one group

    def _as_matrix(self) -> "QuantizedWeight":
        """Returns a stack of matrices as one matrix, or a vector as a matrix with one group per row."""
        columns = self.shape[-1] if self.ndim > 1 else self.format.group
        return self if self.ndim == 2 else self.by_group(lambda part, group: part.reshape(-1, columns // group))

    def _decoded(self, at: Any) -> Tensor:
        """Returns the selected rows, dequantized to float32."""
        return self.format.decode(tuple(part[at] for part in self.parts))

    def by_group(self, change: Callable[[Tensor, int], Tensor]) -> "QuantizedWeight":
        """Returns a weight with the parts `change(part, group)`. group: number of elements per value of the part."""
        new = QuantizedWeight(self.format, StoredTensor(self.format, self.parts).map(change).parts, self.dtype)
        new.cast_from = self.cast_from
        return new

    # torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py: FSDP2 calls these to gather a shard. Parts may have any
    # size if the first method only takes the mesh. A shard is at the start of its padded memory.

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Returns the tensors to gather for a shard: its parts with their padding."""
        rows = self.parts[0].untyped_storage().nbytes() // self.shape[1:].numel()
        return tuple(part.as_strided((rows, *part.shape[1:]), part.stride()) for part in self.parts), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple["QuantizedWeight", tuple[()]] | None:
        """Returns the gathered weight with padding, which FSDP2 removes, or None if `out` shares its memory."""
        return (QuantizedWeight(self.format, gathered, dtype), ()) if out is None else None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.format}, shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            # Module.to assigns param.data. With __tensor_flatten__ it would create a parameter without our hooks
            self, value = args
            if not isinstance(value, cls) or value.dtype != self.dtype:
                raise UnsupportedError(
                    f"a weight quantized to {self.format} cannot become {value.dtype}, because training updates its "
                    "quantized values. Call lowmem.dequantize_(model) first, which ends the training of quantized "
                    "weights"
                )
            self.format, self.parts = value.format, value.parts
        if func in (torch.autograd.backward, torch.autograd.grad):  # checkpointing calls this again for its forwards
            args, kwargs = tree_map_only(cls, get_gradient_edge, (args, kwargs))
            return func(*args, **kwargs)
        if func in OF_MEMORY:
            raise args[0].refusal(f"Tensor.{func.__name__}()")
        result = Tensor.__torch_function__(_linear if func is F.linear else func, (), args, kwargs)
        return Tensor.clone(result) if isinstance(result, cls) and result.cast_from else result  # an explicit cast

    @classmethod
    @_disable_dynamo  # Dynamo cannot trace it and would warn
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, (self, *others) = kwargs or {}, args
        weights = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        if any(weight.cast_from and weight.cast_from[0]._version != weight.cast_from[1] for weight in weights):
            raise StepError(
                f"a weight quantized to {weights[0].format} was cast by autocast, and has been modified by an inplace "
                "operation since. Run the backward of each loss before the next step, and each forward in a separate "
                "autocast region"
            )
        packet = getattr(func, "overloadpacket", None)
        reads = packet in PRODUCTS and not isinstance(kwargs.get("out"), cls)
        if reads or (packet in IN_PLACE and not isinstance(self, cls)):
            return func(*map(plain, args), **kwargs)
        if func in (aten.detach.default, aten.alias.default):
            return self.by_group(lambda part, _: part)
        if (func is aten.t.default and self.ndim == 2) or (
            func is aten.transpose.int and {dim % self.ndim for dim in others} == {self.ndim - 2, self.ndim - 1}
        ):
            return self.by_group(lambda part, _: part.mT)
        if func is aten._to_copy.default and (dtype := kwargs.get("dtype")) not in (None, self.dtype):
            if self.dtype != torch.float32 or dtype not in ROUNDED_DTYPES or kwargs.get("device") is not None:
                return func(plain(self), **kwargs)
            cast = cls(self.format, self.parts, dtype)  # usually a cast by autocast, which needs no copy of the codes
            cast.cast_from = self, self._version
            return cast
        by_rows = isinstance(self, cls) and not self.transposed
        if by_rows and (result := self._by_rows(func, *others, **kwargs)) is not None:
            return result
        if (result := func.decompose(*args, **kwargs)) is not NotImplemented:  # in inference mode
            return result
        raise weights[0].refusal(func)

    def refusal(self, use: Any) -> UnsupportedError:
        """Returns the error for an operation that is not supported."""
        return UnsupportedError(
            f"a weight of shape {list(self.shape)} quantized to {self.format} is used in {use}, which needs an "
            "ordinary matrix. A quantized weight can be used in a product or an embedding, also sharded by fully_shard "
            "(FSDP2), but not with DeepSpeed or DistributedDataParallel. Exclude its module (quantize_(model, ..., "
            "skip=[...])), compute with weight.dequantize(), or call lowmem.dequantize_(model) before saving or sharing"
        )

    def _by_rows(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs operations without dequantizing the whole matrix (except cloning a cast). Returns None for others."""
        if func is aten.embedding.default or (func is aten.index.Tensor and len(args[0]) == 1 and self.ndim > 1):
            (at,) = tree_leaves(args[0])
            return rows_of(self, at) if at.dtype != torch.bool or at.ndim < self.ndim else None
        if func is aten.view.default and args[0]:
            *lines, row = args[0]
            row = row if row >= 0 else self.numel() // max(1, math.prod(lines))
            if row % self.format.group == 0 and (row or not lines):  # `not lines`: a shard without rows
                return self.by_group(lambda part, group: part.view(*lines, row // group))
        if func is aten.clone.default and self.cast_from is not None:
            return self.dequantize()
        if func in (aten.clone.default, aten._to_copy.default):
            return self.by_group(lambda part, _: part.to(kwargs.get("device"), copy=True))
        if func is aten.copy_.default:
            new = args[0]
            same = isinstance(new, QuantizedWeight) and not new.transposed
            if not same or (new.format, new.dtype, new.shape) != (self.format, self.dtype, self.shape):
                new = self.of(plain(new).expand(self.shape).to(self.dtype), self.format)
            for into, part in zip(self.parts, new.parts, strict=True):
                into.copy_(part)
            return self
        of_rows = (func is aten.slice.Tensor and self.ndim > 1) or (func is aten.select.int and self.ndim > 2)
        if of_rows and args[:1] == (0,):
            return self.by_group(lambda part, _: func(part, *args, **kwargs))
        if func is aten.split.Tensor and self.ndim > 1 and args[0] > 0 and args[1:] in ((), (0,)):
            return [self[start : start + args[0]] for start in range(0, len(self) or 1, args[0])]
        if func is aten.as_strided.default and tuple(args[1]) == self.stride() and not any(args[2:]):
            rows, *row = args[0]
            return self[:rows] if tuple(row) == self.shape[1:] and rows <= len(self) else None
        if func is aten.new_zeros.default and len(args[0]) > 1 and kwargs.get("dtype") in (None, self.dtype):
            *lines, row = args[0]
            if row % self.format.group == 0 < row:
                return self.by_group(lambda part, group: part.new_zeros((*lines, row // group)))
        if func in (aten.zeros_like.default, aten.new_empty.default):  # a gradient; the shard of a rank without rows
            kinds = {name: kwargs.get(name) or getattr(self, name) for name in ("dtype", "device")}
            return torch.zeros(args[0] if args else self.shape, **kinds)
        return None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **out: Tensor) -> Tensor:
    """Like `F.linear`, but with `addmm`: unlike `mm`, its backward reads the weight before its gradient exists."""
    if bias is not None or out or input.ndim < 2 or weight.ndim != 2 or isinstance(input, QuantizedWeight):
        return F.linear(input, weight, bias, **out)
    rows = torch.addmm(input.new_zeros(()), input.reshape(-1, input.shape[-1]), weight.t(), beta=0)
    return rows.view(*input.shape[:-1], weight.shape[0])


@functools.cache
def _decoder(format: Integer, dtype: torch.dtype, device: torch.device) -> Function:
    """Returns compiled code that dequantizes any number of groups in one pass. It takes one-dimensional parts."""
    sizes = Sizes()
    groups = sizes.size(1 << 16)
    args = [sizes.tensor((groups * (format.size // part.group),), part.dtype, device) for part in format.parts]
    return compiled(trace(lambda *parts: [format.decode(parts).to(dtype)], args), sizes, args)


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor itself, or the ordinary matrix of a `QuantizedWeight`."""
    return tensor.dequantize() if isinstance(tensor, QuantizedWeight) else tensor


def has_quantized_weights(model: nn.Module) -> bool:
    """Returns whether a model has quantized weights."""
    return any(map(is_quantized, model.parameters()))


def is_quantized(param: Tensor) -> bool:
    """Returns whether a parameter is quantized, or its shard."""
    return isinstance(getattr(param, "_local_tensor", param), QuantizedWeight)


def tensors_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that store a tensor's values: the tensor itself, or the parts of a `QuantizedWeight`."""
    return tuple(tensor.parts) if isinstance(tensor, QuantizedWeight) else (tensor,)


def rows_of(matrix: Tensor, indices: Tensor) -> Tensor:
    """Returns the selected rows of a matrix as an ordinary tensor."""
    return matrix._decoded(indices).to(matrix.dtype) if isinstance(matrix, QuantizedWeight) else matrix[indices]


def _blocks(weight: "QuantizedWeight") -> Iterator[slice]:
    """Yields slices of rows that are dequantized or quantized at a time."""
    block = CPU_BLOCK if weight.device.type == "cpu" else GPU_BLOCK
    step = max(1, block // max(1, weight.shape[1]))
    for start in block_starts(weight.shape[0], step, weight.parts[0]):
        yield slice(start, start + step)


torch.serialization.add_safe_globals([QuantizedWeight, Integer, Part])  # for torch.load(weights_only=True)
