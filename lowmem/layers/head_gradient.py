"""The gradient of the weight of an output head, computed block of rows by block of rows, as the optimizer reads it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.layers.autocast import autocast
from lowmem.layers.head_tiles import Head, add_product
from lowmem.tiles.gradients import Contribution
from lowmem.tiles.quantized import plain


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
    def stored_bytes(self) -> int:
        return self.head.available(self.hidden.device) // 2

    @property
    def block_rows(self) -> int:
        return self._tile[1]

    @property
    def _tile(self) -> tuple[int, int]:
        vocabulary, size = self.weight.shape
        return self.head.tile(len(self.hidden), vocabulary, size, self.hidden.device)

    def add_to(self, rows: Tensor, start: int) -> None:
        with autocast(rows.device, None):
            for part in self.head.slices(self.weight[start : start + len(rows)], self.dtype):
                block = rows[part]
                for hidden, of_products in self._tiles(start + (part.start or 0), len(block)):
                    add_product(block, of_products.t(), hidden)

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
        with `count` rows of the weight from `start` on, float32 [tokens, rows].
        """
        rows, step, total = slice(start, start + count), self._tile[0], len(self.weight)
        weight = plain(self.weight[rows]).to(self.dtype)
        bias = None if self.bias is None else self.bias[rows]
        for first in range(0, len(self.hidden), step):
            tokens = slice(first, first + step)
            hidden = self.hidden[tokens].to(self.dtype)
            z, slope = self.head.logits(hidden, weight, bias)
            p = z.sub_(self.log_sums[tokens, None]).exp_()
            del z
            of_products = self.head.of_products(
                p, self.grad[tokens], self.of_targets[tokens], self.targets[tokens], start, total
            )
            yield hidden, of_products if slope is None else of_products.mul_(slope)
