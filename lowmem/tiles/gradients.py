"""Gradients that are computed as they are read: a block of rows at a time, again in each pass if it is not stored.

The gradients of an output head and of an embedding have a row per word of the vocabulary, and are larger than any
other. The tensors that they are computed from are small: hidden states, or indices and the gradient of the output.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowmem.tiles.layout import Layout, Rectangle, View

# Gradients are computed as they are read if the tensors for it take this many times less memory. With more tokens a
# dense gradient is hardly larger, and it is computed only once.
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
    def stored_bytes(self) -> int:
        """Bytes for rows of the gradient that are not computed again."""
        return 0

    @property
    @abstractmethod
    def block_rows(self) -> int:
        """Rows to compute at a time, so that they and their temporaries take a limited amount of memory."""

    @abstractmethod
    def add_to(self, rows: Tensor, start: int) -> None:
        """Adds the rows of the contribution that begin at `start` to float32 `rows` [block, cols]."""


@dataclass(eq=False)
class ComputedGradient:
    """The gradient of a contiguous matrix [rows, cols] as the sum of contributions, which are added as it is read.

    Rows of the gradient may depend on the same rows of the parameter. So a sweep writes rows of the parameter after it
    has read their gradient for the last time. All other tensors are copies (`Contribution.copy`), since parameters are
    updated while backward runs and buffers are reused. The training loop may change the parameter between two
    backwards, so a gradient that is stored over the end of a backward is converted to a tensor.

    Attributes:
        shape: [rows, cols], of the full parameter.  device: where it is computed.
        contributions: the terms of its sum.
        dtype: in which it is read.
    """

    shape: tuple[int, ...]
    device: torch.device
    contributions: Sequence[Contribution]
    dtype: torch.dtype = torch.float32
    _computed: set[int] = field(default_factory=set, init=False)  # first rows of the stored blocks that are known
    _held: tuple[int, Tensor] | None = field(default=None, init=False)  # the other block that was read last

    def is_contiguous(self) -> bool:
        """Returns True, as its blocks are contiguous."""
        return True

    @property
    def block_rows(self) -> int:
        """Number of rows per block; the last one may have fewer."""
        return min(self.shape[0], *(part.block_rows for part in self.contributions))

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the first row and the float32 values [rows, cols] of each block, which may be changed in place."""
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
        """Returns `count` elements from `start` on in row-major order, float32, padded with zeros."""
        rows, cols = self.shape
        stop = min(start + count, rows * cols)
        if start >= stop:
            return torch.zeros(count, dtype=torch.float32, device=self.device)
        first = start // cols
        flat = self._rows(first, -(-stop // cols)).view(-1)[start - first * cols : stop - first * cols]
        return torch.nn.functional.pad(flat, (0, start + count - stop))

    def add_to(self, total: Tensor) -> None:
        """Adds the gradient to a tensor of the parameter's shape."""
        for start, block in self.blocks():
            total[start : start + len(block)] += block

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the gradient as one tensor, rounded once."""
        grad = torch.empty(self.shape, dtype=dtype, device=self.device)
        for start, block in self.blocks():
            grad[start : start + len(block)] = block
        return grad

    def layout(self, view: View) -> Layout:
        """Returns a layout of the parameter with rectangles that each lie within one block."""
        rows, cols = self.shape
        return _in_blocks(rows, cols, view, self.block_rows)

    def view(self, rectangle: Rectangle) -> Tensor:
        """Returns the gradient of a rectangle of `layout(...)`, [b, r, c]."""
        here = replace(rectangle, start=0, stop=rectangle.stop - rectangle.start)
        return here.view(self.read(rectangle.start // self.shape[1]))

    def read(self, start: int) -> Tensor:
        """Returns the block that begins at row `start`. Blocks that are not stored last until another one is read."""
        stop = min(start + self.block_rows, self.shape[0])
        if stop <= len(self._stored):
            if start not in self._computed:
                self._stored[start:stop] = self._rows(start, stop)
                self._computed.add(start)
            return self._stored[start:stop]
        if self._held is None or self._held[0] != start:
            self._held = None  # freed before the next one is allocated
            self._held = start, self._rows(start, stop).to(self.dtype)
        return self._held[1]

    @functools.cached_property
    def _stored(self) -> Tensor:
        """The first rows, which are computed once."""
        rows, cols = self.shape
        fit = min(part.stored_bytes for part in self.contributions) // (cols * self.dtype.itemsize)
        fit = rows if rows <= fit else fit - fit % self.block_rows
        return torch.empty(fit, cols, dtype=self.dtype, device=self.device)


@functools.lru_cache(maxsize=64)
def _in_blocks(rows: int, cols: int, view: View, block_rows: int) -> Layout:
    """Returns the layout of a matrix that is cut every `block_rows` rows."""
    rectangles: list[Rectangle] = []
    for start in range(0, rows, block_rows):
        first, last = start * cols, min(start + block_rows, rows) * cols
        layout = Layout.of((rows, cols), view, first, last)
        rectangles += [replace(r, start=r.start + first, stop=r.stop + first) for r in layout.rectangles]
    return Layout(view.sizes((rows, cols)), tuple(rectangles))


Gradient = Tensor | ComputedGradient


def dense(grad: Gradient, dtype: torch.dtype) -> Tensor:
    """Returns a gradient as a tensor: itself, or computed in a dtype."""
    return grad if isinstance(grad, Tensor) else grad.dense(dtype)
