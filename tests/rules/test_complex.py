"""Complex parameters next to real ones: trained as torch's own optimizer trains them, or refused by name."""

import pytest
import torch
from support.devices import seeded
from support.nets import same, weights
from torch import nn
from torch.nn.utils import clip_grad_norm_

import lowmem
from lowmem.errors import UnsupportedError

STEPS = 4


class Fourier(nn.Module):
    """A layer on frequencies with a complex weight, and one after it, real unless `of` says otherwise."""

    def __init__(self, dtype=torch.complex64, of=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.spectrum = nn.Parameter(torch.randn(64, 33, dtype=dtype) * 0.2)
        self.head = nn.Linear(64, 3, bias=False, dtype=of)

    def forward(self, x):
        mixed = torch.einsum("bi,oi->bo", torch.fft.rfft(x).to(self.spectrum.dtype), self.spectrum)
        return self.head((mixed.abs() + mixed.real).to(self.head.weight.dtype)).abs().square().mean()


def batch(n):
    return torch.randn(4, 64, generator=seeded(n))


def ordinary(cls, clip=None, micro_batches=1, dtype=torch.complex64, norm_type=2.0, of=torch.float32, **options):
    net = Fourier(dtype, of)
    opt = cls(net.parameters(), lr=1e-3, foreach=False, **options)
    for step in range(STEPS):
        for n in range(micro_batches):
            (net(batch(10 * step + n)) / micro_batches).backward()
        if clip is not None:
            norm = clip_grad_norm_(net.parameters(), clip, norm_type=norm_type)
        opt.step()
        opt.zero_grad()
    return weights(net), norm if clip is not None else None


def fused(rule, micro_batches=1, dtype=torch.complex64, of=torch.float32, **options):
    net = Fourier(dtype, of)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, rule=rule, lr=1e-3, **options)
    for step in range(STEPS):
        for n in range(micro_batches - 1):
            with opt.accumulate():
                opt.backward(net(batch(10 * step + n)) / micro_batches)
        opt.backward(net(batch(10 * step + micro_batches - 1)) / micro_batches)
    return weights(net), opt.last_step.grad_norm


CLASSES = ["AdamW", "SGD", "Adam", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Rprop", "Adadelta", "ASGD"]


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_torch_that_takes_them(name):
    cls = getattr(torch.optim, name)
    assert same(fused(cls, foreach=False)[0], ordinary(cls)[0])


def test_complex128():
    found = fused(torch.optim.AdamW, dtype=torch.complex128)[0]
    assert same(found, ordinary(torch.optim.AdamW, dtype=torch.complex128)[0])


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("options", [{"policy": "two_pass"}, {"policy": "deferred"}], ids=str)
def test_clipping_and_accumulation(options, micro_batches, norm_type):
    if micro_batches > 1 and options.get("policy") == "two_pass":
        options = {"policy": "auto"}
    of = torch.complex64  # torch sums norms of several dtypes in another order than that of the parameters
    expected, norm = ordinary(torch.optim.AdamW, 0.05, micro_batches, norm_type=norm_type, of=of)
    found, total = fused(torch.optim.AdamW, micro_batches, clip_norm=0.05, norm_type=norm_type, of=of, **options)
    assert same(found, expected)
    assert norm_type != 2.0 or torch.equal(total.float(), norm)


def test_clipping_next_to_real_ones():
    expected, norm = ordinary(torch.optim.AdamW, 0.05)
    found, total = fused(torch.optim.AdamW, clip_norm=0.05)
    torch.testing.assert_close(total.float(), norm, rtol=1e-6, atol=0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_the_norm_is_reported_where_nothing_clips():
    net = Fourier()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=torch.optim.SGD, lr=0.1)
    opt.backward(net(batch(0)))
    other = Fourier()
    other(batch(0)).backward()
    norms = [param.grad.abs().double().norm() for param in other.parameters()]
    torch.testing.assert_close(opt.last_step.norms.double(), torch.stack(norms), rtol=1e-6, atol=0)
    assert float(opt.last_step.changed_share) > 0.9


def test_by_hand():
    net, other = Fourier(), Fourier()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=torch.optim.AdamW, lr=1e-3)
    plain = torch.optim.AdamW(other.parameters(), lr=1e-3, foreach=False)
    for each, of in ((net, opt), (other, plain)):
        for step in range(STEPS):
            params = list(each.parameters())
            for param, grad in zip(params, torch.autograd.grad(each(batch(step)), params), strict=True):
                param.grad = grad
            of.step()
            of.zero_grad()
    assert same(weights(net), weights(other)) and opt.last_step.step == STEPS


def test_resumed():
    net = Fourier()
    opt = lowmem.FusedOptimizer(net.named_parameters(), rule=torch.optim.AdamW, lr=1e-3)
    for step in range(2):
        opt.backward(net(batch(10 * step)))
    other = Fourier()
    other.load_state_dict(net.state_dict())
    resumed = lowmem.FusedOptimizer(other.named_parameters(), rule=torch.optim.AdamW, lr=1e-3)
    resumed.load_state_dict(opt.state_dict())
    for step in range(2, STEPS):
        resumed.backward(other(batch(10 * step)))
    assert same(weights(other), ordinary(torch.optim.AdamW)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "adamw"}, r"'spectrum' of shape \[64, 33\] is torch\.complex64; rule 'adamw' updates float32"),
        ({"rule": "adalomo"}, r"'spectrum' of shape \[64, 33\] is torch\.complex64; rule 'adalomo' updates float32"),
        (
            {"rule": torch.optim.AdamW, "clip_value": 1.0},
            r"'spectrum' is complex, .* without loss_scale and clip_value",
        ),
        ({"rule": torch.optim.AdamW, "loss_scale": 2.0}, r"'spectrum' is complex, .* torch\.view_as_complex\(param\)"),
    ],
    ids=str,
)
def test_what_is_not_exact_is_refused(options, message):
    net = Fourier()
    with pytest.raises(UnsupportedError, match=message):
        lowmem.FusedOptimizer(net.named_parameters(), lr=1e-3, **options)
    net.spectrum.requires_grad_(False)  # costs nothing, and is not asked about
    lowmem.FusedOptimizer(net.named_parameters(), lr=1e-3, **options).remove()
