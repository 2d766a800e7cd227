"""Losses, metrics and models that read lazy logits get the results of a matrix of logits.

The reference is the linear layer itself. Reads by tiles must not materialize the matrix.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from support.devices import seeded
from torch.nn import functional as F

from lowmem.layers.logits import LazyHead

VOCABULARY, SIZE, BATCH, TOKENS = 301, 16, 3, 7
IDS = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=seeded(1))
MASK = torch.rand(BATCH, TOKENS, generator=seeded(2)) > 0.5
LABELS = IDS.masked_fill(MASK, -100)


def loss(logits, labels=LABELS, **options):
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.flatten(), **options)


def log_probs(logits, ids=IDS):
    """TRL's selective_log_softmax for float32."""
    chosen = torch.gather(logits, dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def log_probs_by_rows(logits, ids=IDS):
    """TRL's selective_log_softmax for 16-bit dtypes."""
    rows = [
        F.log_softmax(row, dim=-1).gather(dim=-1, index=i.unsqueeze(-1)) for row, i in zip(logits, ids, strict=True)
    ]
    return torch.stack(rows).squeeze(-1)


def entropy(logits):
    """TRL's entropy_from_logits, which may materialize some of the rows."""
    parts = []
    for part in logits.reshape(-1, logits.shape[-1]).split(2, dim=0):
        logs = F.log_softmax(part, dim=-1)
        parts.append(-(torch.exp(logs) * logs).sum(-1))
    return torch.cat(parts).reshape(logits.shape[:-1])


def cap(logits, most=0.5):
    return torch.tanh(logits / most) * most


IN_TILES = {
    "a loss": loss,
    "shifted": lambda z: loss(z[..., :-1, :].contiguous().float(), LABELS[..., 1:].contiguous(), reduction="sum"),
    "padded": lambda z: loss(z.float().view(-1, VOCABULARY), F.pad(LABELS, (0, 1), value=-100)[..., 1:]),
    "of each token, smoothed": lambda z: loss(z.flatten(0, 1), reduction="none", label_smoothing=0.1),
    "divided": lambda z: loss(z / 8.0),
    "multiplied": lambda z: loss(3 * z * 0.5),
    "capped": lambda z: loss(cap(z).float()),
    "capped from the left": lambda z: loss(0.5 * F.tanh(z / 0.5) / 0.7),
    "log-probabilities": lambda z: log_probs(z[:, :-1, :], IDS[:, 1:]),
    "log-probabilities of capped logits": lambda z: log_probs(cap(z)[:, -4:] / 0.7, IDS[:, -4:]),
    "log-probabilities by rows": lambda z: log_probs_by_rows(z[:, -4:, :], IDS[:, -4:]),
    "no temperature": lambda z: log_probs(z.div_(1.0)),
    "of some samples": lambda z: loss(torch.flatten(z[:2, :-1], end_dim=1), LABELS[:2, :-1]),
    "log-sum-exp": lambda z: torch.logsumexp(2.0 * z, dim=-1, keepdim=True),
    "log-sum-exp alone of capped logits": lambda z: cap(z).logsumexp(-1),
    "chosen logits alone": lambda z: cap(z).gather(-1, IDS[..., None]),
    "mean of chosen rows": lambda z: z[:2][MASK[:2]].mean(),
    "means": lambda z: z.detach().chunk(2, dim=0)[0][MASK[:2]].mean(-1).sum(),
    "sum of chosen samples": lambda z: z[[0, 2], ...].nansum(),
    "sums of chosen samples": lambda z: z.index_select(0, torch.tensor([2, 0])).sum(-1),
    "predictions": lambda z: z[..., :-1, :].contiguous().argmax(dim=-1),
}
BY_MATRIX = {
    "entropy": entropy,
    "changed in place": lambda z: loss(z.mul_(2)),
    "an element that is set": lambda z: (z.__setitem__((..., slice(3)), 0.5), loss(z))[1],
    "masked": lambda z: loss(z.masked_fill(z > 0, 0.5)),
    "two of them": lambda z: torch.cat([z, z]).sin(),
    "added": lambda z: loss(z + 1.0),
    "negative": lambda z: z * -2.0,
    "scaled by a tensor": lambda z: loss(z * torch.tensor(2.0)),
    "smoothed by a trainer": lambda z: (-F.log_softmax(z, dim=-1)).sum(-1, keepdim=True, dtype=torch.float32),
    "in float64": lambda z: z.double().logsumexp(-1) + z.to(torch.float64).logsumexp(-1),
    "the first columns": lambda z: z[..., :SIZE],
    "columns in another order": lambda z: z[:, :, torch.arange(VOCABULARY).flip(0)],
    "one column": lambda z: z[..., 5],
    "one more dimension": lambda z: z[:, None],
    "columns": lambda z: torch.stack(z.unbind(-1)),
    "parts of columns": lambda z: z.split(200, dim=-1)[0],
    "another shape": lambda z: z.reshape(-1),
    "a loss over dimension 1": lambda z: F.cross_entropy(z.transpose(1, 2), LABELS),
    "classes with weights": lambda z: loss(z, weight=torch.linspace(0, 1, VOCABULARY)),
    "probabilities as labels": lambda z: F.cross_entropy(z.flatten(0, 1), z.detach().flatten(0, 1).softmax(-1)),
    "one token": lambda z: z[0, -1].logsumexp(-1),
    "a function of autograd": lambda z: loss(Same.apply(z)),
    "a loss and a function of autograd": lambda z: loss(z) + Same.apply(z).square().mean(),
}


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def run(head, linear, read, dtype=torch.float32):
    """Returns the value read, and the gradients of the hidden states, weight and bias."""
    hidden = torch.randn(BATCH, TOKENS, SIZE, generator=seeded(3)).to(dtype).requires_grad_()
    linear.zero_grad()
    value = read(head(hidden))
    if value.requires_grad:
        (value.float() * torch.linspace(-1, 2, value.numel()).view(value.shape)).sum().backward()
    return value.detach(), hidden.grad, *(param.grad for param in linear.parameters())


@pytest.fixture
def linear():
    layer = torch.nn.Linear(SIZE, VOCABULARY)
    for param in layer.parameters():
        torch.nn.init.uniform_(param, -0.3, 0.3, generator=seeded(4))
    return layer


@pytest.mark.parametrize("name", [*IN_TILES, *BY_MATRIX])
def test_every_read_equals_a_matrix(name, linear, matrices):
    read = {**IN_TILES, **BY_MATRIX}[name]
    head = LazyHead(linear, memory=20_000)
    for context in (nullcontext(), torch.no_grad()):
        with context:
            for actual, expected in zip(run(head, linear, read), run(linear, linear, read), strict=True):
                assert (actual is None) == (expected is None)
                if actual is not None:
                    assert type(actual) is torch.Tensor
                    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
    assert bool(matrices) == (name in BY_MATRIX)
    assert name != "entropy" or {shape[0] for shape in matrices} <= {1, 2}


@pytest.mark.parametrize("name", [*IN_TILES, *BY_MATRIX, "detached"])
def test_weights_are_gathered_where_they_are_read(name, linear, monkeypatch):
    """ZeRO-3 gathers weights, and also detaches the logits of a reference model."""
    read = {**IN_TILES, **BY_MATRIX, "detached": lambda z: loss(z.detach())}[name]
    full = {param: param.data for param in linear.parameters()}

    @contextmanager
    def gathered(*params):
        before = [param.data for param in params]
        for param in params:
            param.data = full[param]
        yield
        for param, data in zip(params, before, strict=True):
            param.data = data

    monkeypatch.setattr("lowmem.layers.logits.gathered", gathered)
    with torch.no_grad():
        expected, *_ = run(linear, linear, read)
        for param in linear.parameters():
            param.data = torch.empty(0)
        actual, *_ = run(LazyHead(linear, memory=20_000), linear, read)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


def test_shape_and_dtype_need_no_matrix(linear, matrices):
    logits = LazyHead(linear)(torch.zeros(2, 5, SIZE))
    assert (logits.shape, logits.dtype, logits.ndim) == ((2, 5, VOCABULARY), torch.float32, 3)
    assert logits.bfloat16().dtype == torch.bfloat16
    assert logits.requires_grad and not logits.detach().requires_grad
    assert isinstance(logits, torch.Tensor) and len(logits) == 2
    assert not matrices


def test_autocast_applies_as_in_the_head(linear):
    head = LazyHead(linear)
    device = linear.weight.device.type
    with torch.autocast(device, torch.bfloat16):
        logits, expected = head(torch.ones(2, SIZE)), linear(torch.ones(2, SIZE))
    assert logits.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(logits + 0, expected)
    ours, other = (F.cross_entropy(z.float(), IDS[0, :2]) for z in (logits, expected))
    torch.testing.assert_close(ours, other, rtol=1e-2, atol=1e-2)
