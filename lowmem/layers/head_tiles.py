"""Tiles of an output head: the logits of some tokens with some rows of the vocabulary. One exists at a time."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.errors import ConfigError
from lowmem.rules import require

# Default memory for the temporaries of a head or an embedding, in bytes. With smaller tiles a GPU waits for the host:
# four times the memory halves the time of a step of 1B parameters on an H200.
MEMORY, GPU_MEMORY = 128 << 20, 512 << 20

# Bytes per element of a tile of logits: the logits, their exponentials, and the product of both.
_TILE = 12

# Bytes per element of the rows of hidden states and of the weight that a tile is computed from: the sums, and float32
# copies where the device has no product of 16-bit matrices that is summed and returned in float32.
_ROW = 8

# A tensor is not allowed as an option: it might be learned, and would not get a gradient.
_CHECKS = {
    "logit_scale": require.number(),
    "softcap": require.number("> 0", optional=True),
    "temperature": require.number("> 0"),
    "label_smoothing": require.number(">= 0", "<= 1"),
}


@dataclass(frozen=True)
class Head:
    """Computes logits z from the product y of hidden states and weight, and defines the loss of a token.

    z = softcap · tanh(s · y / softcap) / temperature, without `softcap` z = s · y / temperature, with s = logit_scale.
    The loss of a token with label l is logsumexp(z) − (1 − ε) z_l − ε mean(z), with ε = label_smoothing.

    Attributes:
        memory: bytes of temporaries, which determine the size of tiles. None is 128 MiB on a CPU and 512 MiB on a GPU.

    Raises:
        ConfigError: a value is out of range.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    label_smoothing: float = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))

    @property
    def slope(self) -> float:
        """The derivative of a logit with respect to y, without the factor of tanh."""
        return self.logit_scale / self.temperature

    def slope_at(self, z: Tensor) -> Tensor | float:
        """The derivative of a logit z with respect to y."""
        if self.softcap is None:
            return self.slope
        return self.slope * (1 - (z * (self.temperature / self.softcap)).square())

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Computes a tile of logits.

        Args:
            hidden: [tokens, size].  weight: [rows, size], of the same dtype.  bias: [rows].

        Returns:
            The logits, float32 [tokens, rows], and the derivative of tanh at each if there is a `softcap`.
        """
        product = _product(hidden, weight.t())
        if bias is not None:
            product.add_(bias)
        if self.softcap is None:
            return product.mul_(self.slope) if self.slope != 1 else product, None
        tanh = product.mul_(self.logit_scale / self.softcap).tanh_()
        derivative = 1 - tanh.square()
        return tanh.mul_(self.softcap / self.temperature), derivative

    def tile(self, tokens: int, vocabulary: int, size: int, device: torch.device) -> tuple[int, int]:
        """Returns the numbers of tokens and of rows of the vocabulary in a tile. `size` is the size of a hidden state.

        Raises:
            ConfigError: `memory` is not enough for one of each.
        """
        memory, needed = self.memory or default_memory(device), 2 * _ROW * size + _TILE
        if memory < needed:
            raise ConfigError(
                f"head_memory={memory:,} bytes is not enough for one row of a vocabulary matrix with {size} columns, "
                f"which needs {needed:,}. The default is larger"
            )
        side, row = memory / _TILE, _ROW * size / _TILE
        square = int(math.sqrt(row**2 + side) - row)
        parts = -(-tokens // max(square, 1))
        tokens = max(1, -(-tokens // max(parts, 1)))
        rows = max(1, int((side - row * tokens) / (row + tokens)))
        return tokens, min(rows if rows < 64 else rows // 64 * 64, vocabulary)


def default_memory(device: torch.device) -> int:
    """Returns the default memory for the temporaries of a head or an embedding, in bytes."""
    return MEMORY if device.type == "cpu" else GPU_MEMORY


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Returns `left @ right` in float32."""
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to a float32 total."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def find_labels(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns whether the label of each token is among `rows` rows of the vocabulary from row `first` on, bool
    [tokens], and its column in such a tile, int64 [tokens, 1]; any column if it is not. `targets` is int64 [tokens].
    """
    local = targets - first
    return (local >= 0) & (local < rows), local.clamp(0, rows - 1)[:, None]
