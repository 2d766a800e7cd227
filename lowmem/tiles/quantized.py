"""A weight that is held in fewer bits than it shows to the model.

Autograd sees a matrix of bfloat16 (or of the dtype that the weight had), which gets ordinary gradients. What exists are
codes and the units of their groups. Linear layers and embeddings decode it each time they use it: all of it or the rows
they need, in forward and once more in backward, and keep nothing of that.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lowmem.errors import UnsupportedError
from lowmem.tiles.graph import Compiler, Function, Sizes, compiled, trace
from lowmem.tiles.storage import Integer, Uniform

# Elements that are decoded or encoded at a time.
CPU_BLOCK = 1 << 17
GPU_BLOCK = 1 << 22

aten = torch.ops.aten


class QuantizedWeight(Tensor):
    """A matrix of float numbers whose values a storage holds.

    Attributes:
        format: how its values are held; no part of it is the tensor itself.
        parts: the tensors of the storage, [rows, columns / group] each.
        compiled: in this process `dequantize` is compiled code, as the last optimizer of such weights has decided.
    """

    format: Integer
    parts: tuple[Tensor, ...]
    compiled: ClassVar[bool] = False

    def __new__(cls, format: Integer, parts: tuple[Tensor, ...], dtype: torch.dtype) -> "QuantizedWeight":
        shape, device = parts[0].shape, parts[0].device
        new: QuantizedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        new.format, new.parts = format, parts
        return new

    @classmethod
    def of(cls, weight: Tensor, format: Integer) -> "QuantizedWeight":
        """A matrix in another storage, each element as near as it can be held. Columns are a multiple of the group."""
        rows, columns = weight.shape
        parts = (weight.new_empty((rows, columns // p.group), dtype=p.dtype) for p in format.parts)
        new = cls(format, tuple(parts), weight.dtype)
        new.fill_from(weight)
        return new

    @torch.no_grad()
    def fill_from(self, values: Tensor) -> None:
        """Encodes other values, each as near as it can be held."""
        if self.ndim == 1:
            self, values = (each.view(-1, self.format.group) for each in (self, values))  # type: ignore[assignment]
        for rows in _blocks(self) if not is_fake(values) else ():
            value = values[rows].to(self.device).float()
            for part, new in zip(self.parts, self.format.encode(value, Uniform.half(value)), strict=True):
                part[rows] = new.to(part.dtype)

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """The matrix as an ordinary tensor, a copy."""
        if self.compiled and Compiler.failure is None and not torch._C._len_torch_dispatch_stack():
            try:
                flat = [part.view(-1) for part in self.parts]
                return _decoder(self.format, self.dtype, self.device)(*flat)[0].view(self.shape)
            except Exception as error:
                Compiler.give_up(error)
        plain = self.parts[0].new_empty(self.shape, dtype=self.dtype)
        for rows in _blocks(self):
            plain[rows] = self._decoded(rows)
        return plain

    def _decoded(self, at: Any) -> Tensor:
        """Rows of it, in float32."""
        return self.format.decode(tuple(part[at] for part in self.parts))

    def by_group(self, change: Callable[[Tensor, int], Tensor]) -> "QuantizedWeight":
        """One with other parts, made from each part and the number of elements of which that has one value."""
        pairs = zip(self.parts, self.format.parts, strict=True)
        return QuantizedWeight(self.format, tuple(change(tensor, part.group) for tensor, part in pairs), self.dtype)

    # torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py: a shard that has these is gathered by them; parts may
    # have any size if the first one takes the mesh alone. A shard lies at the start of what it was padded to.

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """What is gathered of a shard: its parts with the padding behind them."""
        rows = self.parts[0].untyped_storage().nbytes() // self.shape[1]
        return tuple(part.as_strided((rows, part.shape[1]), part.stride()) for part in self.parts), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple["QuantizedWeight", tuple[()]] | None:
        """What was gathered, also the padding, which FSDP2 cuts off; `out` has the memory of it."""
        return (QuantizedWeight(self.format, gathered, dtype), ()) if out is None else None

    def _cannot_become(self, dtype: torch.dtype) -> UnsupportedError:
        return UnsupportedError(
            f"a weight that is held in {self.format} cannot become {dtype}: its codes are what is trained. Call "
            "lowmem.dequantize_(model) first, which ends that"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.format}, shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            # by which Module.to moves a parameter. With __tensor_flatten__ it would make a new one, without our hooks
            self, value = args
            if not isinstance(value, cls) or value.dtype != self.dtype:
                raise self._cannot_become(value.dtype)
            self.format, self.parts = value.format, value.parts
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, (self, *others) = kwargs or {}, args
        if func in (aten.detach.default, aten.alias.default):
            return self.by_group(lambda part, _: part)
        if func is aten.view.default and (others[0][-1] == -1 or others[0][-1] % self.format.group == 0):
            *lines, row = others[0]  # a row of -1, which torch computes, stays -1
            return self.by_group(lambda part, group: part.view(*lines, row // group))
        if func is aten.clone.default:
            return self.by_group(lambda part, _: part.clone())
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, self.dtype):
            return self.by_group(lambda part, _: part.to(kwargs.get("device"), copy=True))
        if func is aten.copy_.default:
            if not isinstance(self, cls):
                return self.copy_(others[0].dequantize())
            if isinstance(others[0], cls) and others[0].format == self.format:
                for into, part in zip(self.parts, others[0].parts, strict=True):
                    into.copy_(part)
            else:
                self.fill_from(plain(others[0]))
            return self
        if func is aten.slice.Tensor and others[:1] == [0] and self.ndim == 2:  # of rows
            return self.by_group(lambda part, _: func(part, *others, **kwargs))
        if func is aten.split.Tensor and others[1:] in ([], [0]):
            return [self[start : start + others[0]] for start in range(0, len(self), others[0])]
        if func is aten.as_strided.default and tuple(others[1]) == self.stride() and not any(others[2:]):
            return self[: others[0][0]]
        if func is aten.new_zeros.default and len(others[0]) == 2:
            return self.by_group(lambda part, group: part.new_zeros((others[0][0], others[0][1] // group)))
        if func in (aten.zeros_like.default, aten.new_empty.default):  # a gradient; the shard of a rank without rows
            shape = self.shape if func is aten.zeros_like.default else others[0]
            kinds = {name: kwargs.get(name) or getattr(self, name) for name in ("dtype", "device")}
            return torch.zeros(shape, **kinds)
        if func is aten._to_copy.default:
            raise self._cannot_become(kwargs["dtype"])
        held = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise UnsupportedError(
            f"a weight of {list(held.shape)} that is held in {held.format} takes part in {func}, which needs an "
            "ordinary matrix. It can be the weight of a linear layer or of an embedding, also one that fully_shard "
            "(FSDP2) shards; DeepSpeed and DistributedDataParallel do not take it. Leave its module out, "
            "quantize_(model, ..., skip=[...]), or compute with weight.dequantize()"
        )


@functools.cache
def _decoder(format: Integer, dtype: torch.dtype, device: torch.device) -> Function:
    """Compiled code that decodes the parts of any number of groups, each of one dimension: all in one pass."""
    sizes = Sizes()
    groups = sizes.size("groups", 1 << 16)
    args = [sizes.tensor((groups * (format.size // part.group),), part.dtype, device) for part in format.parts]
    return compiled(trace(lambda *parts: [format.decode(parts).to(dtype)], args), sizes, args)


def plain(tensor: Tensor) -> Tensor:
    """The tensor, or the ordinary matrix that a `QuantizedWeight` shows."""
    return tensor.dequantize() if isinstance(tensor, QuantizedWeight) else tensor


def in_codes(model: nn.Module) -> bool:
    """Returns whether some weights of a model are held in codes."""
    shards = (getattr(param, "_local_tensor", param) for param in model.parameters())  # of DTensors
    return any(isinstance(shard, QuantizedWeight) for shard in shards)


def tensors_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors in memory that a tensor is: itself, or the parts of a `QuantizedWeight`."""
    return tuple(tensor.parts) if isinstance(tensor, QuantizedWeight) else (tensor,)


def rows_of(matrix: Tensor, indices: Tensor) -> Tensor:
    """Some rows of a matrix, as an ordinary tensor."""
    return matrix._decoded(indices).to(matrix.dtype) if isinstance(matrix, QuantizedWeight) else matrix[indices]


def _blocks(weight: "QuantizedWeight") -> Iterator[slice]:
    """The rows of a matrix that are decoded or encoded at a time, one after others."""
    block = CPU_BLOCK if weight.device.type == "cpu" else GPU_BLOCK
    step = max(1, block // max(1, weight.shape[1]))
    rows = min(weight.shape[0], 2 * step) if is_fake(weight.parts[0]) else weight.shape[0]  # a dry run needs no more
    for start in range(0, rows, step):
        yield slice(start, start + step)


# -- linear layers and embeddings --------------------------------------------------------------------------------------


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, QuantizedWeight):
        raise UnsupportedError("a weight that is held in codes is the input or the bias of a linear layer")
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    output: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    """The operations of `torch.nn.functional.linear`, with a matrix that is made for each of them."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight.dequantize().to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            grad_input = (rows @ weight.dequantize().to(grad.dtype)).view(input.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ input.reshape(-1, input.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_input, grad_weight, grad_bias


def _embedding(
    input: Tensor, weight: Any, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    if max_norm is not None or sparse:
        raise UnsupportedError("an embedding with max_norm or sparse gradients cannot be held in codes; skip it")
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    output: Tensor = _Embedding.apply(input, weight, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]
    return output


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: QuantizedWeight, padding: int, by_frequency: bool) -> Tensor:
        ctx.save_for_backward(input)
        ctx.rows, ctx.dtype, ctx.options = len(weight), weight.dtype, (padding, by_frequency)
        return rows_of(weight, input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (input,) = ctx.saved_tensors
        grad_weight = aten.embedding_dense_backward(grad, input, ctx.rows, *ctx.options)
        return None, grad_weight.to(ctx.dtype), None, None
