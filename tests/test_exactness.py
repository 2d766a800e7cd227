"""Fused training is ordinary training: bit for bit in float32, whatever is clipped, accumulated and scaled.

The ordinary side is PyTorch's own: `.grad` that accumulates, `GradScaler`, `clip_grad_value_`, `clip_grad_norm_`, and a
step of the optimizer. Its models are a Llama with tied embeddings and an expert model, both with dropout.
"""

import functools
import statistics
from contextlib import nullcontext

import pytest
import torch
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


def train_ordinarily(model, rule, accumulation, *, clip_norm=None, norm_type=2.0, clip_value=None, scaler=None):
    """Trains; returns the factors that gradients were clipped with, and the losses."""
    optimizer = ORDINARY[rule](list(model.named_parameters()))
    factors, losses = [], []
    torch.manual_seed(7)
    for micro_batches in batches(accumulation):
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
    torch.manual_seed(7)
    for micro_batches in batches(accumulation):
        for n, ids in enumerate(micro_batches, start=1):
            with opt.accumulate() if n < accumulation else nullcontext():
                loss = (lambda ids=ids: loss_of(model, ids, accumulation)) if callable_loss else None
                losses.append(opt.backward(loss or loss_of(model, ids, accumulation)))
        if opt.last_step.clip_factor is not None:
            factors.append(float(opt.last_step.clip_factor))
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


POLICIES = [("two_pass", 1), ("deferred", 1), ("deferred", 4)]


@pytest.mark.parametrize(("policy", "accumulation"), POLICIES)
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("rule", ["lomo", "adamw", "adalomo"])
def test_clipping_by_norm(kind, rule, policy, accumulation):
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
