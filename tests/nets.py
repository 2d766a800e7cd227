"""A model of every kind of parameter, and data for it, for tests of placements."""

import torch

STEPS = 10
ROWS = 6  # a step, over all ranks: 6, 3 or 2 each


class Net(torch.nn.Module):
    """Odd shapes from 0-D to 4-D, experts [E, in, out], a tied weight, a frozen one, a branch that some data skips."""

    def __init__(self, scalar=()):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(7, 5))
        self.convolution = torch.nn.Conv2d(1, 3, (2, 3))
        self.experts = torch.nn.Parameter(torch.randn(3, 12, 5) * 0.3)
        self.gain = torch.nn.Parameter(torch.full(scalar, 1.3))
        self.one = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.seldom = torch.nn.Linear(5, 5)
        self.never = torch.nn.Linear(2, 2)

    def forward(self, ids):
        x = self.embed[ids]  # [rows, 5, 5]
        spread = self.convolution(x.unsqueeze(1)).flatten(2).mean(1)  # [rows, 12]
        mixed = torch.einsum("ri,eio->ro", spread, self.experts) * self.gain + self.one + self.frozen
        odd = ids[:, 0] % 2 == 1
        if odd.any():
            mixed = mixed + odd[:, None] * self.seldom(mixed)
        logits = mixed @ self.embed.T  # tied
        return torch.nn.functional.cross_entropy(logits, ids[:, -1])


def data():
    """Ten batches for all ranks together."""
    source = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        ids = torch.randint(7, (ROWS, 5), generator=source)
        if step % 3 == 1:
            ids[1:, 0] = 2 * (ids[1:, 0] // 2)  # only the first rank, if any, has odd rows
        yield ids
