"""Tests of the metric that reports the share of weights a step changes."""

import math

import pytest
import torch
from support.products import in_turn
from torch import nn
from torch.nn import functional as F

import lowmem
from lowmem.step import changes, updates


class Words(nn.Module):
    """At most eight parameters with fewer than 64 elements along each dimension, so that all of them are sampled."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 24, dtype=dtype)
        self.hidden = nn.Linear(24, 30, dtype=dtype)
        self.norm = nn.LayerNorm(30, dtype=dtype)
        self.head = nn.Linear(30, 40, bias=False, dtype=dtype)

    def forward(self, words):
        return F.cross_entropy(self.head(self.norm(self.hidden(self.embedding(words)))).float(), words)


def counted(net, before, grads):
    """Returns the exact share, counted over all elements with a gradient."""
    changed = sum(int(((p != before[n]) & (grads[n] != 0)).sum()) for n, p in net.named_parameters())
    return changed / sum(int((grad != 0).sum()) for grad in grads.values())


@pytest.mark.parametrize(
    ("policy", "rounding", "small"),
    in_turn(
        ["immediate", "two_pass", "deferred"], ["nearest", "stochastic", "compensated"], [updates.SMALL] * 3 + [0] * 3
    ),
)
def test_the_share_covers_all_elements_with_a_gradient(monkeypatch, policy, rounding, small):
    monkeypatch.setattr(updates, "SMALL", small)
    monkeypatch.setattr(changes, "EVERY", 1)
    net = Words()
    opt = lowmem.FusedOptimizer(
        net.named_parameters(), "adalomo", lr=3e-3, weight_decay=0.5, rounding=rounding, policy=policy, compile=False
    )
    for step in range(3):
        words = torch.arange(step, step + 10)  # most rows of the embedding have no gradient
        plain = Words()
        plain.load_state_dict(net.state_dict())
        plain(words).backward()
        grads = {name: param.grad for name, param in plain.named_parameters()}
        before = {name: param.detach().clone() for name, param in net.named_parameters()}
        opt.backward(net(words))
        assert float(opt.last_step.changed_share) == pytest.approx(counted(net, before, grads), abs=1e-6)
        assert 0 < float(opt.last_step.changed_share) < 1


def test_elements_are_sampled_evenly_from_a_view():
    for shape in [(), (1,), (5000,), (300, 70), (3, 40, 50), (2, 3, 5, 7)]:
        tensor = torch.arange(math.prod(shape)).view(shape)
        sampled = tensor[changes._where(tensor.shape)]
        assert sampled._base is tensor or sampled._base is tensor._base
        assert min(tensor.numel(), changes.ELEMENTS // 4) <= sampled.numel() <= changes.ELEMENTS * 2 ** len(shape)


def test_frozen_parameters_leave_the_sample(monkeypatch):
    monkeypatch.setattr(changes, "EVERY", 1)
    net = Words()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="adalomo", lr=1e-2, compile=False)
    opt.backward(net(torch.arange(40)))
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    shares = []
    for _ in range(3):
        opt.backward(net(torch.arange(40)))
        shares.append(float(opt.last_step.changed_share))
    assert all(0 < share <= 1 for share in shares)


def test_one_step_in_several_is_measured(monkeypatch):
    """Steps 1 and 2 are measured (a warmup may start at 0), then every third step. Others repeat the last share."""
    monkeypatch.setattr(changes, "EVERY", 3)
    net, shares = Words(), []
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="lomo", lr=0.0)
    for rate in (0.0, 0.1, 0.0, 0.1, 0.0):
        opt.param_groups[0]["lr"] = rate
        opt.backward(net(torch.arange(40)))
        shares.append(float(opt.last_step.changed_share))
    assert shares[0] == 0 < shares[1] and shares[2:] == [0.0] * 3


def test_a_skipped_step_has_no_share(monkeypatch):
    monkeypatch.setattr(changes, "EVERY", 1)
    net = Words()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule="adalomo", policy="deferred", loss_scale=2.0)
    opt.backward(net(torch.arange(40)))
    opt.backward(net(torch.arange(40)) * math.nan)
    assert opt.last_step.skipped
    assert not float(opt.last_step.changed_share) > 0
