"""Gradients that are computed as they are read: a block of rows at a time, as often as a rule has passes.

The gradient of a vocabulary matrix, which an output head and an embedding have, is larger than any other, and what it
is computed from is small: hidden states, or the indices and the gradient of what an embedding returned.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowmem.tiles.layout import Layout, Rectangle, View

# Gradients are computed as they are read where what they are computed from takes this many times less memory. For more
# tokens a tensor is hardly larger, and computed once.
TIMES_LESS = 4


def saves_memory(inputs: Iterable[Tensor], dense: int) -> bool:
    """Returns whether to store these tensors in place of a gradient of `dense` bytes that is computed from them."""
    return sum(tensor.nbytes for tensor in inputs) * TIMES_LESS <= dense


@dataclass(frozen=True, eq=False)
class Contribution(ABC):
    """The part of a gradient that one use of the parameter adds. If it depends on the parameter, that is `weight`."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors from which it is computed, except the parameter."""
        values = {name: value for name, value in vars(self).items() if name != "weight"}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def copy(self) -> "Contribution":
        """Returns the same contribution from copies of its inputs."""
        return replace(self, **{name: tensor.detach().clone() for name, tensor in self.inputs.items()})

    @property
    @abstractmethod
    def block_rows(self) -> int:
        """Rows to compute at a time, so that they and their temporaries take a limited amount of memory."""

    @abstractmethod
    def add_to(self, rows: Tensor, start: int) -> None:
        """Adds rows of the contribution, from `start` on, to float32 `rows` [block, cols]."""


@dataclass(eq=False)
class ComputedGradient:
    """The gradient of a contiguous matrix [rows, cols] as the sum of contributions, which are added as it is read.

    Contributions may depend on the parameter: rows of the gradient on the same rows of it alone. So a sweep may write
    rows of the parameter once it has read the gradient of those rows for the last time. Of everything else they have
    copies (`Contribution.copy`), since parameters are updated while backward runs and buffers are reused. The training
    loop may change the parameter between two backwards: what is stored over the end of a backward is a tensor.

    Attributes:
        shape: [rows, cols], of the full parameter.  device: where it is computed.
        contributions: what it is the sum of.
    """

    shape: tuple[int, ...]
    device: torch.device
    contributions: Sequence[Contribution]
    _held: tuple[int, Tensor] | None = field(default=None, init=False)  # the block that was read last, and its number

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read."""
        return torch.float32

    def is_contiguous(self) -> bool:
        """As a tensor; its blocks are."""
        return True

    @property
    def block_rows(self) -> int:
        """Rows of a block, of which the last one may have fewer."""
        return min(self.shape[0], *(part.block_rows for part in self.contributions))

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Each block as float32 [rows, cols], with the number of its first row. It may be changed in place."""
        for start in range(0, self.shape[0], self.block_rows):
            yield start, self._rows(start, start + self.block_rows)

    def _rows(self, start: int, stop: int) -> Tensor:
        rows, cols = self.shape
        block = torch.zeros(min(stop, rows) - start, cols, dtype=torch.float32, device=self.device)
        for part in self.contributions:
            for first in range(0, len(block), part.block_rows):
                part.add_to(block[first : first + part.block_rows], start + first)
        return block

    def elements(self, start: int, count: int) -> Tensor:
        """Returns `count` elements from `start` on, in the order of rows, float32, padded with zeros."""
        rows, cols = self.shape
        stop = min(start + count, rows * cols)
        if start >= stop:
            return torch.zeros(count, dtype=torch.float32, device=self.device)
        first = start // cols
        flat = self._rows(first, -(-stop // cols)).view(-1)[start - first * cols : stop - first * cols]
        return torch.nn.functional.pad(flat, (0, start + count - stop))

    def add_to(self, total: Tensor) -> None:
        """Adds all of it to a tensor of the parameter's shape."""
        for start, block in self.blocks():
            total[start : start + len(block)] += block

    def dense(self, dtype: torch.dtype) -> Tensor:
        """All of it as one tensor, rounded once."""
        grad = torch.empty(self.shape, dtype=dtype, device=self.device)
        for start, block in self.blocks():
            grad[start : start + len(block)] = block
        return grad

    def layout(self, view: View) -> Layout:
        """The parameter in rectangles of which each lies in one block."""
        rows, cols = self.shape
        return _in_blocks(rows, cols, view, self.block_rows)

    def view(self, rectangle: Rectangle) -> Tensor:
        """The gradient of a rectangle of `layout(...)`: [batch, rows, cols]."""
        here = replace(rectangle, start=0, stop=rectangle.stop - rectangle.start)
        return here.view(self.read(rectangle.start // self.shape[1]))

    def read(self, start: int) -> Tensor:
        """The block that begins at row `start`, which stays until another one is read."""
        if self._held is None or self._held[0] != start:
            self._held = None  # freed before the next one is allocated
            self._held = start, self._rows(start, start + self.block_rows)
        return self._held[1]


@functools.lru_cache(maxsize=64)
def _in_blocks(rows: int, cols: int, view: View, block_rows: int) -> Layout:
    """The layout of a matrix that is cut every `block_rows` rows."""
    rectangles: list[Rectangle] = []
    for start in range(0, rows, block_rows):
        first, last = start * cols, min(start + block_rows, rows) * cols
        layout = Layout.of((rows, cols), view, first, last)
        rectangles += [replace(r, start=r.start + first, stop=r.stop + first) for r in layout.rectangles]
    return Layout(view.sizes((rows, cols)), tuple(rectangles))


Gradient = Tensor | ComputedGradient
