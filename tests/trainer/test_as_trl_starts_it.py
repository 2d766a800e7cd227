"""Trainers that get what the commands of TRL give them: a path of a model, adapters, streams, evaluation sets."""

from functools import cache
from tempfile import TemporaryDirectory

import peft
import pytest
import transformers as hf
import trl
from support import trainers as builders
from support.trainers import assert_same_run, both, build

COMMANDS = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


@cache
def saved(row):
    """The folder of a model that suits the trainer."""
    folder = TemporaryDirectory()
    classifier = {"head": hf.LlamaForSequenceClassification, "num_labels": 1} if row == "Reward" else {}
    builders.llama(**classifier).save_pretrained(folder.name)
    return folder


def adapters(row):
    kind = "SEQ_CLS" if row == "Reward" else "CAUSAL_LM"
    return peft.LoraConfig(task_type=kind, lora_dropout=0.1, **LORA)


def arguments_for(row, way):
    """Keywords of the constructor."""
    builders.require(row)
    keywords = {"model": saved(row).name}
    if row in ("DPO", "KTO"):
        keywords["ref_model"] = None  # a second model from the path, or the model without its adapters
    data = builders.ROWS[row]()[3]["train_dataset"]
    match way:
        case "adapters":
            keywords["peft_config"] = adapters(row)
        case "a stream":
            keywords["train_dataset"] = data.to_iterable_dataset()
        case "several evaluation sets":
            keywords["eval_dataset"] = {"first": data.select(range(4)), "second": data.select(range(4, 10))}
    return keywords


@pytest.mark.parametrize("way", ["a path", "adapters", "a stream", "several evaluation sets"])
@pytest.mark.parametrize("row", COMMANDS)
def test_training_equals_the_plain_trainer_bit_for_bit(row, way, tmp_path):
    options = {"model_init_kwargs": {"dtype": "float32"}, "max_steps": 2}
    if way == "several evaluation sets":
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}

    def make(mixin):
        try:
            return build(row, tmp_path / str(mixin), mixin, arguments_for(row, way), **options)
        except (AttributeError, NotImplementedError, TypeError) as error:
            if mixin:
                raise
            pytest.skip(f"TRL {trl.__version__}'s own trainer fails with {way}: {error}")

    ordinary, fused = both(make)
    assert_same_run(fused, ordinary)
    if way == "several evaluation sets":
        assert {"eval_first_loss", "eval_second_loss"} < {key for entry in fused.state.log_history for key in entry}
