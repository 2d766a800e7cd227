"""Tests storage formats of weights and states in optimizer updates, including a third-party format."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from support.compiled import compiles
from support.devices import seeded
from support.nets import assert_same, states
from support.products import FULL
from torch import Tensor

import lowmem
from lowmem.errors import ConfigError
from lowmem.step import program
from lowmem.tiles import graph, storage, stored
from lowmem.tiles.storage import Compensated, Integer, Moment, Part, Storage, Uniform, register

GROUP = 64


@dataclass(frozen=True)
class Int8(Storage):
    """Codes from -127 to 127, and a power-of-two scale per group of 64 elements of a row."""

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


INTEGERS = {f"integer{bits}_{size}": Integer(bits, size) for bits, size in ((8, 64), (10, 32), (12, 128))}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register("int8_by_64")(Int8)
    for name, integer in INTEGERS.items():
        register(name)(lambda dtype, signed, integer=integer: integer)
    yield
    for name in ("int8_by_64", *INTEGERS):
        del storage.TABLE[name]


@pytest.fixture(autouse=True)
def small_parameters_in_groups(monkeypatch):
    monkeypatch.setattr(program, "SMALLEST_GROUPED", 1)


def test_registering():
    with pytest.raises(ConfigError, match="already registered"):
        register("int8_by_64")(Int8)
    with pytest.raises(ConfigError, match=r"'int8_by_65' is unknown\. Did you mean 'int8_by_64'"):
        lowmem.FusedConfig(state_storage="int8_by_65")
    with pytest.raises(ConfigError, match="Choose from auto, float32"):
        lowmem.FusedConfig(state_storage="master")


def start(shape, count=1, dtype=torch.float32):
    source = seeded(0)
    return [torch.randn(shape, generator=source).to(dtype) for _ in range(count)]


def train(shape, *, steps=3, count=1, dtype=torch.float32, size=1.0, **options):
    """Returns the parameters and all stored tensors of the optimizer after each step."""
    params = [torch.nn.Parameter(value) for value in start(shape, count, dtype)]
    settings = {"rule": "adamw", "lr": 1e-2, "weight_decay": 0.0, "compile": False, **options}
    if settings["rule"] == "lomo":
        del settings["weight_decay"]
    opt = lowmem.FusedOptimizer(params, **settings)
    assert opt.compiled == settings["compile"]
    history = []
    for grads in gradients(shape, steps, count):
        opt.backward(
            sum((param * grad.to(dtype) * size).float().sum() for param, grad in zip(params, grads, strict=True))
        )
        history.append(states(opt) | {f"param{n}": param.detach().clone() for n, param in enumerate(params)})
    return history


def gradients(shape, steps, count=1):
    source = seeded(1)
    return [[torch.randn(shape, generator=source) for _ in range(count)] for _ in range(steps)]


# -- compared with plain torch that quantizes its states ---------------------------------------------------------------


def powers_of_two(value):
    """Quantizes in float64, independently of the sweep."""
    rows = value.double().reshape(-1, GROUP)
    scale = 2.0 ** torch.ceil(torch.log2(rows.abs().amax(-1, keepdim=True) / 127))
    return torch.where(scale > 0, (rows / scale).round() * scale, 0.0).reshape(value.shape).float()


def unchanged(value):
    return value


def adamw(weight, grads, store_mean=unchanged, store_square=unchanged, store_weight=unchanged):
    weight, mean, square = store_weight(weight), torch.zeros_like(weight), torch.zeros_like(weight)
    for step, (grad,) in enumerate(grads, start=1):
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        change = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = store_weight(weight - 1e-2 * change)
        mean, square = store_mean(mean), store_square(square)
    return weight


STORED = {
    "own states": ({"state_storage": "int8_by_64"}, (powers_of_two, powers_of_two)),
    "own weight": ({"rounding": "int8_by_64"}, (unchanged, unchanged, powers_of_two)),
}


@pytest.mark.parametrize("shape", [(64,), (5, 128), (3, 4, 64), (2, 2, 3, 64)])
@pytest.mark.parametrize("case", STORED)
def test_updates_equal_plain_torch(case, shape):
    """Float32 rounding changes the code of only a few values halfway between two codes."""
    options, functions = STORED[case]
    *_, end = train(shape, steps=5, **options)
    expected = adamw(start(shape)[0], gradients(shape, 5), *functions)
    exact = adamw(start(shape)[0], gradients(shape, 5))
    assert ((end["param0"] - expected).abs() > 1e-5).float().mean() < 0.01
    assert ((end["param0"] - exact).abs() > 1e-5).float().mean() > 0.5  # the tolerance detects quantization


# -- bits that do not change -------------------------------------------------------------------------------------------

MANY = {
    "own": {"state_storage": "int8_by_64", "rounding": "int8_by_64"},
    "8bit": {"state_storage": "8bit", "rounding": "compensated8", "dtype": torch.bfloat16},
    "8bit, to nearest": {"state_storage": "8bit_nearest", "rounding": "compensated8", "dtype": torch.bfloat16},
    "8bit, lion": {"rule": "lion", "state_storage": "8bit_64", "rounding": "stochastic", "dtype": torch.bfloat16},
    **{name: {"rule": "lomo", "rounding": name, "dtype": torch.bfloat16} for name in INTEGERS},
}
many = pytest.mark.parametrize("options", MANY.values(), ids=MANY)


@many
@pytest.mark.parametrize("shape", [(8192,), (6, 1024)])
def test_tiles_and_stacks_do_not_change_a_bit(options, shape, monkeypatch):
    """Rows are split into several tiles, and parameters are stacked or updated alone."""
    expected = train(shape, count=3, batching=False, **options)
    assert not torch.equal(expected[0]["param0"], expected[-1]["param0"])
    for tile in (stored.CPU_TILE, 1024):
        monkeypatch.setattr(stored, "CPU_TILE", tile)
        for batching in (True, False):
            for one, other in zip(train(shape, count=3, batching=batching, **options), expected, strict=True):
                assert_same(one, other)


@many
@pytest.mark.parametrize("unmoved", [{"lr": 0.0}, {"size": 0.0}], ids=["rate of zero", "gradient of zero"])
def test_zero_updates_keep_every_bit_of_the_weight(options, unmoved):
    first, *_, last = train((4, 1024), steps=30, **{**options, **unmoved})
    names = [name for name in first if not name.startswith(("param0/exp_avg", "param0/step"))]
    assert_same({name: first[name] for name in names}, {name: last[name] for name in names})


@pytest.mark.parametrize("name", INTEGERS)
def test_scales_stay_from_update_to_update(name):
    """If weights change little, a group's scale changes at most once, leaving headroom, and most codes stay."""
    history = train((6, 1024), steps=10, lr=1e-5, rule="lomo", rounding=name, dtype=torch.bfloat16)
    changes = sum((one["param0/unit"] != other["param0/unit"]).int() for one, other in itertools.pairwise(history))
    assert changes.max() <= 1
    same = history[-2]["param0/codes"] == history[-1]["param0/codes"]
    assert 0.9 < same.float().mean() < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.troubleshooting("bfloat16 weights stop learning")
def test_small_steps_move_16_bit_weights(dtype):
    """200 steps of at most a thousandth of a spacing: "nearest" stalls, the others follow float32."""
    begin, grad = 1 + torch.rand(64, 64), torch.ones(64, 64)
    begin, moved = begin.to(dtype), {}
    spacing = torch.finfo(dtype).eps
    for name in ("nearest", "stochastic", "compensated", "compensated8", "master", "float32"):
        param = torch.nn.Parameter(begin.float() if name == "float32" else begin.clone())
        options = {} if name == "float32" else {"rounding": name}
        opt = lowmem.FusedOptimizer([("w", param)], rule="lomo", lr=spacing * 1e-3, **options)
        for _ in range(200):
            opt.backward((param * grad.to(param.dtype)).sum())
        state = opt.named_state_dict()["state"].get("w", {})
        residual = [state[part] for part in ("residual", "residual_low") if part in state]
        value = state.get("weight32", param.detach().float())
        if residual:
            value = storage.of_weight(name, dtype).decode((param.detach(), *residual))
        moved[name] = value.double() - begin.double()
    assert moved["nearest"].abs().max() == 0
    # bfloat16 and its residual hold a whole float32; float16 and its residual have 2 bits more at this size
    assert torch.equal(moved["compensated"], moved["float32"])
    assert torch.equal(moved["master"], moved["float32"])
    # 0.2 of a spacing on average over 4096 weights, whose mean has a standard error of 0.4/64 of a spacing
    error, mean = 5 * 0.4 / 64 * spacing, moved["float32"].mean()
    assert (moved["stochastic"].mean() - mean).abs() <= error
    assert (moved["compensated8"].mean() - mean).abs() <= error / 254  # a residual has 254 steps per spacing


# -- compiled ----------------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.parametrize("signed", [True, False] if FULL else [False])
def test_compiled_code_keeps_non_finite_values(signed):
    value = torch.randn(8, 32).abs()
    value[1, 3], value[3, 4], value[5] = torch.nan, torch.inf, 0.0

    def store(value):
        codes, scale = Moment(signed, draws=False).encode(value, Uniform.half(value))
        return codes.to(torch.int8 if signed else torch.uint8), scale.bfloat16()

    actual, expected = (
        Moment(signed).decode(function(value)) for function in (torch.compile(store, fullgraph=True), store)
    )
    assert not actual[1].isfinite().any()
    assert not actual[3].isfinite().all()
    assert not actual[5].any()
    rest = [0, 2, 4, 6, 7]
    torch.testing.assert_close(actual[rest], expected[rest], rtol=0.03, atol=0)


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if FULL else [torch.bfloat16])
def test_compiled_residuals(dtype):
    """Zeros must have a residual of zero, not the integer into which vector code converts NaN."""
    value = torch.cat([torch.zeros(32), torch.logspace(-44, 4, 500, dtype=torch.float64).float(), torch.randn(500)])

    def store(value):
        stored, residual = Compensated(dtype, 8).encode(value, Uniform.half(value))
        return stored.to(dtype), residual.to(torch.int8)

    sizes = graph.Sizes()
    args = [sizes.tensor((sizes.size(1024),), torch.float32, value.device)]
    run = graph.compiled(graph.trace(lambda value: [*store(value)], args), sizes, args)
    for actual, expected in zip(run(value), store(value), strict=True):
        assert torch.equal(actual, expected)
        assert not actual[:32].any()
