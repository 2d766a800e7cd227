"""Two trainers that train one model in turn, as in a notebook, give the same weights as without the mixin."""

import gc
import weakref

import pytest
import torch
from support import trainers as builders
from support.trainers import build
from transformers import set_seed

import lowmem
from lowmem.errors import StepError

CAUSAL = "causal language model"
FIRST, SECOND = {"max_steps": 2}, {"max_steps": 3, "learning_rate": 3e-3, "gradient_accumulation_steps": 2}


def two_trainings(mixin, folder, between=lambda trainer: None, second=CAUSAL):
    """Returns the weights after both trainings. `between` gets a list with the only reference to the first trainer."""
    model = builders.llama()
    trainers = [build(CAUSAL, folder, mixin, {"model": model}, **FIRST)]
    trainers[0].train()
    between(trainers)
    set_seed(0)
    trainer = build(second, folder, mixin, {"model": model}, **SECOND)
    trainer.train()
    return [param.detach().clone() for param in model.parameters()]


def delete(trainers):
    optimizer = weakref.ref(trainers[0].optimizer)
    trainers.clear()
    gc.collect()
    assert optimizer() is None


def evaluate(trainers):
    trainers[0].evaluate(trainers[0].train_dataset)


@pytest.mark.parametrize("between", [delete, evaluate, lambda trainers: None], ids=["deleted", "evaluated", "kept"])
def test_the_second_trainer_trains_as_without_the_mixin(between, tmp_path):
    ordinary, fused = (two_trainings(mixin, tmp_path, between if mixin else list) for mixin in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(ordinary, fused, strict=True))


def test_using_the_first_trainer_again_raises(tmp_path):
    model = builders.llama()
    first, second = (build(CAUSAL, tmp_path, True, {"model": model}, max_steps=1) for _ in range(2))
    first.train()
    second.train()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(StepError, match=r"a later trainer of this model has removed.*Create a new trainer"):
        first.train()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    first.save_model(str(tmp_path / "saved"))
    second.train()


def test_a_users_optimizer_is_not_removed(tmp_path):
    model = builders.llama()
    opt = lowmem.FusedOptimizer(model.named_parameters(), rule="lomo", lr=0.1)
    with pytest.raises(StepError, match="is already updated by another FusedOptimizer"):
        build(CAUSAL, tmp_path, True, {"model": model}).train()
    ids = torch.tensor([[1, 2]], device=model.device)
    opt.backward(model(input_ids=ids, labels=ids).loss)
