"""Compares 8-bit AdamW of torchao, bitsandbytes and pytorch_optimizer (FlashAdamW) with rule "adamw".

With states in another package's format, registered as a storage, every step equals that package's step. With states in
lowmem's formats, the result of 200 steps of a regression is about as close to float32 as theirs, or closer.
"""

import functools
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from judged import judge, report
from support.products import FULL
from torch import Tensor, nn

import lowmem
from lowmem.tiles.rounding import widen8
from lowmem.tiles.storage import TABLE, Part, Storage, Uniform

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
COLS, ROWS, STEPS = 256, 64, 200


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Disables compilation, since torchao would compile its step for every shape and dtype."""
    with torch.compiler.set_stance("force_eager"):
        yield


# -- third-party formats -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torchao(Storage):
    """Uses a table with steps about proportional to the value, and blocks of 256 with one float32 scale each."""

    signed: bool
    parts = (Part("", torch.uint8), Part("scale", torch.float32, 256))

    @property
    def table(self):
        from torchao.optim import subclass_8bit

        return torch.tensor(subclass_8bit.get_qmap_signed() if self.signed else subclass_8bit.get_qmap_unsigned())

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        from torchao.optim.quant_utils import dequant_with_qmap

        return dequant_with_qmap(stored[0], self.table, stored[1].flatten())

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

        scaled, scale = scale_tensor(value.contiguous(), 256)
        return quantize_8bit_with_qmap(scaled, self.table), scale.view(*value.shape[:-1], -1)


@dataclass(frozen=True)
class Bitsandbytes(Storage):
    """Uses the same table and blocks as torchao. A block of zeros has a scale of zero."""

    signed: bool
    parts = Torchao.parts

    @property
    def table(self):
        from bitsandbytes.functional import create_dynamic_map

        return create_dynamic_map(signed=self.signed)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scale = stored[0].contiguous(), stored[1].flatten()
        return torch.ops.bitsandbytes.dequantize_blockwise(codes, scale, self.table, 256, torch.float32)

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        codes, scale = torch.ops.bitsandbytes.quantize_blockwise(value.contiguous(), self.table, 256)
        return codes, scale.view(*value.shape[:-1], -1)


@dataclass(frozen=True)
class Flash(Storage):
    """FlashAdamW's format: groups of 32, and float16 scales of the mean and of the root of the mean of g²."""

    signed: bool

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        return Part("", torch.int8 if self.signed else torch.uint8), Part("scale", torch.float16, 32)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        from pytorch_optimizer.optimizer.flash_adamw import dequantize_state

        return dequantize_state(stored[0], stored[1].flatten(), self.signed, not self.signed, self.signed)

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        from pytorch_optimizer.optimizer.flash_adamw import quantize_state

        codes, scale = quantize_state(value, self.signed, not self.signed, self.signed)
        return codes, scale.view(*value.shape[:-1], -1)


@contextmanager
def registered(kind):
    name = f"format of {kind.__name__}"
    lowmem.storage.register(name)(lambda dtype, signed: kind(signed))
    try:
        yield name
    finally:
        del TABLE[name]


# -- a regression ------------------------------------------------------------------------------------------------------


def start():
    """Returns weights that bfloat16 represents exactly."""
    return (torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) / 16).bfloat16().float()


def batches(steps=STEPS, seed=1):
    """Yields inputs and noisy targets. Input columns are scaled from 0.01 to 1 so that moments in a group differ."""
    source = torch.Generator().manual_seed(seed)
    truth = torch.randn(ROWS, COLS, generator=source) / 16
    for _ in range(steps):
        x = torch.randn(64, COLS, generator=source) * torch.linspace(0.01, 1, COLS)
        yield x, x @ truth.t() + 0.1 * torch.randn(64, ROWS, generator=source)


def loss_of(param, batch):
    return (batch[0] @ param.float().t() - batch[1]).square().mean()


def plain(param, opt, data):
    for batch in data:
        loss_of(param, batch).backward()
        opt.step()
        opt.zero_grad()
        yield


def fused(param, data, **options):
    """Yields the optimizer after every step."""
    opt = lowmem.FusedOptimizer([("w", param)], rule="adamw", compile=False, **HYPER, **options)
    for batch in data:
        opt.backward(loss_of(param, batch))
        yield opt


def theirs(cls, dtype=torch.float32, seed=1, **options):
    """Returns the weight after all steps, and its optimizer."""
    param = nn.Parameter(start().to(dtype))
    opt = cls([param], **HYPER, **options)
    for _ in plain(param, opt, batches(seed=seed)):
        pass
    return param, opt


def ours(dtype=torch.float32, seed=1, **options):
    """Returns the values of the weight after all steps."""
    param = nn.Parameter(start().to(dtype))
    *_, opt = fused(param, batches(seed=seed), **options)
    state = opt.named_state_dict()["state"]["w"]
    assert state["exp_avg"].dtype == torch.int8
    return widen8(param.detach(), state["residual"]) if "residual" in state else param.detach()


@functools.cache
def reference(seed=1):
    """Returns the final weight of float32 AdamW."""
    return theirs(torch.optim.AdamW, seed=seed, foreach=False)[0].detach()


def distance(value, other, seed=1):
    """Returns the distance of two weights as a fraction of the total change of the weight."""
    return ((value - other).norm() / (reference(seed) - start()).norm()).item()


# -- step by step in their format --------------------------------------------------------------------------------------


def follows(cls, kind, names, steps=50, **options):
    """Returns whether every step equals the step of `cls`, with at most 3 different codes in a thousand.
    Sums are rounded in another order, so a value between two codes may get the other one."""
    param, other = nn.Parameter(start()), nn.Parameter(start())
    ordinary = cls([other], **HYPER | options)
    with registered(kind) as name:
        ours = fused(param, batches(steps), state_storage=name)
        for opt, _ in zip(ours, plain(other, ordinary, batches(steps)), strict=True):
            state, their_state = opt.named_state_dict()["state"]["w"], ordinary.state[other]
            for own, its in zip(("exp_avg", "exp_avg_sq"), names, strict=True):
                codes = getattr(their_state[its], "codes", their_state[its])
                if state[own].dtype != codes.dtype or (state[own] != codes).float().mean() > 3e-3:
                    return False
            apart = ((param - other).norm() / (other - start()).norm()).item()
            if apart > 2e-3:
                return False
    print(f"\n  {cls.__module__}.{cls.__name__}: {apart:.1e} of the way apart after {steps} steps")
    return not torch.equal(param, start())


def in_their_format(cls, kind, names):
    """Compares with `cls`, and checks that a run with another β₂ differs."""
    verdicts = {
        "every step": judge(lambda: follows(cls, kind, names)),
        "not with another β₂": judge(lambda: not follows(cls, kind, names, betas=(0.9, 0.998))),
    }
    report(f"{cls.__name__} of {cls.__module__.partition('.')[0]}, in its format", verdicts, at_least=2)


def test_torchao_in_its_format():
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    in_their_format(optim.AdamW8bit, Torchao, ("exp_avg", "exp_avg_sq"))


def test_bitsandbytes_in_its_format():
    in_their_format(bitsandbytes_adamw(), Bitsandbytes, ("state1", "state2"))


def test_flash_in_its_format():
    optim = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    in_their_format(optim.FlashAdamW, Flash, ("exp_avg::quantized", "exp_avg_sq::quantized"))


def bitsandbytes_adamw():
    """Returns the class if its 8-bit update runs on a CPU. Versions before 0.50 need a GPU."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    param = nn.Parameter(torch.ones(ROWS, COLS))
    param.grad = torch.ones(ROWS, COLS)
    opt = bitsandbytes.optim.AdamW8bit([param])
    try:
        opt.step()
    except NotImplementedError as error:
        pytest.skip(f"bitsandbytes {bitsandbytes.__version__} has no 8-bit AdamW on a CPU: {error}")
    assert opt.state[param]["state1"].dtype == torch.uint8
    return bitsandbytes.optim.AdamW8bit


def nets_agree(make, storage):
    """Ports torchao's test against bitsandbytes: weights after two steps agree within 1e-5, except one in 100,000 whose
    second moment got the next code. Layers are wide enough for blocks along a row. Vectors have float32 states, as in
    that test.
    """
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 128)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    matrices, vectors = ([p for p in nets[0].parameters() if p.ndim == dims] for dims in (2, 1))
    groups = [{"params": matrices, "state_storage": storage}, {"params": vectors}]
    opt, ordinary = lowmem.FusedOptimizer(groups, rule="adamw", weight_decay=1e-2, lr=1e-3), make(nets[1].parameters())
    for _ in range(2):
        x = torch.randn(4, 256)
        opt.backward(nets[0](x).sum())
        nets[1](x).sum().backward()
        ordinary.step()
        ordinary.zero_grad()
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    close = torch.cat([torch.isclose(one, other, rtol=1e-5, atol=1e-5).flatten() for one, other in pairs])
    return (~close).sum() <= 1e-5 * len(close)


def test_nets_in_their_formats():
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    classes = {optim.AdamW8bit: Torchao, bitsandbytes_adamw(): Bitsandbytes}
    verdicts = {}
    for cls, kind in classes.items():
        with registered(kind) as name:
            verdicts[kind.__name__] = judge(lambda cls=cls, name=name: nets_agree(cls, name))
    report("torchao's test of correctness", verdicts, at_least=2)


# -- formats of this package -------------------------------------------------------------------------------------------


def compare(
    title, cls, limits, dtype=torch.float32, apart=None, value_of=lambda param, state: param.detach(), **options
):
    """Compares the distances from float32 AdamW of lowmem and `cls` for two seeds, as fractions of the total change.

    limits: largest allowed ratio of the two distances, by lowmem options.  apart: largest distance between the two.
    """
    print(f"\n{title}: distance from float32, from the other package, and the mean of what the step was longer")
    verdicts = {}
    for seed in (1, 2):
        param, opt = theirs(cls, dtype, seed, **options)
        other = value_of(param, opt.state[param])
        far = distance(other, reference(seed), seed)
        print(f"  seed {seed}, {cls.__name__}: {far:.4f}, 0, {longer(other, seed):+.4f}")
        for (storage, rounding), limit in limits.items():
            value = ours(dtype, seed, state_storage=storage, rounding=rounding)
            own, between = distance(value, reference(seed), seed), distance(value, other, seed)
            print(f"  seed {seed}, {storage} {rounding}: {own:.4f}, {between:.4f}, {longer(value, seed):+.4f}")
            near = own <= limit * far and between <= apart and abs(longer(value, seed)) < 1e-3
            verdicts[f"{storage} {rounding}, seed {seed}"] = judge(lambda near=near: near)
    report(title, verdicts, at_least=len(verdicts))


def longer(value, seed):
    """Returns how much larger the change was than in float32, as a fraction. Biased second moments make it nonzero."""
    way = reference(seed) - start()
    return ((value - reference(seed)) * way.sign()).mean().item() / way.abs().mean().item()


def test_flash():
    """FlashAdamW with 24-bit master weights has the same residuals, and the same codes of means of g in groups of 32.

    There are three differences. FlashAdamW's scales are float16 and rounded to nearest after division by the largest
    value. lowmem's are bfloat16, rounded up before division, and also represent values below 1e-7. FlashAdamW stores g²
    as 255ths of the largest root, starting at zero. lowmem uses 256ths, starting at one. "8bit" rounds stochastically.

    The distance of "8bit_nearest" from float32 is at most 1.5 times FlashAdamW's. It is larger because a running mean
    does not change if it grows by less than half a step of an 8-bit scale. With float16 scales, the distances are
    equal. "8bit" has rounding noise but no bias. FlashAdamW's steps are 0.1 % too short.
    """
    optim = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    from pytorch_optimizer.optimizer.flash_adamw import reconstruct_fp32_param

    limits = {("8bit_nearest", "compensated8"): 1.5, ("8bit", "compensated8"): 1.6}

    def value_of(param, state):
        return reconstruct_fp32_param(param.detach(), state["error_bits"])

    compare("FlashAdamW", optim.FlashAdamW, limits, torch.bfloat16, 0.015, value_of, master_weight_bits=24)


# Blocks of 256 with a table are three times as far from float32 as groups of 32, and twice as far as groups of 64.
BLOCKS_OF_256 = {("8bit", "auto"): 0.5, ("8bit_nearest", "auto"): 0.5, ("8bit_64", "auto"): 0.7}


def test_torchao():
    """torchao uses float32 weights and a table of codes in blocks of 256."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    compare("torchao's AdamW8bit", optim.AdamW8bit, BLOCKS_OF_256, apart=0.05)


def test_bitsandbytes():
    """bitsandbytes uses float32 weights and the same table and blocks as torchao."""
    if not FULL:
        pytest.skip("with LOWMEM_FULL=1")
    compare("bitsandbytes' AdamW8bit", bitsandbytes_adamw(), BLOCKS_OF_256, apart=0.05)


# -- a second moment of zero -------------------------------------------------------------------------------------------


def largest_step(make):
    """Returns the change of a weight whose gradient is 1e-6, then 0, among gradients of 1. Adam's steps are 1e-3."""
    param = nn.Parameter(torch.zeros(16, COLS))
    step, grad = make(param), torch.ones(16, COLS)
    grad[:, 0] = 1e-6
    for _ in range(3):
        step(grad)
        grad = grad.clone()
        grad[:, 0] = 0.0
    return param.detach()[:, 0].abs().max().item()


def test_small_second_moments():
    """torchao rounds small second moments to zero and divides by 1e-8. lowmem's formats never round them to zero."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")

    def of_torchao(param):
        opt = optim.AdamW8bit([param], lr=1e-3)

        def step(grad):
            param.grad = grad
            opt.step()

        return step

    def of_lowmem(param, storage):
        opt = lowmem.FusedOptimizer([("w", param)], rule="adamw", lr=1e-3, state_storage=storage)
        return lambda grad: opt.backward((param * grad).sum())

    verdicts = {"torchao": judge(lambda: largest_step(of_torchao) > 1e-2)}
    for storage in ("8bit", "8bit_64", "8bit_nearest"):
        verdicts[storage] = judge(lambda storage=storage: largest_step(lambda param: of_lowmem(param, storage)) <= 3e-3)
    report("second moments that are small", verdicts, at_least=4)
