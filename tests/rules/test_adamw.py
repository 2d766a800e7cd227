"""AdamW equals torch's own."""

import pytest
import torch

import lowmem

# Each kind of size alone, small ones that are updated as one stack, one larger than that and one of several tiles.
SHAPES = [(), (1,), (7,), (5, 3), (5, 3), (5, 3), (2, 3, 4), (2, 2, 3, 3), (16, 16, 65), (400, 400)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.6, 0.95), "weight_decay": 0.0},
        {"betas": (0.3, 0.5), "eps": 1e-3, "weight_decay": 0.5},  # from 0.5 on torch interpolates from the other end
        {"betas": (0.0, 0.0)},
    ],
)
def test_equals_torch(give_gradients, options):
    """Bit for bit over 20 steps of changing learning rate. Some parameters have no gradient at first or in some steps:
    their bias correction counts their own."""
    start = [torch.randn(shape) for shape in SHAPES]
    params, theirs = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    opt = lowmem.FusedOptimizer(params, rule="adamw", **options)
    plain = torch.optim.AdamW(theirs, foreach=False, **options)
    for step in range(20):
        opt.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.1 * (1 + step % 7) ** -0.5
        pairs = []
        for i, (param, their) in enumerate(zip(params, theirs, strict=True)):
            absent = (i % 3 == 1 and step < 6) or (i % 4 == 2 and step % 5 == 4)
            their.grad = None if absent else torch.randn(their.shape) * 10.0 ** (step % 5 - 2)
            pairs += [] if absent else [(param, their.grad.clone())]
        give_gradients(opt, *pairs)
        plain.step()
    kept = opt.named_state_dict()["state"]
    for i, (param, their) in enumerate(zip(params, theirs, strict=True)):
        assert torch.equal(param, their)
        assert kept[f"param{i}"]["step"].item() == plain.state[their]["step"].item()
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(kept[f"param{i}"][name], plain.state[their][name])


@pytest.mark.skipif(not lowmem.step.compiled.has_compiler("cpu"), reason="no C++ compiler")
def test_compiled_is_a_few_roundings_from_torch(give_gradients):
    """A compiler may fuse a multiplication with an addition, which spares a rounding of half a unit in the last place.
    Over 20 steps no weight is more than eight units of the largest it has been away, and most are not away at all."""
    start = torch.randn(130, 130)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    opt = lowmem.FusedOptimizer([ours], rule="adamw", lr=0.01, compile=True)
    plain = torch.optim.AdamW([theirs], lr=0.01, foreach=False)
    state, largest, largest_mean = plain.state[theirs], start.abs(), torch.zeros(130, 130)
    for _ in range(20):
        theirs.grad = torch.randn(130, 130)
        give_gradients(opt, (ours, theirs.grad))
        plain.step()
        largest = torch.maximum(largest, theirs.abs()).detach()
        largest_mean = torch.maximum(largest_mean, state["exp_avg"].abs())
    kept, ulp = opt.named_state_dict()["state"]["param0"], 2.0**-23
    assert ((ours - theirs).abs() <= 8 * ulp * largest.clamp(min=0.01)).all()  # a step is of 0.01 at most
    assert ((kept["exp_avg"] - state["exp_avg"]).abs() <= 8 * ulp * largest_mean).all()
    assert ((kept["exp_avg_sq"] - state["exp_avg_sq"]).abs() <= 8 * ulp * state["exp_avg_sq"]).all()
    assert (ours == theirs).float().mean() > 0.75
