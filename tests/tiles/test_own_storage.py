"""A storage from outside: int8 with a scale per group of 64, for a weight and for moments."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import lowmem
from lowmem.errors import ConfigError
from lowmem.step import program
from lowmem.tiles.storage import Part, Storage, Uniform, register

GROUP = 64


@dataclass(frozen=True)
class Int8(Storage):
    """Codes from -127 to 127 and a power of two per group of 64 elements of a row."""

    dtype: torch.dtype = torch.bfloat16
    signed: bool = True

    parts = (Part("", torch.int8), Part("scale", torch.float32, GROUP))

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scale = stored
        return (codes.float().unflatten(-1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(-2)

    def encode(self, value: Tensor, uniform: Uniform) -> tuple[Tensor, ...]:
        groups = value.unflatten(-1, (-1, GROUP))
        largest = groups.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 127))), torch.zeros_like(largest))
        codes = torch.where(scale > 0, groups / scale, torch.zeros_like(groups)).round().clamp(-127, 127)
        return codes.flatten(-2).to(torch.int8), scale.squeeze(-1)


@pytest.fixture(autouse=True, scope="module")
def registered():
    register("int8_by_64")(Int8)
    yield
    del lowmem.storage.TABLE["int8_by_64"]


@pytest.fixture(autouse=True)
def small_parameters_in_groups(monkeypatch):
    monkeypatch.setattr(program, "SMALLEST_GROUPED", 1)


def quantised(value):
    """Independent of the sweep: row by row, group by group, in float64."""
    rows = value.double().reshape(-1, GROUP)
    scale = 2.0 ** torch.ceil(torch.log2(rows.abs().amax(-1, keepdim=True) / 127))
    return torch.where(scale > 0, (rows / scale).round() * scale, 0.0).reshape(value.shape).float()


def train(shape, *, steps=3, **options):
    """A parameter after some steps of AdamW, its gradients, and the optimizer."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape))
    opt = lowmem.FusedOptimizer([("w", param)], rule="adamw", lr=1e-2, weight_decay=0.0, compile=False, **options)
    grads = [torch.randn(shape) for _ in range(steps)]
    for grad in grads:
        opt.backward((param * grad).sum())
    return param.detach(), grads, opt


def adamw(weight, grads, *, hold_moment=lambda value: value, hold_square=None, hold_weight=lambda value: value):
    """AdamW in plain torch, in which what is held between steps goes through a function."""
    hold_square = hold_square or hold_moment
    weight, mean, square = hold_weight(weight), torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads, start=1):
        new_mean, new_square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        change = (new_mean / (1 - 0.9**step)) / ((new_square / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = hold_weight(weight - 1e-2 * change)
        mean, square = hold_moment(new_mean), hold_square(new_square)
    return weight


def start(shape):
    torch.manual_seed(0)
    return torch.randn(shape)


SHAPES = [(64,), (5, 128), (3, 4, 64), (2, 2, 3, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_moments(shape):
    weight, grads, opt = train(shape, state_storage="int8_by_64")
    assert {name: tensor.dtype for name, tensor in opt.named_state_dict()["state"]["w"].items()} == {
        "step": torch.int64,
        "exp_avg": torch.int8,
        "exp_avg.scale": torch.float32,
        "exp_avg_sq": torch.int8,
        "exp_avg_sq.scale": torch.float32,
    }
    # a value within float32 rounding of the middle between two codes may take the other one
    torch.testing.assert_close(weight, adamw(start(shape), grads, hold_moment=quantised), rtol=1e-3, atol=1e-4)


def scales(rows):
    """The largest of each group, rounded up to bfloat16."""
    largest = rows.abs().amax(-1, keepdim=True)
    spacing = 2.0 ** (torch.floor(torch.log2(largest.clamp(min=1e-30))) - 7)
    return torch.ceil(largest / spacing) * spacing


def companded(value):
    """Independent of the sweep, in float64: 127 codes of each sign for 2x / (1 + |x|), in groups of 32."""
    rows = value.double().reshape(-1, 32)
    scale = scales(rows)
    x = torch.where(scale > 0, rows / scale, 0.0)
    code = (127 * 2 * x / (1 + x.abs())).round() / 127
    return (code / (2 - code.abs()) * scale).reshape(value.shape).float()


def rooted(value):
    """256 codes for the square root, from 1/256 of the largest on."""
    rows = value.double().reshape(-1, 32)
    scale = scales(rows)
    code = torch.where(scale > 0, (rows / scale).sqrt() * 256, 0.0).round().clamp(1, 256)
    return ((code / 256) ** 2 * scale).reshape(value.shape).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_in_8_bits(shape):
    """As those that are computed in plain torch; few values are so near to a middle that they take another code."""
    weight, grads, opt = train(shape, state_storage="8bit_nearest", steps=5)
    state = opt.named_state_dict()["state"]["w"]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    reference = adamw(start(shape), grads, hold_moment=companded, hold_square=rooted)
    assert ((weight - reference).abs() > 1e-5).float().mean() < 0.01
    exact = adamw(start(shape), grads)
    assert ((weight - exact).abs() > 1e-5).float().mean() > 0.5  # the measure can tell


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight(shape):
    """The parameter shows to the model what is stored."""
    weight, grads, opt = train(shape, rounding="int8_by_64")
    assert torch.equal(weight, quantised(weight))
    state = opt.named_state_dict()["state"]["w"]
    assert (state["codes"].dtype, state["scale"].shape) == (torch.int8, (*shape[:-1], shape[-1] // GROUP))
    assert torch.equal(Int8().decode((state["codes"], state["scale"])), weight)
    reference = adamw(start(shape), grads, hold_weight=quantised)
    # a code is at most 2⁻⁶ of the largest value of its group; few values are so near to a middle that they take another
    assert ((weight - reference).abs() > 1e-5).float().mean() < 0.01


def test_tiles_and_stacks_do_not_show(monkeypatch):
    """Bit for bit: a long row in several tiles, small parameters in stacks or alone."""
    from lowmem.tiles import stored

    one = train((4096,), state_storage="int8_by_64", rounding="int8_by_64")[0]
    monkeypatch.setattr(stored, "CPU_TILE", 1024)
    assert torch.equal(one, train((4096,), state_storage="int8_by_64", rounding="int8_by_64")[0])
    both = {}
    for batching in (True, False):
        params = {f"p{n}": torch.nn.Parameter(torch.full((2, 64), n + 1.0)) for n in range(3)}
        opt = lowmem.FusedOptimizer(
            params.items(), rule="adamw", batching=batching, state_storage="int8_by_64", rounding="int8_by_64"
        )
        for _ in range(2):
            opt.backward(sum((param**2).sum() for param in params.values()))
        both[batching] = [param.detach() for param in params.values()]
    assert all(map(torch.equal, both[True], both[False]))


def test_small_parameters_stay_as_they_are(monkeypatch):
    monkeypatch.undo()
    weight, grads, opt = train((3, 65), state_storage="int8_by_64", rounding="int8_by_64")
    assert opt.named_state_dict()["state"]["w"]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(weight, adamw(start((3, 65)), grads))


def test_resumed_bit_for_bit():
    grads = [torch.randn(4, 64) for _ in range(4)]

    def make():
        param = torch.nn.Parameter(torch.ones(4, 64))
        opt = lowmem.FusedOptimizer([("w", param)], rule="adamw", state_storage="int8_by_64", rounding="int8_by_64")
        return param, opt

    param, opt = make()
    for grad in grads[:2]:
        opt.backward((param * grad).sum())
    other, resumed = make()
    other.data.copy_(param)
    resumed.load_state_dict(opt.state_dict())
    for grad in grads[2:]:
        opt.backward((param * grad).sum())
        resumed.backward((other * grad).sum())
    assert torch.equal(param, other)
    with pytest.raises(lowmem.LowmemError, match="rounding 'int8_by_64'"):
        lowmem.FusedOptimizer([("w", other.detach().requires_grad_())], rule="adamw").load_state_dict(opt.state_dict())


def test_a_step_that_is_skipped_changes_nothing():
    param = torch.nn.Parameter(torch.randn(4, 64))
    opt = lowmem.FusedOptimizer([("w", param)], rule="adamw", state_storage="int8_by_64", rounding="int8_by_64")
    opt.backward(param.square().sum())
    before = {name: tensor.clone() for name, tensor in opt.named_state_dict()["state"]["w"].items()}
    weight = param.detach().clone()
    opt.backward((param * torch.nan).sum())
    assert torch.equal(param, weight)
    assert all(torch.equal(tensor, before[name]) for name, tensor in opt.named_state_dict()["state"]["w"].items())


@pytest.mark.cpu_only("the simulated GPU has no compiler")
def test_compiled():
    if not lowmem.step.compiled.has_compiler("cpu"):
        pytest.skip("no C++ compiler")
    shape = (256, 128)
    eager, _, _ = train(shape, state_storage="int8_by_64")
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape))
    opt = lowmem.FusedOptimizer(
        [("w", param)], rule="adamw", lr=1e-2, weight_decay=0.0, compile=True, state_storage="int8_by_64"
    )
    for grad in [torch.randn(shape) for _ in range(3)]:
        opt.backward((param * grad).sum())
    # where compiled code rounds otherwise, a code may be the next one: a 127th of a moment
    torch.testing.assert_close(param.detach(), eager, rtol=1e-3, atol=5e-4)


def test_registering():
    with pytest.raises(ConfigError, match="already registered"):
        register("int8_by_64")(Int8)
    with pytest.raises(ConfigError, match=r"'int8_by_65' is unknown\. Did you mean 'int8_by_64'"):
        lowmem.FusedConfig(state_storage="int8_by_65")
    with pytest.raises(ConfigError, match="Choose from float32"):
        lowmem.FusedConfig(state_storage="master")
