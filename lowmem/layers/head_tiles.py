"""Tiles of an output head: their size, and logits and gradients of some tokens for some rows of the vocabulary."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.options import valid_fields
from lowmem.rules import require
from lowmem.tiles.layout import block_starts
from lowmem.tiles.quantized import QuantizedWeight, plain

# Default memory for the temporaries of a head, in bytes. With small tiles, a GPU waits for the host:
# on an H200, four times the memory halves the step time of a model with 1B parameters.
MEMORY = 128 << 20
GPU_MEMORY = 512 << 20

# Bytes per element of a tile of logits: for the logits, their exponentials, and the product of both.
_TILE = 12

# Bytes per element of a tile's hidden states and weight rows: for the sums, and for float32 copies if the device cannot
# multiply 16-bit matrices with a float32 result.
_ROW = 8

# Bytes of weight rows that are cast or dequantized at a time. A CPU allocator gets larger tensors from the system and
# returns them each time, which for few tokens takes longer than the products.
SLICE = 8 << 20
GPU_SLICE = 64 << 20


@dataclass(frozen=True)
class Head:
    """Defines logits z as a function of the product y of hidden states and weight, and the loss of a token.

    z = softcap · tanh(s · y / softcap) / temperature, or s · y / temperature without `softcap`, with s = logit_scale.
    The loss of a token with label l is logsumexp(z) − (1 − ε) z_l − ε mean(z), with ε = label_smoothing.

    Options cannot be tensors, because a learned tensor would not get a gradient.

    Attributes:
        memory: bytes for temporaries, which determine the tile size. None means 128 MiB on a CPU, 512 MiB on a GPU.

    Raises:
        ConfigError: a value is out of range.
    """

    logit_scale: Annotated[float, require.number()] = 1.0
    softcap: Annotated[float | None, require.number("> 0", optional=True)] = None
    temperature: Annotated[float, require.number("> 0")] = 1.0
    label_smoothing: Annotated[float, require.number(">= 0", "<= 1")] = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        valid_fields(self)

    def available(self, device: torch.device) -> int:
        """Returns the number of bytes for temporaries on a device."""
        return self.memory or (MEMORY if device.type == "cpu" else GPU_MEMORY)

    @property
    def slope(self) -> float:
        """The derivative of a logit with respect to y, without the derivative of tanh."""
        return self.logit_scale / self.temperature

    def slope_at(self, z: Tensor) -> Tensor | float:
        """Returns the derivative of a logit z with respect to y."""
        if self.softcap is None:
            return self.slope
        return self.slope * (1 - (z * (self.temperature / self.softcap)).square())


@dataclass(frozen=True, eq=False)
class HeadTile:
    """Some rows of the vocabulary, for which logits of some tokens and gradients are computed.

    Attributes:
        options: defines the logits.
        weight, bias: [rows, size] and [rows].
        dtype: dtype of the operands of products.
        first: number of the first row.
        vocabulary: number of rows in the vocabulary.
    """

    options: Head
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    first: int
    vocabulary: int

    def rows(self, rows: slice) -> "HeadTile":
        """Returns a tile with these rows, converted to the dtype of products."""
        bias = None if self.bias is None else self.bias[rows]
        return replace(self, weight=plain(self.weight[rows]).to(self.dtype), bias=bias, first=rows.start)

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes logits from hidden states [tokens, size] in the dtype of products.

        Returns:
            The logits, float32 [tokens, rows], and the derivative of tanh at each logit, or None without `softcap`.
        """
        options = self.options
        weight = self.weight
        parts = self._slices()
        if len(parts) == 1:
            product = _product(hidden, plain(weight).to(hidden.dtype).t())
        else:
            product = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
            for part in parts:
                product[:, part] = _product(hidden, plain(weight[part]).to(hidden.dtype).t())
        if self.bias is not None:
            product.add_(self.bias)
        if options.softcap is None:
            if options.slope != 1:
                product.mul_(options.slope)
            return product, None
        tanh = product.mul_(options.logit_scale / options.softcap).tanh_()
        derivative = 1 - tanh.square()
        return tanh.mul_(options.softcap / options.temperature), derivative

    def times(self, factors: Tensor) -> Tensor:
        """Returns `factors @ weight` for [tokens, rows], in float32 or rounded once to bfloat16."""
        weight = self.weight
        if not isinstance(weight, QuantizedWeight) and weight.dtype == factors.dtype:
            return factors @ weight if weight.device.type == "cpu" else _product(factors, weight)
        total = torch.zeros(len(factors), weight.shape[1], dtype=torch.float32, device=factors.device)
        for part in self._slices():
            add_product(total, factors[:, part], plain(weight[part]).to(factors.dtype))
        return total

    def _slices(self) -> list[slice]:
        """Returns slices of rows to convert at a time."""
        step = self._rows_to_convert()
        return [slice(start, start + step) for start in block_starts(len(self.weight), step, self.weight)]

    def _rows_to_convert(self) -> int:
        """Returns the number of rows to cast or dequantize at a time (all rows if no conversion is needed)."""
        on_cpu = self.weight.device.type == "cpu"
        dtype = torch.float32 if on_cpu else self.dtype
        if self.weight.dtype == dtype and not isinstance(self.weight, QuantizedWeight):
            return len(self.weight)
        memory = min(self.options.available(self.weight.device) // 4, SLICE if on_cpu else GPU_SLICE)
        return max(1, memory // (4 * self.weight.shape[1]))

    def grad_products(
        self, p: Tensor, slope: Tensor | None, grad: Tensor, grad_targets: Tensor, targets: Tensor
    ) -> Tensor:
        """Converts probabilities to the gradient of the products y, in-place.

        Args:
            p: probabilities [tokens, rows].
            slope: the derivative of tanh at each logit, [tokens, rows], or None without `softcap`.
            grad, grad_targets: derivatives of the loss with respect to each log-sum-exp, and with respect to minus the
                logit of each label, float32 [tokens].
            targets: int64 [tokens].
        """
        smoothing = self.options.label_smoothing
        grad = grad * self.options.slope
        grad_targets = grad_targets * self.options.slope
        p.mul_(grad[:, None])
        if smoothing:
            p.sub_(grad[:, None], alpha=smoothing / self.vocabulary)
        at = targets - self.first
        of_labels = torch.where((at >= 0) & (at < p.shape[1]), (smoothing - 1) * grad_targets, 0.0)
        p.scatter_add_(1, at.clamp(0, p.shape[1] - 1)[:, None], of_labels[:, None])
        return p if slope is None else p.mul_(slope)

    def tokens(self, in_use: int) -> int:
        """Returns the number of tokens to process at a time. in_use: bytes of the memory that are used."""
        self.shape(1)  # raises if the memory is not enough
        rows, size = self.weight.shape
        return max(1, (self.options.available(self.weight.device) - in_use) // (_TILE * rows + _ROW * size))

    def shape(self, tokens: int) -> tuple[int, int]:
        """Returns the numbers of tokens and of rows in a tile for the gradients of these rows. It uses half of the
        memory, because the gradient of the weight exists at the same time.

        Raises:
            ConfigError: `memory` is not enough for one token and one row.
        """
        vocabulary, size = self.weight.shape
        memory = self.options.available(self.weight.device)
        needed = 2 * _ROW * size + _TILE
        if memory < needed:
            raise ConfigError(
                f"head_memory={memory:,} bytes is not enough for one row of a vocabulary matrix with {size} columns, "
                f"which needs {needed:,}. Increase it, or omit it to use the default"
            )
        # x tokens and x rows need x² + 2·row·x elements of a tile; `square` is the positive root
        elements = max(memory // 2, needed) / _TILE
        row = _ROW * size / _TILE
        square = int(math.sqrt(row**2 + elements) - row)
        parts = -(-tokens // max(square, 1))
        tokens = max(1, -(-tokens // max(parts, 1)))
        rows = max(1, int((elements - row * tokens) / (row + tokens)))
        if rows >= 64:
            rows = rows // 64 * 64
        return tokens, min(rows, vocabulary, self._rows_to_convert())


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Returns `left @ right` in float32. On a CPU it sets the precision of mkldnn's products during this product."""
    if left.dtype == torch.float32:
        return left @ right
    if left.device.type != "cpu":
        return torch.mm(left, right, out_dtype=torch.float32)
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:  # CPUs with fast bfloat16 products can return float32
        return left.float() @ right.float()
    finally:
        settings.fp32_precision = before


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to a float32 total."""
    if total.device.type != "cpu" and right.dtype != torch.float32:
        torch.addmm(total, left.to(right.dtype), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
