"""A trainer without options trains as without the mixin, or raises if it cannot."""

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
import trl
from accelerate.utils.memory import release_memory
from support.products import in_turn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HPSearchBackend

import lowmem
from lowmem import FusedConfig
from lowmem.errors import ConfigError
from lowmem.trainer import FusedTrainer, FusedTrainerMixin

DEFAULT = TrainingArguments.learning_rate


def trained_weights(trainer):
    trainer.train()
    return [param.detach().clone() for param in trainer.model.parameters()]


# -- the optimizer -----------------------------------------------------------------------------------------------------

SETTINGS = {
    "as they are": {"max_grad_norm": 1.0},
    "clipped, decayed": {"max_grad_norm": 0.3, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    "accumulated": {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"},
}


@pytest.mark.parametrize(
    ("settings", "fused"), in_turn(SETTINGS.values(), [FusedConfig(policy="deferred", seed=3), FusedConfig(), None])
)
def test_without_fused_training_equals_the_plain_trainer_bit_for_bit(make, settings, fused):
    plain = trained_weights(make(Trainer, optim="adamw_torch", **settings))
    ours = make(fused=fused, optim="adamw_torch_fused", **settings)
    assert all(map(torch.equal, plain, trained_weights(ours)))
    assert {group["rule"] for group in ours.optimizer.param_groups} == {"adamw"}


# -- the learning rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fused", "arguments", "usual"),
    [
        (FusedConfig(rule="adalomo"), {}, "its usual rate is 0.001 .*; AdamW's 5e-05 corresponds to about 0.00"),
        (None, {"optim": "adalomo"}, "its usual rate is 0.001"),
        (FusedConfig(rule="lion"), {}, "its usual rate is 1e-05"),
        (FusedConfig(rule="lomo", clip_value=1.0), {"learning_rate": DEFAULT}, "its usual rate is 0.01"),
    ],
)
def test_a_default_learning_rate_raises(make, fused, arguments, usual):
    arguments = {"learning_rate": DEFAULT, **arguments}
    with pytest.raises(ConfigError, match=f"learning_rate=5e-05 is the default of TrainingArguments.*{usual}"):
        make(fused=fused, **arguments)


def test_a_default_learning_rate_raises_before_the_data_is_tokenized(make):
    class Tokenizes(Trainer):
        def __init__(self, *args, **kwargs):
            pytest.fail("the constructor of TRL's trainers tokenizes, and runs the reference model")

    class Fused(FusedTrainerMixin, Tokenizes): ...

    with pytest.raises(ConfigError, match="is the default of"):
        make(Fused, fused=FusedConfig(rule="adalomo"), learning_rate=DEFAULT)


def test_the_default_comes_from_the_arguments_class(tiny_llama, tmp_path):
    rate = trl.DPOConfig.learning_rate
    assert rate != DEFAULT
    fused = FusedConfig(rule="adalomo")
    common = {"output_dir": str(tmp_path), "report_to": "none", "max_grad_norm": 0.0}
    for cls, value, raises in (
        (TrainingArguments, DEFAULT, True), (TrainingArguments, rate, False),
        (trl.DPOConfig, rate, True), (trl.DPOConfig, DEFAULT, False),
    ):  # fmt: skip
        args = cls(learning_rate=value, **common, **({"bf16": False} if cls is trl.DPOConfig else {}))
        if raises:
            with pytest.raises(ConfigError, match=f"is the default of {cls.__name__}"):
                FusedTrainer(tiny_llama(), args, fused=fused)
        else:
            assert FusedTrainer(tiny_llama(), args, fused=fused).create_optimizer().param_groups[0]["lr"] == value


@pytest.mark.parametrize(
    ("fused", "rate", "lr"),
    [
        (FusedConfig(rule="adalomo", lr=1e-3), DEFAULT, 1e-3),
        (FusedConfig(rule="adalomo", lr=DEFAULT), DEFAULT, DEFAULT),  # explicitly requested
        (FusedConfig(rule="adalomo"), 2e-3, 2e-3),
        (FusedConfig(rule="torch.optim.SGD"), DEFAULT, DEFAULT),  # no usual rate is known
        (FusedConfig(rule="torch.optim.SGD", lr=0.1), DEFAULT, 0.1),
        (None, DEFAULT, DEFAULT),
    ],
)
def test_the_learning_rate_comes_from_where_it_was_set(make, fused, rate, lr):
    trainer = make(fused=fused, learning_rate=rate, lr_scheduler_type="constant", max_steps=2)
    assert trainer.args.learning_rate == lr  # the values in logs and model cards
    trainer.train()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {lr}
    assert {entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry} == {lr}


@pytest.mark.parametrize(("rule", "rate"), [("adalomo", 2e-3), ("adamw", 2e-3), ("adamw", DEFAULT)])
def test_two_different_learning_rates_raise(make, rule, rate):
    with pytest.raises(ConfigError, match=rf"fused\.lr=0\.001 contradicts learning_rate={rate}"):
        make(fused=FusedConfig(rule=rule, lr=1e-3), learning_rate=rate)


def test_a_hyperparameter_search_overrides_the_learning_rate(make, monkeypatch):
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)  # optuna is not installed
    trainer = make(fused=FusedConfig(rule="adalomo", lr=1e-3), learning_rate=DEFAULT, lr_scheduler_type="constant")
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
    trainer.train(trial=SimpleNamespace(params={"learning_rate": DEFAULT}, number=0))
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {DEFAULT}


def test_each_trial_of_a_hyperparameter_search_is_a_separate_run(make, tiny_llama, monkeypatch):
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)  # optuna is not installed
    search = make()
    search.hp_search_backend, search.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
    search.model_init = lambda: tiny_llama()
    for number, rate in enumerate((1e-2, 3e-3)):
        plain = make(Trainer, learning_rate=rate)
        plain.model_init = search.model_init
        search.train(trial=SimpleNamespace(params={"learning_rate": rate}, number=number))
        assert all(map(torch.equal, search.model.parameters(), trained_weights(plain)))
        # what transformers 5.23 (integration_utils.py, run_hp_search_optuna) does after each trial
        search.model_wrapped, search.model = release_memory(search.model_wrapped, search.model)
        search.accelerator.clear()


def test_arguments_are_not_changed_for_the_next_trainer(tiny_llama, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", max_grad_norm=0.0)
    for lr in (1e-3, 2e-3):
        trainer = FusedTrainer(tiny_llama(), args, fused=FusedConfig(rule="adalomo", lr=lr))
        assert (trainer.args.learning_rate, args.learning_rate) == (lr, DEFAULT)


# -- classes -----------------------------------------------------------------------------------------------------------


def test_the_mixin_comes_first():
    with pytest.raises(TypeError, match=r"list the mixin first: class Fused\(FusedTrainerMixin, SFTTrainer\)"):

        class Fused(trl.SFTTrainer, FusedTrainerMixin):
            pass

    class Callbacks:
        pass

    class Right(Callbacks, FusedTrainerMixin, trl.SFTTrainer):
        pass

    class Later(Right):
        pass


def test_arguments_by_position(tiny_llama, samples, tmp_path):
    """A tuple of rows must not be taken for `optimizers`, even if a class in between forwards its arguments."""

    class Passes(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Fused(FusedTrainerMixin, Passes): ...

    args = TrainingArguments(str(tmp_path), max_steps=1, max_grad_norm=0.0, report_to="none", save_strategy="no")
    for cls in (FusedTrainer, Fused):
        cls(tiny_llama(), args, None, tuple(samples)).train()
        opt = lowmem.FusedOptimizer((model := tiny_llama()).named_parameters(), model=model)
        names = [*inspect.signature(Trainer.__init__).parameters]
        between = [None] * (names.index("optimizers") - names.index("train_dataset") - 1)
        assert cls(model, args, None, tuple(samples), *between, (opt, None)).optimizer is opt


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, "exact"), (torch.bfloat16, "rounding stochastic")])
def test_the_log_says_how_weights_are_rounded_and_which_policy_is_chosen(make, tiny_llama, dtype, rounding, caplog):
    caplog.set_level(logging.INFO, "lowmem")
    make(model=tiny_llama(dtype)).create_optimizer()
    assert f"adamw, weights in {str(dtype)[6:]} ({rounding}), policy immediate" in caplog.text


def test_a_third_party_optimizer_in_bfloat16_warns(make, tiny_llama, caplog):
    lowmem.step.program._warn_of_lost_updates.cache_clear()
    make(model=tiny_llama(torch.bfloat16), fused=FusedConfig(rule="torch.optim.AdamW")).create_optimizer()
    assert "unless torch.optim.adamw.AdamW itself rounds differently" in caplog.text
    assert "is unbiased, so small updates accumulate. It needs a float32 copy of one parameter" in caplog.text
