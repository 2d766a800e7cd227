"""What `train` and `evaluate` return is what the trainer without the mixin returns, also for a run that has ended."""

import pytest
import torch
import trl
from datasets import Dataset
from support.trainers import fused, quiet, require
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput

import lowmem
from lowmem.errors import CheckpointError
from lowmem.trainer import FusedSFTTrainer, FusedTrainer, FusedTrainerMixin
from scripts.make_model import train_tokenizer

ADAMW = lowmem.FusedConfig(rule="adamw")


def preferences():
    rows = [{"prompt": f"question {i}", "chosen": f" a good answer {i}", "rejected": " no"} for i in range(8)]
    return Dataset.from_list(rows)


def completions():
    return Dataset.from_list([{"prompt": f"question {i}", "completion": f" answer {i} of many"} for i in range(8)])


def trl_trainer(cls, config, rows, tiny_llama, folder, **arguments):
    tokenizer = train_tokenizer(["some words to learn from, and some more of them"], 270)
    keywords = {"fused": ADAMW} if issubclass(cls, FusedTrainerMixin) else {}
    optim = "adamw_torch_fused" if keywords else "adamw_torch"
    args = config(**quiet(folder, max_steps=2, max_grad_norm=0.0, optim=optim, **arguments))
    model = tiny_llama(vocab_size=len(tokenizer))
    if config is trl.DPOConfig:
        keywords["ref_model"] = tiny_llama(vocab_size=len(tokenizer))
    return cls(model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer, **keywords)


@pytest.mark.parametrize(
    ("kind", "rows", "key"),
    [("DPO", preferences, "eval_rewards/accuracies"), ("SFT", completions, "eval_mean_token_accuracy")],
    ids=["DPO", "SFT"],
)
def test_metrics_of_trl_are_returned(kind, rows, key, tiny_llama, tmp_path):
    require(kind)
    ordinary, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    returned = []
    for cls in (ordinary, fused(ordinary)):
        trainer = trl_trainer(cls, config, rows(), tiny_llama, tmp_path / cls.__name__)
        returned.append((trainer.train().metrics, trainer.evaluate()))
    for actual, expected in zip(*reversed(returned), strict=True):
        assert actual.keys() == expected.keys()
        timed = [name for name in expected if name.endswith(("runtime", "per_second"))]
        assert {k: v for k, v in actual.items() if k not in timed} == pytest.approx(
            {k: v for k, v in expected.items() if k not in timed}, rel=1e-5, abs=1e-6
        )
    assert key in returned[1][1]


def test_the_best_model_by_a_metric_of_trl(tiny_llama, tmp_path):
    trainer = trl_trainer(
        FusedSFTTrainer, trl.SFTConfig, completions(), tiny_llama, tmp_path, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="mean_token_accuracy",
        greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    accuracies = {e["step"]: e[k] for e in trainer.state.log_history for k in e if k == "eval_mean_token_accuracy"}
    assert trainer.state.best_metric == max(accuracies.values())
    assert trainer.evaluate()["eval_mean_token_accuracy"] == pytest.approx(trainer.state.best_metric)


def test_metrics_of_the_step_are_logged(make):
    """A subclass that logs in `compute_loss` or in a callback sees what is added to its dict."""
    trainer = make(fused=lowmem.FusedConfig(loss_scale=8.0))
    trainer.train()
    logs = {"loss": 1.0}
    trainer.log(logs)
    assert logs["loss_scale"] == 8.0 and logs["epoch"] == trainer.state.epoch


@pytest.mark.parametrize(("steps", "again"), [(3, 3), (10, 10), (3, 2)], ids=["in an epoch", "its end", "fewer"])
def test_resuming_a_finished_run_trains_no_step(make, steps, again, caplog):
    """Ten steps are an epoch. The weights are those of the checkpoint."""
    run = make(save_strategy="steps", save_steps=steps, max_steps=steps)
    run.train()
    trained = [param.detach().clone() for param in run.model.parameters()]
    resumed = make(max_steps=again)
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, *args, **_):
            seen.append("begin")

        def on_step_end(self, *args, **_):
            seen.append("step")

        def on_train_end(self, *args, **_):
            seen.append("end")

    resumed.add_callback(Look())
    output = resumed.train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-{steps}")
    assert isinstance(output, TrainOutput) and output.global_step == steps
    assert seen == ["begin", "end"]
    assert all(torch.equal(a, b) for a, b in zip(trained, resumed.model.parameters(), strict=True))
    assert f"checkpoint-{steps} is at step {steps} of {again}" in caplog.text
    assert resumed.evaluate()["eval_loss"] == run.evaluate()["eval_loss"]


def test_resuming_a_finished_run_loads_the_best_weights(make):
    settings = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.3,
        "load_best_model_at_end": True, "optim": "adalomo",
    }  # fmt: skip
    run = make(**settings)
    run.train()
    assert run.state.best_global_step < 8
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=True)
    pairs = zip(run.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_no_callback_is_added(make):
    names = [[type(callback) for callback in make(cls).callback_handler.callbacks] for cls in (FusedTrainer, Trainer)]
    assert names[0] == names[1]


def test_a_missing_checkpoint_still_raises(make, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        make().train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
