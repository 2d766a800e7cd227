"""Small models and their data, and functions for weights, states and memory."""

import io

import torch
from support.devices import seeded
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from lowmem import placements
from lowmem.placements.base import ParamEntry
from lowmem.tiles.layout import Span

STEPS = 10
ROWS = 6  # rows per step, over all ranks: 6, 3 or 2 on each
LAYERS = 8


class Net(torch.nn.Module):
    """Weights with 0 to 4 dimensions, experts [E, in, out], a tied and a frozen weight, and a data-dependent branch."""

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


class TwoLayers(torch.nn.Module):
    """Two linear layers, `first` and `last`. sizes: the three numbers of features."""

    def __init__(self, *sizes):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (torch.nn.Linear(*sizes[n : n + 2]) for n in range(2))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).square().mean()


class Chain(torch.nn.Module):
    """A sequence of layers."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


class Layers(torch.nn.Module):
    """Layers of the same shape, which are applied in the order of the indices that `forward` receives."""

    def __init__(self, size=4, checkpointed=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for _ in range(LAYERS))
        self.size, self.checkpointed = size, checkpointed

    def forward(self, path):
        x = torch.ones(1, self.size, requires_grad=self.checkpointed)
        for n in path:
            x = checkpoint(self.layers[n], x, use_reentrant=True) if self.checkpointed else self.layers[n](x)
        return x.square().sum()


def data():
    """Yields the global batches of all steps."""
    source = seeded(5)
    for step in range(STEPS):
        ids = torch.randint(7, (ROWS, 5), generator=source)
        if step % 3 == 1:
            ids[1:, 0] = 2 * (ids[1:, 0] // 2)  # only the first rank may have odd rows
        yield ids


def give_gradients(opt, *pairs):
    """Calls `opt.backward` with a loss that has these gradients. pairs: (parameter, gradient or None)."""
    terms = [(param * grad).sum().float() for param, grad in pairs if grad is not None]
    return opt.backward(torch.stack(terms).sum())


def through_file(value, **options):
    """Saves a value with `torch.save` and returns the loaded value."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), **options)


def plain_step(opt, *losses, clip_norm=None):
    """Runs a step of an ordinary optimizer with the sum of all losses. Returns the norm if gradients are clipped."""
    for loss in losses:
        loss.backward()
    params = [param for group in opt.param_groups for param in group["params"]]
    norm = None if clip_norm is None else clip_grad_norm_(params, clip_norm)
    opt.step()
    opt.zero_grad()
    return norm


def records_of(*params):
    """Returns the records that placements have of parameters p0, p1, ..., for tests without an optimizer."""
    spans = [Span(tuple(param.shape), 0, param.numel(), param.numel()) for param in params]
    return [ParamEntry(f"p{n}", p, span) for n, (p, span) in enumerate(zip(params, spans, strict=True))]


def weights(*nets):
    return [param.detach().clone() for net in nets for param in net.parameters()]


def full_weights(net):
    """Returns copies of the weights by name. Sharded weights are gathered."""
    return {name: placements.full_tensor(param).clone() for name, param in net.named_parameters()}


def states(opt):
    """Returns copies of all states by parameter and state name, such as "weight/exp_avg"."""
    saved = opt.named_state_dict()["state"]
    pairs = ((f"{param}/{name}", state) for param, states in saved.items() for name, state in states.items())
    return {name: torch.as_tensor(state).clone() for name, state in pairs}


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name].to(one[name].device)), name


class Memory(MemTracker):
    """Tracks bytes on the default device. existing: tensors created before. above: the peak minus the final bytes."""

    def __init__(self, *existing):
        super().__init__()
        self.track_external(*existing)

    def total(self, when):
        return self.get_tracker_snapshot(when)[torch.empty(0).device]["Total"]

    @property
    def most(self):
        return self.total("peak")

    @property
    def above(self):
        return self.most - self.total("current")
