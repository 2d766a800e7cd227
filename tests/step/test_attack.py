"""Randomly drawn training loops give the same results as in plain PyTorch. Hypothesis shrinks a loop that does not.

`scripts/test.sh --full tests/step/test_attack.py` draws many more loops, with a different seed each time.
"""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import attack
from support.attack import DYNAMIC, HYPER, Settings
from support.products import FULL

# The choices of each setting that has more than two; the first is the simplest, and one that occurs twice is twice as
# likely.
CHOICES = {
    "dtype": (torch.float32, torch.float32, torch.bfloat16),
    "hidden": (8, 24, 48, 96, 192),
    "blocks": (1, 2, 3),
    "more_words": (1, 7, 40),
    "heads": (1, 1, 2),
    "dropout": (0.0, 0.0, 0.1),
    "checkpoint": (None, None, None, "non-reentrant", "reentrant"),
    "codes": (None, None, None, None, "int8", "int10", "int12"),
    "lora": (False, False, False, False, True),
    "autocast": (None, None, None, None, None, "forward", "step"),
    "decay": (0.0, 0.1),
    "group": (None, None, None, "lr", "rule", "rule"),
    "late": (False, False, True),
    "policy": ("auto", "auto", "immediate", "two_pass", "deferred"),
    "clip_norm": (None, None, 0.5),
    "clip_value": (None, None, None, 0.01),
    "loss_scale": (None, None, None, 1000.0, DYNAMIC),
    "store": ("auto", "host", "device"),
    "accumulation_dtype": ("float32", "gradient"),
    "rounding": ("nearest", "stochastic", "compensated", "compensated8"),
    "state_storage": ("float32", "float32", "bfloat16", "8bit", "8bit_64", "8bit_nearest"),
    "steps": (2, 3, 4, 5),
    "accumulation": (1, 1, 1, 2, 3),
    "call": ("loss", "loss", "loss", "callable", "plain", "inputs", "by hand"),
    "inputs": ("all", "matrices", "vectors"),
    "scheduler": (None, None, "exponential", "one cycle"),
}
EVENTS = ("lr", "betas", "betas in place", "decay", "freeze", "thaw", "add group", "save", "paused", "touch")

# Settings that exclude each other (most raise, which other tests show), and their replacement.
FITTING = (
    # adafactor_t2t and third-party rules have their own rounding
    (lambda s: not s.ours or s.rule == "adafactor_t2t", {"rounding": "nearest", "state_storage": "float32"}),
    (lambda s: not s.ours or s.rule == "adafactor_t2t", {"codes": None}),
    (lambda s: s.codes, {"rounding": "stochastic"}),
    # these rules have no elementwise state
    (lambda s: s.rule in ("lomo", "adalomo"), {"state_storage": "float32"}),
    # the sign of a sum close to zero depends on its last bits
    (lambda s: s.rule == "lion", {"tiled": False}),
    (lambda s: s.rule == "lion" and s.codes, {"autocast": None}),
    # tiles sum bfloat16 products in a different order
    (lambda s: s.autocast, {"tiled": False}),
    # OneCycleLR does not support groups that are added later
    (lambda s: s.late and s.scheduler == "one cycle", {"scheduler": None}),
    # AdaLomo computes the norm before clamping, the other rules after
    (lambda s: s.group == "rule" and s.rule not in ("adamw", "adalomo", "lans"), {"group": "lr"}),
    (lambda s: s.group == "rule" and s.rule == "adalomo" and s.clip_norm and s.clip_value, {"group": "lr"}),
    # the measuring pass misses gradients of a region, and the embedding's gradient would arrive in two parts
    (lambda s: s.checkpoint == "reentrant" and s.policy == "two_pass", {"policy": "deferred"}),
    (lambda s: s.checkpoint == "reentrant", {"twice": False}),
    (lambda s: s.checkpoint == "reentrant" and s.call not in ("loss", "callable"), {"call": "loss"}),
    # only opt.backward applies the loss scale
    (lambda s: s.call in ("plain", "inputs", "by hand"), {"loss_scale": None}),
    (lambda s: s.accumulation > 1 and s.policy != "auto", {"policy": "deferred"}),
    (lambda s: s.call in ("plain", "inputs") and (s.clip_norm or s.policy == "two_pass"), {"policy": "deferred"}),
    (lambda s: s.policy == "immediate" and s.clip_norm, {"policy": "deferred"}),
    (lambda s: s.policy == "immediate" and s.loss_scale and not s.ours, {"policy": "deferred"}),
    (lambda s: s.policy != "deferred", {"store": "auto", "accumulation_dtype": "float32"}),
    # adjacent 8-bit codes are too far apart for the tolerance
    (lambda s: s.state_storage.startswith("8bit") and not s.exact, {"state_storage": "bfloat16"}),
)


@st.composite
def loops(draw, rule):
    choices = {field.name: CHOICES.get(field.name, (False, True)) for field in fields(Settings)}
    for name in ("rule", "compile", "events"):
        del choices[name]
    s = Settings(rule=rule, **{name: draw(st.sampled_from(values)) for name, values in choices.items()})
    for unfit, changes in FITTING:
        s = replace(s, **changes) if unfit(s) else s
    events = list(EVENTS)
    if s.policy not in ("immediate", "two_pass"):
        events.append("dropped")
        events += ["overflow"] if s.loss_scale is DYNAMIC else []
    converts = s.ours and s.rule != "adafactor_t2t" and not s.rounding.startswith("compensated") and not s.codes
    if converts and not s.state_storage.startswith("8bit"):
        events += ["bfloat16", "float32"]
    happened = st.tuples(st.integers(0, s.steps - 1), st.sampled_from(events))
    return replace(s, events=tuple(sorted(draw(st.lists(happened, max_size=3)))))


@pytest.mark.filterwarnings("ignore")  # schedulers warn about steps skipped by an overflow
@pytest.mark.parametrize("rule", HYPER)
def test_loops_train_as_in_plain_pytorch(rule):
    @settings(max_examples=1000 if FULL else 8, derandomize=not FULL, database=None)
    @given(loops(rule))
    def check(s):
        attack.compare(s)

    check()
