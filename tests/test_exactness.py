"""Fused training is ordinary training: bit for bit in float32, whatever is clipped, accumulated and scaled.

The ordinary side is PyTorch's own: `.grad` that accumulates, `GradScaler`, `clip_grad_value_`, `clip_grad_norm_`, and a
step of the optimizer. Its models are a Llama with tied embeddings and an expert model, both with dropout.
"""

import functools
import statistics
from contextlib import nullcontext

import pytest
import torch
from products import pairwise
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import lowmem

STEPS = 30
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "use_cache": False,
    "tie_word_embeddings": True,
}


def make_model(kind, dtype=torch.float32):
    torch.manual_seed(0)
    if kind == "dense":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype).train()
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts)).to(dtype).train()


def batches(accumulation):
    """Micro-batches of each step; some steps see one token over and over, and have a large gradient."""
    source = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        drawn = [torch.randint(97, (2, 12), generator=source) for _ in range(accumulation)]
        yield [ids % 3 if step % 5 == 4 else ids for ids in drawn]


def loss_of(model, ids, accumulation):
    return model(input_ids=ids, labels=ids).loss / accumulation


class RuleOnGradients:
    """An optimizer for the ordinary side where torch has none: the rule, given finished gradients."""

    def __init__(self, named, rule):
        self.params = dict(named)
        self.inner = lowmem.FusedOptimizer(
            [(name, torch.nn.Parameter(param.detach())) for name, param in self.params.items()], rule=rule, lr=1e-2
        )

    def step(self):
        shadows = self.inner.param_groups[0]["params"]
        pairs = [(s, p.grad) for s, p in zip(shadows, self.params.values(), strict=True) if p.grad is not None]
        self.inner.backward(sum((shadow * grad).sum() for shadow, grad in pairs))

    def zero_grad(self):
        for param in self.params.values():
            param.grad = None


ORDINARY = {
    "lomo": lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
    "adamw": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.01, foreach=False),
    "adalomo": lambda named: RuleOnGradients(named, "adalomo"),
}
OPTIONS = {"adamw": {"weight_decay": 0.01}}


def poison(model):
    """At two steps a gradient of a middle layer overflows: call with the number of each step, before its backward."""
    weight = model.model.layers[1].self_attn.o_proj.weight
    now = [0]
    weight.register_hook(lambda grad: grad * (torch.inf if now[0] in (5, 20) else 1.0))

    def at(step):
        now[0] = step

    return at


def train_ordinarily(model, rule, accumulation, *, clip_norm=None, norm_type=2.0, clip_value=None, scaler=None):
    """Trains; returns the factors that gradients were clipped with, and the losses."""
    optimizer = ORDINARY[rule](list(model.named_parameters()))
    factors, losses = [], []
    at = poison(model) if scaler is not None else lambda step: None
    torch.manual_seed(7)
    for step, micro_batches in enumerate(batches(accumulation)):
        at(step)
        for ids in micro_batches:
            loss = loss_of(model, ids, accumulation)
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach())
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value, foreach=False)
        if clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm, norm_type)
            factors.append(float((clip_norm / (norm + 1e-6)).clamp(max=1.0)))
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
    return factors, losses


def train_fused(model, rule, accumulation, callable_loss=False, **options):
    opt = lowmem.FusedOptimizer(model.named_parameters(), rule=rule, lr=1e-2, **OPTIONS.get(rule, {}), **options)
    factors, losses = [], []
    at = poison(model) if "loss_scale" in options else lambda step: None
    torch.manual_seed(7)
    for step, micro_batches in enumerate(batches(accumulation)):
        at(step)
        for n, ids in enumerate(micro_batches, start=1):
            with opt.accumulate() if n < accumulation else nullcontext():
                loss = (lambda ids=ids: loss_of(model, ids, accumulation)) if callable_loss else None
                losses.append(opt.backward(loss or loss_of(model, ids, accumulation)))
        if opt.last_step.clip_coef is not None:
            factors.append(float(opt.last_step.clip_coef))
    return factors, losses, opt


def assert_same_bits(one, other):
    different = [
        name for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True) if not torch.equal(a, b)
    ]
    assert not different


@functools.cache
def usual_norm(kind, rule, accumulation, norm_type=2.0):
    """The median norm of a run: a limit that bites at some steps and not at others."""
    factors, _ = train_ordinarily(make_model(kind), rule, accumulation, clip_norm=1e-9, norm_type=norm_type)
    return 1e-9 / statistics.median(factors)


KINDS = ["dense", "experts"]
POLICIES = [("two_pass", 1), ("deferred", 1), ("deferred", 3)]


@pytest.mark.parametrize(("kind", "rule", "way"), pairwise(KINDS, ["lomo", "adamw", "adalomo"], POLICIES))
def test_clipping_by_norm(kind, rule, way):
    policy, accumulation = way
    ordinary, fused = make_model(kind), make_model(kind)
    clip_norm = usual_norm(kind, rule, accumulation)
    factors, losses = train_ordinarily(ordinary, rule, accumulation, clip_norm=clip_norm)
    fused_factors, fused_losses, opt = train_fused(fused, rule, accumulation, clip_norm=clip_norm, policy=policy)
    assert 3 <= sum(factor < 1 for factor in factors) <= STEPS - 3
    assert fused_factors == factors
    assert torch.equal(torch.stack(fused_losses), torch.stack(losses))
    assert_same_bits(ordinary, fused)
    assert opt.policy == policy
    assert opt.last_step.step == STEPS


@pytest.mark.parametrize(("kind", "rule", "way"), pairwise(KINDS, ["lomo", "adamw"], POLICIES))
def test_with_a_dynamic_loss_scale(kind, rule, way):
    """The scale grows every four steps, and a gradient overflows at two: those are no steps, and it backs off."""
    policy, accumulation = way
    ordinary, fused = make_model(kind), make_model(kind)
    clip_norm = usual_norm(kind, rule, accumulation)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    _, losses = train_ordinarily(ordinary, rule, accumulation, clip_norm=clip_norm, scaler=scaler)
    scale = lowmem.DynamicScale(init_scale=2.0**12, growth_interval=4)
    _, fused_losses, opt = train_fused(fused, rule, accumulation, clip_norm=clip_norm, loss_scale=scale, policy=policy)
    assert torch.equal(torch.stack(fused_losses), torch.stack(losses))
    assert_same_bits(ordinary, fused)
    assert opt.loss_scale == scaler.get_scale() == 2.0 ** (12 + 6 - 2)
    assert (opt.named_state_dict()["step"], opt.nonfinite_steps) == (STEPS - 2, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_value_and_by_the_largest_element(kind):
    ordinary, fused = make_model(kind), make_model(kind)
    largest = usual_norm(kind, "adamw", 1, float("inf"))
    options = {"clip_norm": largest, "norm_type": float("inf"), "clip_value": 4 * largest}
    factors, _ = train_ordinarily(ordinary, "adamw", 1, **options)
    fused_factors, _, _ = train_fused(fused, "adamw", 1, **options)
    assert fused_factors == factors
    assert_same_bits(ordinary, fused)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"replay": "forward"}, {"store": "disk"}, {"batching": False}], ids=str)
def test_every_way_is_the_same(kind, options):
    """A replayed forward, a store on disk, and small parameters one by one."""
    one, other = make_model(kind), make_model(kind)
    train_fused(one, "adalomo", 1, clip_norm=1.0, policy="two_pass")
    train_fused(other, "adalomo", 1, callable_loss="replay" in options, clip_norm=1.0, **options)
    assert_same_bits(one, other)
