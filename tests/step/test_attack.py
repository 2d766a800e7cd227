"""Random training loops against plain PyTorch. `python -m benchmarks.fuzz --only attack` runs one by its seed."""

import pytest
import torch
from support import attack

from lowmem.step import clipping, hooks, policies
from lowmem.step.compiled import has_compiler
from lowmem.tiles import quantized

BLOCK, BLOCKS = 40, 12
COMPILED = (2090, 2352, 2213, 2074)  # another optimizer, betas that are edited in place, another dtype (twice)


def endings(seeds, compile=False):
    """How trials ended. Fails with all that are defects."""
    found, defects = [], []
    for seed in seeds:
        try:
            found.append(attack.run(seed, compile=compile))
        except attack.DefectError as error:
            defects.append(f"seed {seed}: {error}")
    assert not defects, "\n".join(defects)
    return found


@pytest.mark.parametrize("block", range(BLOCKS))
def test_loops_train_as_in_plain_pytorch(block):
    found = endings(range(block * BLOCK, (block + 1) * BLOCK))
    assert found.count("accepted") >= 0.7 * len(found)


@pytest.mark.cpu_only("the simulated GPU has no compiler")
@pytest.mark.skipif(not has_compiler("cpu"), reason="needs a C++ compiler")
@pytest.mark.parametrize("seed", COMPILED)
def test_compiled_loops_train_as_in_plain_pytorch(seed):
    assert attack.draw(seed).compile
    assert endings([seed], compile=True) == ["accepted"]


def lose_what_is_offered(monkeypatch):
    own = hooks.Hooks.offered
    monkeypatch.setattr(hooks.Hooks, "offered", lambda self, param: own(self, param)[:0])


def clip_by_a_per_mille_more(monkeypatch):
    own = clipping.Clipping.decide

    def decide(self, measured, *, prepared):
        decision = own(self, measured, prepared=prepared)
        if decision.clip_coef is not None:
            decision.clip_coef.mul_(0.999)
        return decision

    monkeypatch.setattr(clipping.Clipping, "decide", decide)


def forget_a_micro_batch(monkeypatch):
    monkeypatch.setattr(policies, "add", lambda total, grad: None)


def shift_codes(monkeypatch):
    """Products read a matrix in codes that is a per mille larger."""
    own = quantized.QuantizedWeight.dequantize
    monkeypatch.setattr(quantized.QuantizedWeight, "dequantize", lambda self: own(self) * 1.001)


@pytest.mark.parametrize(
    ("plant", "reaches"),
    [
        (lose_what_is_offered, lambda s: s.computed),
        (shift_codes, lambda s: s.codes and s.exact and s.hidden > 90 and not s.lora),
        (clip_by_a_per_mille_more, lambda s: s.clip_norm is not None),
        (forget_a_micro_batch, lambda s: s.accumulation > 1),
    ],
)
def test_a_planted_defect_is_found(plant, reaches, monkeypatch):
    plant(monkeypatch)
    seeds = [seed for seed in range(200) if reaches(s := attack.draw(seed, compile=False)) and s.checkpoint is None]
    with pytest.raises(attack.DefectError, match=r"differ|grad_norm") as caught:
        for seed in seeds[:20]:
            attack.run(seed, compile=False)
    assert f"seed={seed}," in str(caught.value)


def test_a_seed_decides_everything():
    assert [attack.draw(seed) for seed in range(30)] == [attack.draw(seed) for seed in range(30)]
    drawn = [attack.draw(seed) for seed in range(2000)]
    assert {event for s in drawn for _, event in s.events} == set(attack.EVENTS)
    assert {s.rule for s in drawn} == set(attack.HYPER)
    kinds = [(s.codes, s.lora) for s in drawn], [s.autocast for s in drawn], [(s.reads, s.reads_early) for s in drawn]
    assert [len(set(kind)) for kind in kinds] == [8, 3, 8]


def test_a_guard_is_next_to_every_parameter():
    net = torch.nn.Linear(3, 5)
    before = [param.detach().clone() for param in net.parameters()]
    around = attack.guard(net)
    assert all(map(torch.equal, before, net.parameters()))
    torch.as_strided(net.bias.detach(), (6,), (1,)).zero_()  # one too many
    assert sum(bool((part != attack.GUARD).any()) for part in around) == 1
