"""Cases from torchao's tests of stochastic rounding and low-bit optimizer states."""

import contextlib
import copy
import io
from itertools import product

import pytest
import torch
from judged import judge, report, untouched_if_refused
from support.products import sample
from support.shards import SHARDS
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import lowmem
from lowmem import placements
from lowmem.tiles.storage import Moment, Uniform

optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")

CLASSES = ["Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"]
STATES = {"8bit": "OptimState8bit", "4bit": "OptimState4bit", "Fp8": "OptimStateFp8"}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Disables compilation, since torchao would compile its step for every shape and dtype."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make_net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32)).to(dtype)


def batches(count, dtype, rows=4):
    source = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 32, generator=source).to(dtype) for _ in range(count)]


def weights(net):
    return [param.detach().clone() for param in net.parameters()]


def same(net, plain):
    """Returns whether the weights are bitwise equal and have changed."""
    start = weights(make_net(next(plain.parameters()).dtype))
    return not any(map(torch.equal, start, weights(plain))) and all(map(torch.equal, weights(net), weights(plain)))


def train(net, opt, data, scheduler=None):
    for x in data:
        with untouched_if_refused(net):
            net(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return net


def fused(net, name, **options):
    return lowmem.FusedOptimizer(net.named_parameters(), rule=f"torchao.optim.{name}", **options)


# -- rounding ----------------------------------------------------------------------------------------------------------


def unbiased(rounding):
    """Checks that the mean of many copies stored in 16 bits equals the float32 number, as in torchao's test."""
    source = torch.Generator().manual_seed(0)
    values = (torch.rand(32, generator=source) * 100).bfloat16()
    grad = torch.rand(32, generator=source).bfloat16()
    want = values.float() - 1e-2 * grad.float()
    param = nn.Parameter(values.view(-1, 1).repeat(1, 100_000))
    opt = lowmem.FusedOptimizer([("w", param)], rule="lomo", lr=1e-2, rounding=rounding)
    opt.backward((param * grad.view(-1, 1)).float().sum())
    return torch.isclose(param.detach().float().mean(1), want, rtol=3e-5, atol=3e-5).all().item()


def drifts(rounding):
    """Checks that constant updates, each 1/100 of the spacing of 16-bit weights, add up as in float32."""
    param = nn.Parameter(torch.linspace(1.0, 2.0, 4096).bfloat16())
    start = param.detach().float()
    opt = lowmem.FusedOptimizer([("w", param)], rule="lomo", lr=2**-7 / 100, rounding=rounding)
    for _ in range(200):
        opt.backward(param.float().sum())
    return (start - param.detach().float()).mean().item() == pytest.approx(2 * 2**-7, rel=0.01)


def follows_autocast(make):
    """Checks that a bfloat16 model has the losses of a float32 model under autocast, with steps of 1e-5."""
    torch.manual_seed(2024)
    wide = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 128))
    narrow = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 128)).bfloat16()
    narrow.load_state_dict(wide.state_dict())
    reference, opt = torch.optim.AdamW(wide.parameters(), lr=1e-5), make(narrow)
    x = torch.randn(4, 32)
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            want = wide(x)
        want = want.sum()
        want.backward()
        reference.step()
        reference.zero_grad()
        found = narrow(x.bfloat16()).sum()
        found.backward()
        opt.step()
        opt.zero_grad()
        if not torch.isclose(want.float(), found.float(), rtol=1.6e-2, atol=1e-5):
            return False
    return True


def follows_float32(rounding, state_storage="float32"):
    """Checks that steps of 2e-5 from 16-bit weights change the loss as they do for a float32 copy."""
    torch.manual_seed(2024)
    narrow = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 128)).bfloat16()
    wide = copy.deepcopy(narrow).float()
    x = torch.randn(4, 32).bfloat16()
    start = wide(x.float()).sum().item()
    opts = [adamw(narrow, 2e-5, rounding, state_storage), adamw(wide, 2e-5, "nearest")]
    for _ in range(50):
        for opt, model in zip(opts, (narrow, wide), strict=True):
            opt.backward(model(x.to(model[0].weight.dtype)).float().sum())
    found, want = (model.float()(x.float()).sum().item() for model in (narrow, wide))
    return found - start == pytest.approx(want - start, rel=0.1)


def adamw(model, lr, rounding, state_storage="float32"):
    options = {"lr": lr, "weight_decay": 1e-2, "rounding": rounding, "state_storage": state_storage}
    return lowmem.FusedOptimizer(model.named_parameters(), rule="adamw", **options)


ROUNDING = {
    "stochastic rounding is unbiased": lambda: unbiased("stochastic"),
    "nearest rounding is not": lambda: not unbiased("nearest"),
    "updates add up with stochastic rounding": lambda: drifts("stochastic"),
    "updates add up with compensated rounding": lambda: drifts("compensated"),
    "updates add up with a float32 copy": lambda: drifts("master"),
    "updates do not add up with nearest rounding": lambda: not drifts("nearest"),
    "losses of float32 with stochastic rounding": lambda: follows_float32("stochastic"),
    "losses of float32 with compensated rounding": lambda: follows_float32("compensated"),
    "losses of float32 with a float32 copy": lambda: follows_float32("master"),
    "other losses with nearest rounding": lambda: not follows_float32("nearest"),
    "losses of autocast with stochastic rounding": lambda: follows_autocast(lambda net: adamw(net, 1e-5, "stochastic")),
    "other losses than autocast with nearest rounding": lambda: (
        not follows_autocast(lambda net: adamw(net, 1e-5, "nearest"))
    ),
    "losses of autocast with torchao's own rounding": lambda: follows_autocast(
        lambda net: fused(net, "_AdamW", lr=1e-5, bf16_stochastic_round=True)
    ),
    "other losses than autocast without torchao's own rounding": lambda: (
        not follows_autocast(lambda net: fused(net, "_AdamW", lr=1e-5))
    ),
}


def test_rounding():
    verdicts = {name: judge(ROUNDING[name]) for name in sample(ROUNDING, share=0.5)}
    report("torchao's stochastic rounding", verdicts, at_least=len(verdicts))


# -- low-bit states ----------------------------------------------------------------------------------------------------


def smoke(name, dtype, **options):
    """Trains three steps, and resumes from a file written by torch.save after the first step."""
    first, *others = batches(3, dtype)
    net, plain = make_net(dtype), make_net(dtype)
    opt = fused(net, name, **options)
    ordinary = getattr(optim, name)(plain.parameters(), **options)
    train(plain, ordinary, [first, *others])
    train(net, opt, [first])
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = make_net(dtype)
    again.load_state_dict(net.state_dict())
    resumed = fused(again, name, **options)
    resumed.load_state_dict(torch.load(file))
    return same(train(net, opt, others), plain) and same(train(again, resumed, others), plain)


def converges(name, dtype):
    """Checks that the loss of one batch falls as far as in a plain loop."""
    data = batches(1, dtype) * 12
    net, plain = make_net(dtype), make_net(dtype)

    def loss(model):
        return model(data[0]).float().square().mean().item()

    before = loss(net)
    train(net, fused(net, name, lr=1e-3), data)
    train(plain, getattr(optim, name)(plain.parameters(), lr=1e-3), data)
    return loss(net) < before / 2 and loss(net) == loss(plain)


def is_held_in_few_bits(name):
    """States must take as many bytes as in torchao and have the same class names."""
    net, plain = make_net(), make_net()
    opt, ordinary = fused(net, name), getattr(optim, name)(plain.parameters())
    train(net, opt, batches(1, torch.float32))
    train(plain, ordinary, batches(1, torch.float32))
    kind = next(state for suffix, state in STATES.items() if name.endswith(suffix))
    for param, own in zip(net.parameters(), plain.parameters(), strict=True):
        state, wanted = opt.state[param], ordinary.state[own]["exp_avg"]
        if type(wanted).__name__ == kind:
            size = sum(getattr(wanted, part).nbytes for part in wanted.__tensor_flatten__()[0])
            held = [value.nbytes for key, value in state.items() if key.startswith("exp_avg.")]
            if state["exp_avg"]["class"][1] != kind or sum(held) != size or size > param.nbytes / 3:
                return False
    return same(net, plain)


def default_dtype(name):
    """torchao counts steps in the default dtype. In bfloat16, 0.999 is 1, so both loops divide by zero."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        net, plain = make_net(torch.bfloat16), make_net(torch.bfloat16)
        for model, opt in ((net, fused(net, name)), (plain, getattr(optim, name)(plain.parameters()))):
            train(model, opt, batches(1, torch.bfloat16))
        pairs = zip(weights(net), weights(plain), strict=True)
        return all(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in pairs)
    finally:
        torch.set_default_dtype(torch.float32)


def groups(name, schedule=None, tensors=False):
    """Trains two groups with different learning rates, as numbers or tensors, which a schedule may change.

    torchao converts numbers to float32 tensors, so a schedule that multiplies the last learning rate loses precision.
    """
    net, plain = make_net(), make_net()

    def split(model):
        rates = [torch.tensor(1e-2), torch.tensor(1e-3)] if tensors else [1e-2, 1e-3]
        layers = [model[0], model[2]]
        return [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(layers, rates, strict=True)]

    opt = lowmem.FusedOptimizer(split(net), rule=getattr(optim, name))
    ordinary = getattr(optim, name)(split(plain))
    for model, optimizer in ((net, opt), (plain, ordinary)):
        train(model, optimizer, batches(4, torch.float32), None if schedule is None else schedule(optimizer))
    if schedule is cosine and not tensors:
        return all(
            torch.allclose(one, other, 1e-5, 1e-7) for one, other in zip(weights(net), weights(plain), strict=True)
        )
    return same(net, plain)


def cosine(opt):
    return CosineAnnealingLR(opt, 100)


def geometric(opt):
    return LambdaLR(opt, lambda step: 0.5**step)


def rounded_by_torchao(name):
    """torchao draws the same random numbers as a plain loop over the parameters in backward order."""
    net, plain = make_net(torch.bfloat16), make_net(torch.bfloat16)
    order = []
    handles = [param.register_post_accumulate_grad_hook(order.append) for param in plain.parameters()]
    plain(batches(1, torch.bfloat16)[0]).sum().backward()
    plain.zero_grad()
    for handle in handles:
        handle.remove()
    ordinary = getattr(optim, name)(order, bf16_stochastic_round=True)
    opt = fused(net, name, bf16_stochastic_round=True)
    for model, optimizer in ((net, opt), (plain, ordinary)):
        torch.manual_seed(3)
        train(model, optimizer, batches(4, torch.bfloat16))
    return same(net, plain)


def accumulated(name):
    """Sums the gradients of two batches for each step."""
    net, plain = make_net(), make_net()
    opt, ordinary = fused(net, name), getattr(optim, name)(plain.parameters())
    data = batches(6, torch.float32)
    for first, second in zip(data[::2], data[1::2], strict=True):
        for model, context in ((net, opt.accumulate), (plain, contextlib.nullcontext)):
            with context():
                model(first).square().mean().backward()
            model(second).square().mean().backward()
        ordinary.step()
        ordinary.zero_grad()
    return opt.last_step.step == 3 and same(net, plain)


def offloaded():
    return bool(fused(make_net(), "CPUOffloadOptimizer", optimizer_class=torch.optim.AdamW))


def test_low_bit_optimizers():
    cases = {f"{name} {str(dtype)[6:]}": (smoke, name, dtype) for name, dtype in product(CLASSES, DTYPES)}
    cases |= {
        f"{name} {str(dtype)[6:]}, one batch": (converges, name, dtype) for name, dtype in product(CLASSES, DTYPES)
    }
    for name in CLASSES:
        cases |= {
            f"{name}, bytes of its states": (is_held_in_few_bits, name),
            f"{name}, default dtype bfloat16": (default_dtype, name),
            f"{name}, groups": (groups, name),
            f"{name}, tensors as learning rates": (groups, name, None, True),
            f"{name}, CosineAnnealingLR": (groups, name, cosine),
            f"{name}, CosineAnnealingLR of tensors": (groups, name, cosine, True),
            f"{name}, LambdaLR": (groups, name, geometric),
            f"{name}, LambdaLR of tensors": (groups, name, geometric, True),
            f"{name}, bf16_stochastic_round": (rounded_by_torchao, name),
            f"{name}, accumulated": (accumulated, name),
        }
    verdicts = {case: judge(lambda scene=cases[case]: scene[0](*scene[1:])) for case in sample(cases, share=0.05)}
    verdicts["_AdamW, amsgrad"] = judge(lambda: smoke("_AdamW", torch.bfloat16, amsgrad=True))
    verdicts["AdamW4bit, block_size"] = judge(lambda: smoke("AdamW4bit", torch.float32, block_size=64))
    verdicts["CPUOffloadOptimizer"] = judge(offloaded)
    report("torchao's low-bit optimizers", verdicts, at_least=len(verdicts) - 1)


# -- low-bit states of this package ------------------------------------------------------------------------------------


def own(net, state_storage, rounding="auto", lr=1e-3):
    return adamw(net, lr, rounding, state_storage)


def own_smoke(dtype, *storages):
    """Like `smoke`. A run resumed from a file continues bitwise, including its random numbers."""
    first, *others = batches(3, dtype)
    net, again = make_net(dtype), make_net(dtype)
    opt = train_own(net, own(net, *storages), [first])
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again.load_state_dict(net.state_dict())
    resumed = own(again, *storages)
    resumed.load_state_dict(torch.load(file))
    for model, optimizer in ((net, opt), (again, resumed)):
        train_own(model, optimizer, others)
    states = [opt.state[param] for param in (net[0].weight, net[2].weight)]
    small = all(state["exp_avg"].dtype == torch.int8 and state["exp_avg_sq"].dtype == torch.uint8 for state in states)
    return small and same(again, net)


def train_own(net, opt, data):
    for x in data:
        with untouched_if_refused(net):
            opt.backward(net(x).float().square().mean())
    return opt


def own_converges(dtype, *storages):
    """Checks that the loss of one batch falls as with float32 states."""
    data = batches(1, dtype) * 12
    losses = []
    for states in (storages, ("float32", *storages[1:])):
        net = make_net(dtype)
        before = net(data[0]).float().square().mean().item()
        train_own(net, own(net, *states), data)
        losses.append(net(data[0]).float().square().mean().item())
    return losses[0] < before / 2 and losses[0] == pytest.approx(losses[1], rel=0.05)


def own_default_dtype(state_storage):
    """The default dtype must not change the weights."""
    nets, data = [make_net(torch.bfloat16) for _ in range(2)], batches(2, torch.bfloat16)
    for net, dtype in zip(nets, (torch.float32, torch.bfloat16), strict=True):
        torch.set_default_dtype(dtype)
        try:
            train_own(net, own(net, state_storage), data)
        finally:
            torch.set_default_dtype(torch.float32)
    return all(map(torch.equal, *map(weights, nets)))


def own_groups(state_storage):
    """Adam's first step changes every weight that has a gradient by the learning rate of its group."""
    net = make_net()
    groups = [{"params": list(net[n].parameters()), "lr": lr} for n, lr in ((0, 1e-4), (2, 1e-5))]
    opt = lowmem.FusedOptimizer(groups, rule="adamw", weight_decay=0.0, state_storage=state_storage)
    before = weights(net)
    train_own(net, opt, batches(1, torch.float32))
    moved = [(new - old).abs().max().item() for new, old in zip(weights(net), before, strict=True)]
    return moved == pytest.approx([1e-4, 1e-4, 1e-5, 1e-5], rel=1e-2)


def encoded(held, value, bits=1 << 15):
    bits = torch.as_tensor(bits, dtype=torch.int32).expand(value.shape)
    parts = zip(held.encode(value, Uniform(lambda count: bits << count - 16)), held.parts, strict=True)
    return tuple(new.to(part.dtype) for new, part in parts)


def nearest_code(signed):
    """The code must be the nearest in the table, as in torchao's test. Distances are measured in the companded or root
    scale, in which lowmem's codes are equally spaced."""
    value = torch.rand(32, 1024) if not signed else torch.rand(32, 1024) * 2 - 1
    value[:, ::32] = 1.0
    held = Moment(signed, draws=False)
    codes, scale = encoded(held, value)
    every = torch.arange(-128, 128) if signed else torch.arange(256)
    table = held.decode((every.view(-1, 32).to(held.parts[0].dtype), torch.ones(8, 1).bfloat16())).flatten()
    table, value = ((2 * v / (1 + v.abs()) if signed else v.sqrt()).double() for v in (table, value))
    table = table[1:] if signed else table
    found = (value.unsqueeze(-1) - table).abs().argmin(-1) - (127 if signed else 0)
    return (scale == 1).all().item() and (codes != found).float().mean().item() < 1e-4


def unbiased_codes(signed):
    """The mean of 100,000 stochastically rounded groups must equal the float32 value within 5 standard errors of half
    the largest step, which is 2 / 127 of the largest value."""
    source = torch.Generator().manual_seed(0)
    value = torch.rand(32, generator=source) * 100
    bits = torch.randint(1 << 16, (100_000, 32), generator=source)
    held = Moment(signed)
    mean = held.decode(encoded(held, value.expand(100_000, 32), bits)).double().mean(0)
    return torch.allclose(mean, value.double(), rtol=0, atol=5 * value.max().item() / 127 / 100_000**0.5)


def slices(state_storage):
    """A slice of the stored tensors decodes to the same slice of the values."""
    held = lowmem.storage.of_state(state_storage)
    parts = encoded(held, torch.randn(256, 256))
    return torch.equal(
        held.decode(parts)[64:128, 64:192],
        held.decode(
            tuple(
                tensor[64:128, 64 // part.group : 192 // part.group]
                for tensor, part in zip(parts, held.parts, strict=True)
            )
        ),
    )


def test_states_of_this_package():
    """Rows of 32 cannot be divided into groups of 64. The error names the parameter."""
    cases = {"codes of means": (nearest_code, True), "codes of squares": (nearest_code, False)}
    cases |= {"means at random": (unbiased_codes, True), "squares at random": (unbiased_codes, False)}
    pairs = [(torch.float32, "auto"), (torch.bfloat16, "stochastic"), (torch.bfloat16, "compensated8")]
    for name in ("8bit", "8bit_nearest"):
        for dtype, rounding in pairs:
            cases[f"{name} {str(dtype)[6:]} {rounding}"] = (own_smoke, dtype, name, rounding)
            cases[f"{name} {str(dtype)[6:]} {rounding}, one batch"] = (own_converges, dtype, name, rounding)
        cases |= {
            f"{name}, default dtype bfloat16": (own_default_dtype, name),
            f"{name}, groups": (own_groups, name),
        }
    cases |= {f"{name}, slices": (slices, name) for name in ("8bit", "8bit_64", "8bit_nearest")}
    cases["8bit_64"] = (own_smoke, torch.float32, "8bit_64")
    verdicts = {case: judge(lambda scene=cases[case]: scene[0](*scene[1:])) for case in sample(cases, share=0.4)}
    report("torchao's scenarios, states of this package", verdicts, at_least=len(verdicts) - 1)


def follow(states, rounding):
    """Returns whether losses equal a float32 model's: under autocast, and when starting from the same weights.

    Autocast also rounds float32 weights, starting from their initial values. With a residual, weights start halfway
    between two steps, and 5 steps of 1e-5 round hardly any of them differently. So that comparison is skipped.
    """
    autocast = follows_autocast(lambda net: own(net, states, rounding, 1e-5)) if rounding != "compensated8" else None
    return {autocast, follows_float32(rounding, states)} - {None}


def test_rounding_with_states_of_this_package():
    """As with float32 states, only rounding the weights to nearest changes the results."""
    expected = {"stochastic": {True}, "compensated8": {True}, "nearest": {False}}
    cases = {
        f"{states}, {rounding}": (states, rounding) for states in ("8bit", "8bit_nearest") for rounding in expected
    }
    verdicts = {
        name: judge(lambda case=cases[name]: follow(*case) == expected[case[1]]) for name in sample(cases, share=0.3)
    }
    report("torchao's stochastic rounding, states of this package", verdicts, at_least=len(verdicts))


# -- shards ------------------------------------------------------------------------------------------------------------


def on_a_rank(rank, kind, name):
    net = SHARDS[kind](rank, make_net)

    def compare():
        opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, rule=f"torchao.optim.{name}", lr=1e-3)
        plain = make_net()
        ordinary = getattr(optim, name)(plain.parameters(), lr=1e-3)
        train(plain, ordinary, batches(3, torch.float32))
        train(net, opt, [x.tensor_split(2)[rank] for x in batches(3, torch.float32)])
        full = [placements.full_tensor(param) for param in net.parameters()]
        return all(
            torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in zip(full, weights(plain), strict=True)
        )

    with torch.compiler.set_stance("force_eager"):
        return judge(compare)


def test_sharded(two):
    verdicts = {}
    for kind, name in product(SHARDS, ["_AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8"]):
        verdicts[f"{kind} {name}"], other = two.run(on_a_rank, kind, name)
        assert verdicts[f"{kind} {name}"] == other
    report("torchao's optimizers on shards", verdicts, at_least=2)
