"""Weights as integers of 8, 10 or 12 bits: rounding without bias, units that stay, and bits that do not change."""

import itertools
import math

import pytest
import torch

import lowmem
from lowmem.tiles import rounding, storage, stored
from lowmem.tiles.storage import Integer, Uniform

BITS, SIZES = (8, 10, 12), (32, 64, 128)
UNITS = torch.arange(128, 256) * 2.0**-14  # every significand of bfloat16
every_format = pytest.mark.parametrize("held", [Integer(bits, size) for bits in BITS for size in SIZES], ids=str)


def largest(held):
    return 2 ** (held.bits - 1) - 1


def draws(value, patterns=None):
    """Random bits: those given for all elements, up to 16, or some at random."""
    if patterns is None:
        return Uniform(lambda count: torch.randint(1 << count, value.shape, dtype=torch.int32))
    return Uniform(lambda count: patterns << count - 16)


def in_dtypes(held, parts):
    """Parts as tensors hold them; each is a number that its dtype has."""
    tensors = tuple(new.to(part.dtype) for new, part in zip(parts, held.parts, strict=True))
    assert all(torch.equal(tensor.float(), new.float()) for tensor, new in zip(tensors, parts, strict=True))
    return tensors


def of_multiples(held, whole, unit):
    """The parts for whole multiples, packed by Python: the elements of a byte are a part of the group apart."""
    low, codes, packed = held.bits - 8, [], []
    for number in whole.tolist():
        codes.append(number >> low)
    per_byte = 8 // low if low else 0
    apart = held.size // per_byte if low else 0
    for group in whole.view(-1, held.size) if low else ():
        for first in range(apart):
            some = group[first::apart].tolist()
            assert len(some) == per_byte
            packed.append(sum((number & (1 << low) - 1) << low * place for place, number in enumerate(some)))
    units = torch.full((len(codes) // held.size,), unit).bfloat16()
    lows = [torch.tensor(packed, dtype=torch.uint8)] if low else []
    return torch.tensor(codes, dtype=torch.int8), *lows, units


def groups_of(held, whole):
    """Multiples in groups whose first element is the largest one, so that they keep their unit."""
    rest = held.size - 1
    whole = torch.cat([whole, whole.new_zeros(-len(whole) % rest)]).view(-1, rest)
    return torch.cat([torch.full_like(whole[:, :1], largest(held)), whole], 1).flatten()


def all_multiples(held):
    return groups_of(held, torch.arange(-largest(held), largest(held) + 1))


@every_format
def test_every_multiple_is_packed_and_decoded(held):
    """The integers of the parts, and their sizes: a code, the low bits 4 or 2 to the byte, a unit per group."""
    whole = all_multiples(held)
    parts = of_multiples(held, whole, 2.0**-10)
    value = held.decode(parts)
    assert torch.equal(value, whole * 2.0**-10)
    again = in_dtypes(held, held.update(value, draws(value), parts))
    assert all(map(torch.equal, again, parts))
    assert sum(part.nbytes for part in parts) / len(whole) == held.bytes_per_element == held.bits / 8 + 2 / held.size


@every_format
def test_what_does_not_change_stays_to_the_last_bit(held):
    """Under any random bits, with every significand of a unit, in normal numbers of any size."""
    whole = all_multiples(held)
    for exponent in (-110, 0, 110):
        units = UNITS * 2.0**exponent
        value = whole * units.bfloat16().float()[:, None]
        parts = of_multiples(held, whole, 1.0)
        kept = tuple(part.expand(len(units), -1) for part in parts[:-1])
        kept = (*kept, units.bfloat16()[:, None].expand(-1, len(whole) // held.size))
        for patterns in (
            None,
            torch.zeros(value.shape, dtype=torch.int32),
            torch.full(value.shape, 0xFFFF, dtype=torch.int32),
        ):
            again = in_dtypes(held, held.update(value, draws(value, patterns), kept))
            assert all(map(torch.equal, again, kept))


def numbers_between(low):
    """Multiples of a unit from an integer to the next one: all of float32 if there are up to 2¹⁷, else some of them."""
    bits = 24 - int(max(abs(low), abs(low + 1)) - 0.5).bit_length()
    if bits <= 17:
        return low + torch.arange(1 << bits, dtype=torch.float64) / (1 << bits)
    some = torch.randint(1 << bits, (1000,), dtype=torch.float64) / (1 << bits)
    ends = torch.tensor([0, 1, 2, 3, 1 << bits - 1, (1 << bits - 1) + 1, (1 << bits) - 2, (1 << bits) - 1]) / (
        1 << bits
    )
    return low + torch.cat([some, ends.double()])


@pytest.mark.parametrize("bits", BITS)
def test_rounding_has_no_bias(bits):
    """Under which of the 2²³ random numbers a value is rounded up: the first ones, as many as its part of the way. That
    is exact for values from one unit on, and below within half of a random number, around zero, around the borders of
    codes, and at the largest multiples."""
    held, unit, count = Integer(bits), 2.0**-10, 1 << 23
    most, code = largest(held), 1 << bits - 8
    lows = {-most, -65, -64, -33, -code - 1, -code, -2, -1, 0, 1, code - 1, code, 31, 32, 63, 64, most - 1}
    for low in sorted(lows):
        value = groups_of(held, numbers_between(low).float())
        kept = (None, torch.full((len(value) // held.size,), unit).bfloat16())
        wanted = ((value - value.floor()).double() * count - 0.5).ceil().clamp(min=0)  # middles of intervals below it

        def rounded(numbers, value=value, kept=kept):
            parts = held.update(value * unit, Uniform(lambda bits: numbers.int()), kept)
            return held.decode(in_dtypes(held, parts)) / unit

        assert torch.equal(rounded(wanted.clamp(max=count - 1)), value.floor())
        last = rounded((wanted - 1).clamp(min=0))
        assert torch.equal(last, value.floor() + (wanted > 0))
        parts = value.double() - value.double().floor()
        assert (wanted / count - parts).abs().max() <= (0 if low >= 1 or low < -1 else 2.0**-23)


def test_random_numbers_are_the_middles_of_equal_intervals():
    """All of them, in their order."""
    for count in (16, 23):
        every = torch.arange(1 << count, dtype=torch.int32)
        assert torch.equal(rounding.fraction(every, count).double(), (every.double() + 0.5) / (1 << count))


@every_format
def test_a_fresh_encoding_has_no_bias(held):
    """The mean of n draws is within 5 standard errors of values of any size, and no draw is a unit away. Where units
    are no powers of two, a value of float32 is a multiple to 2⁻¹³ at best."""
    torch.manual_seed(0)
    repeats = 20_000
    value = torch.randn(4 * held.size) * 0.02
    unit = value.view(-1, held.size).abs().amax(1).div(largest(held)).repeat_interleave(held.size)
    many = value.expand(repeats, -1)
    parts = in_dtypes(held, held.encode(many, draws(many)))
    decoded = held.decode(parts)
    assert ((decoded - many).abs() <= unit * (1 + 2**-7)).all()
    error = ((decoded.double().mean(0) - value) / unit).abs()
    assert error.max() <= 5 * 0.5 * 1.01 / math.sqrt(repeats) + 2**-13
    # as good as it can be: the unit is at most one spacing of bfloat16 above the least
    assert (parts[-1][0].float() <= unit[:: held.size] * (1 + 2**-7)).all()


@every_format
def test_units_stay_while_the_largest_element_fits(held):
    most, unit = largest(held), 2.0**-8 * 1.25
    parts = of_multiples(held, all_multiples(held)[: held.size] * 0, unit)

    def updated(top):
        value = torch.zeros(held.size)
        value[3], value[4] = -top, top / 3
        new = in_dtypes(held, held.update(value, draws(value), parts))
        assert (held.decode(new) - value).abs().max() < new[-1].item()
        return new[-1].item()

    top = torch.tensor(most * unit)
    assert updated(top) == updated(torch.nextafter(0.75 * top, top)) == updated(0.8 * top) == unit
    for other in (torch.nextafter(top, 2 * top), 0.74 * top, 3 * top, 1e-3 * top, 1e30 * top, 1e-30 * top):
        fresh = updated(other)
        assert fresh != unit
        assert 15 / 16 * (1 - 2**-7) * most <= other.item() / fresh <= 16 / 17 * most  # some room to grow


@every_format
def test_zeros(held):
    """Zeros in all parts are zeros, and a group of them stays zero; another group does not notice."""
    for kept in (in_dtypes(held, held.encode(torch.zeros(2, held.size), draws(torch.zeros(2, held.size)))),
                 tuple(torch.zeros(2, held.size // part.group, dtype=part.dtype) for part in held.parts)):  # fmt: skip
        assert not held.decode(kept).any()
        value = torch.stack([torch.zeros(held.size), torch.linspace(-1, 1, held.size)])
        new = in_dtypes(held, held.update(value, draws(value), kept))
        assert not held.decode(new)[0].any() and not new[0][0].any()
        torch.testing.assert_close(held.decode(new)[1], value[1], rtol=0, atol=1.1 / largest(held))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@every_format
def test_what_is_not_finite_shows(held, bad):
    """Its group is not finite as a whole, others stay as they are, and a group is as any other once it is finite."""
    value = torch.linspace(-1, 1, 2 * held.size).view(2, -1)
    parts = in_dtypes(held, held.encode(value, Uniform.half(value)))
    broken = held.decode(parts)
    broken[0, 7] = bad
    new = tuple(
        each.to(part.dtype) for each, part in zip(held.update(broken, draws(value), parts), held.parts, strict=True)
    )
    decoded = held.decode(new)
    assert not decoded[0].isfinite().any()
    assert torch.equal(decoded[1], broken[1])
    healed = held.decode(in_dtypes(held, held.update(value, draws(value), new)))
    torch.testing.assert_close(healed, value, rtol=0, atol=1.2 / largest(held))


@every_format
def test_values_too_small_for_a_normal_unit(held):
    """They are rounded at random to multiples of the smallest normal number."""
    least = 2.0**-126
    value = torch.linspace(-3 * least, 3 * least, held.size)
    patterns = torch.arange(0, 1 << 16, 16, dtype=torch.int32)[:, None].expand(-1, held.size)
    many = value.expand(len(patterns), -1)
    parts = in_dtypes(held, held.encode(many, draws(many, patterns)))
    assert (parts[-1].float() == least).all()
    means = held.decode(parts).double().mean(0)
    assert ((means - value.double()) / least).abs().max() < 2**-11
    again = in_dtypes(held, held.update(held.decode(parts), draws(many), parts))
    assert all(map(torch.equal, again, parts))


@every_format
def test_large_values(held):
    value = torch.linspace(-1, 1, held.size) * 2.0**127
    decoded = held.decode(in_dtypes(held, held.encode(value, draws(value))))
    assert ((decoded - value).abs() < 2.0**127 / largest(held) * 1.01).all()


# -- through the optimizer ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def registered():
    names = {f"integer{held.bits}_{held.size}": held for held in (Integer(b, s) for b in BITS for s in SIZES)}
    for name, held in names.items():
        storage.register(name)(lambda dtype, signed, held=held: held)
    yield list(names)
    for name in names:
        del storage.TABLE[name]


NAMES = [f"integer{bits}_{size}" for bits in BITS for size in SIZES]


def train(name, *, steps=4, lr=1e-2, shape=(6, 1024), rule="lomo", compile=False, grads=torch.randn):
    """What the model sees, and what is held, after some steps."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape).bfloat16())
    opt = lowmem.FusedOptimizer([("w", param)], rule=rule, lr=lr, rounding=name, compile=compile, batching=False)
    history = []
    for _ in range(steps):
        opt.backward((param * grads(shape).bfloat16()).sum())
        state = opt.named_state_dict()["state"]["w"]
        history.append({key: state[key].clone() for key in ("codes", "low", "unit") if key in state})
    assert compile == any(code is not None for code in opt._records[param].program.compiled.values())
    return param.detach(), history


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", NAMES)
def test_tiles_do_not_show(name, monkeypatch):
    weight, history = train(name)
    for tile in (1024, 2048):
        monkeypatch.setattr(stored, "CPU_TILE", tile)
        other, others = train(name)
        assert torch.equal(weight, other) and all(map(same, history, others))


def test_stacks_do_not_show():
    held = {}
    for batching in (True, False):
        torch.manual_seed(0)
        params = {f"p{n}": torch.nn.Parameter(torch.randn(4, 1024).bfloat16()) for n in range(3)}
        opt = lowmem.FusedOptimizer(
            params.items(), rule="adalomo", lr=1e-2, rounding="integer10_64", compile=False, batching=batching
        )
        for _ in range(3):
            opt.backward(sum((param.float() ** 3).sum() for param in params.values()))
        states = opt.named_state_dict()["state"].values()
        held[batching] = [{key: state[key] for key in ("codes", "low", "unit")} for state in states]
    assert all(map(same, held[True], held[False]))


@pytest.mark.cpu_only("the simulated GPU has no compiler")
@pytest.mark.parametrize("name", ["integer8_64", "integer10_64"])
def test_compiled_code_gives_the_same_bits(name):
    weight, history = train(name, shape=(16, 256))
    other, others = train(name, shape=(16, 256), compile=True)
    assert torch.equal(weight, other) and all(map(same, history, others))
    assert not same(history[0], history[-1])


@pytest.mark.parametrize("name", NAMES)
def test_units_stay_from_update_to_update(name):
    """Through the parameter that shows the value too: where weights change little, a group takes another unit once at
    most, which then has room; and most codes stay."""
    _, history = train(name, lr=1e-5, steps=10)
    pairs = list(itertools.pairwise(history))
    changes = sum((one["unit"] != other["unit"]).int() for one, other in pairs)
    assert changes.max() <= 1
    assert not same(history[-2], history[-1])
    assert (history[-2]["codes"] == history[-1]["codes"]).float().mean() > 0.9


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        *((name, False) for name in ("integer8_64", "integer10_64", "integer12_64")),
        pytest.param("integer8_64", True, marks=pytest.mark.cpu_only("the simulated GPU has no compiler")),
    ],
)
@pytest.mark.parametrize("lr,grads", [(0.0, torch.randn), (1e-2, torch.zeros)])
def test_nothing_drifts(name, compile, lr, grads):
    """A thousand updates that change nothing leave every bit as it was; and so it is for the model."""
    torch.manual_seed(0)
    weight, history = train(name, lr=lr, grads=grads, steps=1000, shape=(4, 1024), compile=compile)
    begun, first = train(name, lr=lr, grads=grads, steps=1, shape=(4, 1024), compile=compile)
    assert torch.equal(weight, begun)
    assert same(history[-1], first[0])
