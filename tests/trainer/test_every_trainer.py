"""Every trainer of transformers and TRL with the mixin gives the losses and weights of the trainer without it."""

import peft
import pytest
import torch
import transformers
import trl
from support import trainers as builders
from support.nets import same, weights
from support.products import FULL, in_turn
from support.trainers import assert_same_run, both, losses

from lowmem.options import LayersConfig

# Rows that differ from others only inside transformers and TRL. They run only with LOWMEM_FULL.
LIKE_OTHERS = {"DPO, several losses", "KTO, precomputed", "GRPO, several iterations", "RLOO, several iterations"}
ROWS = [row for row in builders.ROWS if FULL or row not in LIKE_OTHERS]
# Rows take turns with these configurations. With LOWMEM_FULL, each row runs with all of them.
WAYS = {
    "two_pass": {"max_grad_norm": 0.1},
    "deferred": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2},
    "immediate": {"max_grad_norm": 0.0},
}
ON_A_CPU = pytest.mark.cpu_only("auto takes two passes on a CPU only")
CASES = [
    pytest.param(row, way, marks=ON_A_CPU if way == "two_pass" else ())
    for n, row in enumerate(ROWS)
    for m, way in enumerate(WAYS)
    if FULL or n % len(WAYS) == m
]


@pytest.mark.parametrize(("row", "policy"), CASES)
def test_training_equals_the_plain_trainer_bit_for_bit(row, policy, tmp_path):
    start = weights(builders.build(row, tmp_path, True).model)
    ordinary, fused = both(lambda mixin: builders.build(row, tmp_path, mixin, **WAYS[policy]))
    replays = "reentrant" not in fused.optimizer.policy_reason  # the default of activation checkpointing before 5.0
    assert fused.optimizer.policy == (policy if replays or policy != "two_pass" else "deferred")
    assert not same(start, fused.model.parameters())
    for trainer in (ordinary, fused):
        trainer.state.log_history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert_same_run(fused, ordinary, ("grad_norm",) if policy == "immediate" else ())  # summed over tiles


@pytest.mark.parametrize(("row", "policy"), in_turn(["SFT, dft loss", "GRPO"], ["immediate", "deferred"]))
def test_training_with_computed_logits_equals_the_plain_trainer(row, policy, tmp_path):
    """The head sums in another order. Weights get a larger tolerance because AdamW divides by small numbers."""

    def make(mixin):
        keywords = {"layers": LayersConfig()} if mixin else {}
        return builders.build(row, tmp_path, mixin, keywords, max_steps=2, **WAYS[policy])

    ordinary, fused = both(make)
    torch.testing.assert_close(weights(fused.model), weights(ordinary.model), rtol=1e-3, atol=1e-4)
    assert losses(fused) == pytest.approx(losses(ordinary), rel=1e-4, abs=1e-5)


def test_no_trainer_is_left_out():
    if not hasattr(trl, "DistillationTrainer"):
        pytest.skip("this TRL has other trainers")
    built = {builders.ROWS[row]()[0] for row in builders.ROWS}
    assert {name for name in dir(trl) if name.endswith("Trainer")} == {
        c.__name__ for c in built if hasattr(trl, c.__name__)
    }
    assert {transformers.Trainer, transformers.Seq2SeqTrainer} <= built


# -- arguments of TRL's commands: a model's path, adapters, streams, evaluation sets -----------------------------------

COMMANDS = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")
WAYS_OF_COMMANDS = ("a path", "adapters", "a stream", "several evaluation sets")


def arguments_for(row, way):
    """Returns keyword arguments of the constructor."""
    builders.require(row)
    classifier = {"head": transformers.LlamaForSequenceClassification, "num_labels": 1} if row == "Reward" else {}
    keywords = {"model": builders.saved(**classifier).name}
    if row in ("DPO", "KTO"):
        keywords["ref_model"] = None  # a second model from the path, or the model without its adapters
    data = builders.ROWS[row]()[3]["train_dataset"]
    match way:
        case "adapters":
            kind = "SEQ_CLS" if row == "Reward" else "CAUSAL_LM"
            target = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
            keywords["peft_config"] = peft.LoraConfig(task_type=kind, **target)
        case "a stream":
            keywords["train_dataset"] = data.to_iterable_dataset()
        case "several evaluation sets":
            keywords["eval_dataset"] = {"first": data.select(range(4)), "second": data.select(range(4, 10))}
    return keywords


@pytest.mark.parametrize(("row", "way"), in_turn(COMMANDS, WAYS_OF_COMMANDS))
def test_trainers_of_trl_accept_what_its_commands_pass(row, way, tmp_path):
    options = {"model_init_kwargs": {"dtype": "float32"}, "max_steps": 2}
    if way == "several evaluation sets":
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}

    def make(mixin):
        try:
            return builders.build(row, tmp_path / str(mixin), mixin, arguments_for(row, way), **options)
        except (AttributeError, NotImplementedError, TypeError) as error:
            if mixin:
                raise
            pytest.skip(f"TRL {trl.__version__}'s own trainer fails with {way}: {error}")

    ordinary, fused = both(make)
    assert_same_run(fused, ordinary)
    if way == "several evaluation sets":
        assert {"eval_first_loss", "eval_second_loss"} < {key for entry in fused.state.log_history for key in entry}
