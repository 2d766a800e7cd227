"""Tiles of a sweep cover every element once, and results do not depend on the tile size. Nothing is compiled here."""

import copy
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.devices import seeded
from support.nets import Memory
from support.products import in_turn, pairwise

from lowmem.rules import resolve
from lowmem.rules.rule import TABLE
from lowmem.tiles import rounding, storage, stored
from lowmem.tiles.layout import WIDEST, Layout, View
from lowmem.tiles.storage import FLOAT32, Float, StoredTensor
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Reading, Scalars, Sweep
from lowmem.tiles.tile import Fields, Sums

MIB = 1 << 20
RULES = sorted(TABLE)
ROUNDINGS = ("nearest", "stochastic", "compensated", "master")
ELEMENTWISE = ("lomo", "adamw", "lion")  # each result depends on one element, so no sums change their order
OPTIONS = {"adafactor": {"min_dim_size_to_factor": 4, "beta1": 0.9}, "lans": {"variant": "step"}}


def update(rule, shape, *, dtype=torch.bfloat16, rounding_name="nearest", steps=2, tile=None, grads=None):
    """Returns a parameter and its states after updates from a fixed start. lr changes with each step."""
    hyper = OPTIONS.get(rule, {})
    rule, source = resolve(rule), seeded(0)
    param = torch.randn(shape, generator=source).to(dtype)
    rounds_itself = rounding_name == "nearest" and rule.name == "adafactor_t2t"
    hyper = {**rule.defaults, rule.decay: 0.01, "rounding": "auto" if rounds_itself else rounding_name, **hyper}
    spec = rule.spec("w", shape, hyper)
    states = new_states(spec, shape, dtype)
    weight = storage.of_weight(rounding_name, dtype)
    extra = {part.name: torch.zeros(shape, dtype=part.dtype) for part in weight.parts[1:]}
    for step in range(1, steps + 1):
        grad = torch.randn(shape, generator=source).to(dtype) if grads is None else grads[step - 1]
        tiles = StoredTiles(
            Layout.of(shape, spec.view),
            StoredTensor(weight, (param, *extra.values())),
            grad,
            Reading(limit=torch.tensor(2.0)),
            Scalars.of(rule.scalars({**hyper, "lr": 0.1 / step}, step), torch.get_default_device()),
            keys=key(step),
            tile=tile,
        )
        rule.update(Sweep(tiles), spec, with_storages(spec, states))
    return param, {**states, **extra}


def key(number):
    return torch.tensor(number, dtype=torch.int32)


def new_states(spec, shape, dtype):
    sizes = {name: spec.view.state_shape(each.extent, shape) + each.extra for name, each in spec.states.items()}
    dtypes = {name: dtype if each.dtype == "weight" else each.dtype or torch.float32
              for name, each in spec.states.items()}  # fmt: skip
    return {name: torch.zeros(sizes[name], dtype=dtypes[name]) for name in sizes}


def with_storages(spec, states):
    """Returns states as a sweep takes them: elementwise states have a storage format."""
    full = {name for name, each in spec.states.items() if each.extent == "full"}
    return {name: StoredTensor(Float(t.dtype), (t,)) if name in full else t for name, t in states.items()}


def assert_same_to_float32_rounding(got, want):
    """Allows a few float32 roundings, each 2.4e-7 for weights up to 4. At a tie, which is rare, they may change a
    bfloat16 weight by a whole spacing; with its residual, the weight is a float32 value."""
    (got_param, got_states), (want_param, want_states) = got, want
    if "residual" in want_states:
        got_value, want_value = (rounding.widen(p, s["residual"], s["residual_low"]) for p, s in (got, want))
        torch.testing.assert_close(got_value, want_value, rtol=0, atol=2e-6)
    else:
        torch.testing.assert_close(got_param, want_param, rtol=2**-7, atol=2e-6)
        assert (got_param != want_param).sum() <= 1 + 0.01 * got_param.numel()
    for name in want_states.keys() - {"residual", "residual_low"}:
        size = 5e-6 * want_states[name].abs().max().item()  # terms of a momentum may cancel
        torch.testing.assert_close(got_states[name], want_states[name], rtol=1e-6, atol=size)


SHAPES = [(), (1,), (300,), (7, 40), (1, 9), (9, 1), (3, 8, 10)]


@pytest.mark.parametrize(("rule", "shape", "rounding_name"), pairwise(RULES, SHAPES, ROUNDINGS))
def test_updates_do_not_depend_on_the_tile(rule, shape, rounding_name):
    """Elementwise rules agree bit for bit. Other rules sum in a different order."""
    whole, whole_states = update(rule, shape, rounding_name=rounding_name, tile=1 << 20)
    for tile in (3, 50):
        parts, states = update(rule, shape, rounding_name=rounding_name, tile=tile)
        if rule in ELEMENTWISE:
            assert torch.equal(parts, whole)
            assert all(torch.equal(states[name], whole_states[name]) for name in states)
        else:
            assert_same_to_float32_rounding((parts, states), (whole, whole_states))


def everything(t):
    product = t.grad * t.param
    return Sums(row={"r": product}, col={"c": product}, scalar={"s": product})


@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(1, 100), st.booleans())
def test_reduce_sums_over_tiles(shape, tile, clipped):
    """Sums by row, by column and in total, and the gradient's norm before clipping, match float64 sums."""
    param, grad = torch.randn(shape), torch.randn(shape)
    limit = torch.tensor(0.5) if clipped else None
    reading = Reading(inverse_scale=torch.tensor(2.0), limit=limit)
    one = Sweep(
        StoredTiles(Layout.of(shape, View.matrix(3)), StoredTensor(FLOAT32, (param,)), grad, reading, tile=tile)
    )
    sums = one.reduce(everything)
    scaled = 2.0 * grad.double()
    product = (scaled.clamp(-0.5, 0.5) if clipped else scaled) * param.double()
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5, check_dtype=False)
    close(sums.row["r"], product.sum(2))
    close(sums.col["c"], product.sum(1))
    close(sums.scalar["s"], product.sum((1, 2)))
    close(one.square_sums, scaled.square().sum()[None])


@pytest.mark.cpu_only("a GPU has larger tiles")
@pytest.mark.filterwarnings("ignore:Expected a tensor")
@pytest.mark.parametrize(("rule", "rounding_name"), in_turn(RULES, ROUNDINGS))
def test_temporaries_of_one_update(rule, rounding_name):
    """A float32 copy of the parameter (bfloat16, 8 MiB) has 16 MiB; all temporaries together stay below 8."""
    rule, shape = resolve(rule), (2048, 2048)
    param, grad = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    spec = rule.spec("w", shape, {**rule.defaults, "rounding": rounding_name})
    states = new_states(spec, shape, torch.bfloat16)
    weight = storage.of_weight(rounding_name, torch.bfloat16)
    extra = [torch.zeros(shape, dtype=part.dtype) for part in weight.parts[1:]]
    with Memory() as memory:
        arguments = {"scalars": Scalars.of(rule.scalars(rule.defaults, 1)), "keys": key(1)}
        tiles = StoredTiles(Layout.of(shape, spec.view), StoredTensor(weight, (param, *extra)), grad, **arguments)
        rule.update(Sweep(tiles), spec, with_storages(spec, states))
    persistent = sum(tensor.untyped_storage().nbytes() for tensor in (param, grad, *extra, *states.values()))
    assert persistent <= memory.most <= persistent + 8 * MIB


MANY = 1 << 34


def halfway(t):
    """Returns a value halfway between two bfloat16 numbers, so stochastic rounding reveals one random bit."""
    return {"param": t.param + (1 + 2.0**-8)}


def rounded_at(start, count=64, tile=None, seed=7):
    """Returns the columns from `start` on, rounded as a shard with these columns."""
    shard = torch.zeros(count, dtype=torch.bfloat16)
    weight = StoredTensor(Float(torch.bfloat16, draws=True), (shard,))
    layout = Layout.of((MANY,), View.vector(1), start, start + count)
    Sweep(StoredTiles(layout, weight, torch.zeros_like(shard), keys=key(seed), tile=tile)).apply(halfway)
    return shard


@pytest.mark.parametrize("border", [1 << 30, 1 << 31, 1 << 32, (1 << 32) + (1 << 31), 1 << 33])
def test_noise_of_a_column_does_not_depend_on_tiles_and_shards(border):
    whole = rounded_at(border - 32)
    assert 8 < (whole > 1).sum() < 56
    assert torch.equal(whole, rounded_at(border - 32, tile=5))
    assert not torch.equal(whole, rounded_at(border - 32, seed=8))
    assert torch.equal(whole, torch.cat([rounded_at(border - 32, 32), rounded_at(border, 32)]))
    assert torch.equal(whole[3:], rounded_at(border - 29, 61))


def test_noise_of_fewer_columns_has_not_changed():
    """Resumed runs must continue with the same random bits."""
    col = torch.arange(64, dtype=torch.int32) + ((1 << 31) - 64)
    bits = rounding.mix(rounding.mix(torch.tensor(7, dtype=torch.int32)) + col)
    want = torch.where(rounding.random_bits(bits, 0, 16) < 1 << 15, 1 + 2.0**-7, 1.0).bfloat16()
    assert torch.equal(rounded_at((1 << 31) - 64), want)


def both_halfway(t):
    return {**halfway(t), "state": t.full.state + (1 + 2.0**-8)}


def test_each_row_and_each_tensor_has_its_own_noise():
    """Two stacked parameters, each with two slices of three rows, and their state: 24 different rows."""
    shape, rounds = (4, 3, 64), Float(torch.bfloat16, draws=True)
    weight, state = (StoredTensor(rounds, (torch.zeros(shape, dtype=torch.bfloat16),)) for _ in range(2))
    keys = torch.tensor([[7], [7 << 20]], dtype=torch.int32)
    tiles = StoredTiles(Layout.of(shape, View.matrix(3)), weight, torch.zeros(shape), members=2, keys=keys)
    Sweep(tiles).apply(both_halfway, full={"state": state})
    rows = [tuple(row) for tensor in (weight, state) for row in tensor.parts[0].view(-1, 64).tolist()]
    assert len(set(rows)) == len(rows) == 24


@pytest.mark.parametrize("tile", [stored.GPU_TILE, stored.CPU_TILE])
@pytest.mark.parametrize(("first", "last"), [(0, MANY), ((1 << 31) - 7, (1 << 32) + 9), (5, 1000)])
def test_tiles_of_many_columns(first, last, tile):
    """Tiles are split at the limits of int32 and cover every column once."""
    layout = Layout.of((MANY,), View.vector(1), first, last)
    cols = sorted((place.rect.cols.start, place.rect.cols.stop) for place in layout.places(tile))
    assert [start for start, _ in cols] == [first, *(stop for _, stop in cols[:-1])]
    assert cols[-1][1] == last
    assert all(start // WIDEST == (stop - 1) // WIDEST for start, stop in cols)


class Three:
    """Simulates three ranks, whose tensors are one, two and three times the given ones."""

    def all_reduce(self, tensors, *, largest=False):
        return [tensor * (3 if largest else 6) for tensor in tensors]


def test_sums_and_maxima_over_ranks():
    row, row_max = ("row", "r"), ("row_max", "m")
    sums = stored.over_ranks(Three(), {row: torch.ones(1, 2), row_max: torch.ones(1, 2)})
    assert sums[row].tolist() == [[6.0, 6.0]] and sums[row_max].tolist() == [[3.0, 3.0]]


def test_a_tensor_that_is_missing_is_a_missing_attribute():
    """An AttributeError is required for hasattr and copy to work."""
    fields = Fields({("row", "r"): torch.ones(2)}, "row")
    assert hasattr(fields, "r") and not hasattr(fields, "c") and torch.equal(copy.copy(fields).r, fields.r)
    with pytest.raises(AttributeError, match="'c' was passed to the sweep"):
        _ = fields.c


def test_noise_of_many_columns_does_not_repeat():
    starts = [0, 1 << 30, 1 << 31, 3 << 30, 1 << 32, 5 << 30, 3 << 31, 1 << 33]
    seen = {tuple(rounded_at(start).tolist()) for start in starts}
    assert len(seen) == len(starts)
