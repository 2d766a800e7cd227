"""The gradient of the weight of an output head, computed block of rows by block of rows, as the optimizer reads it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.layers.autocast import autocast
from lowmem.layers.head_tiles import Head, add_product, find_labels
from lowmem.tiles.gradients import Contribution
from lowmem.tiles.quantized import plain

# Bytes of the float32 copy of rows of the weight that a CPU multiplies at a time. The allocator takes a larger one from
# the system and returns it each time, which for few tokens takes longer than the products.
_CPU_SLICE = 8 << 20


@dataclass(frozen=True, eq=False)
class HeadGradient(Contribution):
    """The gradient of the weight of a head, in one backward.

    Attributes:
        hidden: [tokens, size].  weight: [vocabulary, size].  bias: [vocabulary].  targets: int64 [tokens].
        log_sums: log-sum-exp of the logits of each token, float32 [tokens].
        grad, of_targets: derivatives of the loss with respect to each log-sum-exp, and to minus the logit of each
            label: float32 [tokens].
        dtype: of products.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    log_sums: Tensor
    grad: Tensor
    of_targets: Tensor
    head: Head
    dtype: torch.dtype

    @property
    def block_rows(self) -> int:
        return self._tile[1]

    @property
    def _tile(self) -> tuple[int, int]:
        vocabulary, size = self.weight.shape
        return self.head.tile(len(self.hidden), vocabulary, size, self.hidden.device)

    def add_to(self, rows: Tensor, start: int) -> None:
        with autocast(rows.device, None):
            at_a_time = max(1, _CPU_SLICE // (4 * rows.shape[1])) if rows.device.type == "cpu" else len(rows)
            for part in rows.split(at_a_time):
                for hidden, of_products in self._tiles(start, len(part)):
                    add_product(part, of_products.to(self.dtype).t(), hidden)
                start += len(part)

    def of_bias(self) -> Tensor:
        """Returns the gradient of the bias, float32 [vocabulary]."""
        grad = torch.zeros(len(self.weight), dtype=torch.float32, device=self.hidden.device)
        with autocast(grad.device, None):
            for start in range(0, len(grad), self.block_rows):
                for _, of_products in self._tiles(start, self.block_rows):
                    grad[start : start + self.block_rows] += of_products.sum(0)
        return grad

    def _tiles(self, start: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, for some tokens after others, their hidden states [tokens, size] and the gradient of their products
        with `count` rows of the weight from `start` on, [tokens, rows].
        """
        rows, step = slice(start, start + count), self._tile[0]
        weight = plain(self.weight[rows]).to(self.dtype)
        bias = None if self.bias is None else self.bias[rows]
        for first in range(0, len(self.hidden), step):
            tokens = slice(first, first + step)
            hidden = self.hidden[tokens].to(self.dtype)
            z, slope = self.head.logits(hidden, weight, bias)
            of_products = self._of_products(z, tokens, start)
            del z
            yield hidden, of_products if slope is None else of_products.mul_(slope)

    def _of_products(self, z: Tensor, tokens: slice, start: int) -> Tensor:
        """Returns the gradient of a tile's products from its logits, in their memory, without the factor of tanh."""
        head, grad = self.head, self.grad[tokens] * self.head.slope
        p = z.sub_(self.log_sums[tokens, None]).exp_().mul_(grad[:, None])
        if head.label_smoothing:
            p.sub_(grad[:, None], alpha=head.label_smoothing / len(self.weight))
        here, at = find_labels(self.targets[tokens], start, z.shape[1])
        of_targets = self.of_targets[tokens] * head.slope
        return p.scatter_add_(1, at, torch.where(here, (head.label_smoothing - 1) * of_targets, 0.0)[:, None])
