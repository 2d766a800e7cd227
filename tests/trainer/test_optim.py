"""`optim`, `optim_args` and Adam's arguments select the same optimizer as in Hugging Face's trainer, or raise."""

import pytest
from support.nets import same
from support.trainers import both
from transformers import Trainer, TrainingArguments

import lowmem
from lowmem.errors import ConfigError, UnsupportedError

ADAM = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
MOMENTUM = {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"}


@pytest.fixture
def read_optim_args(request, tmp_path):
    """Skips arguments that the installed version of transformers does not read."""
    arguments = request.getfixturevalue("arguments")
    if "optim_args" in arguments and arguments.get("optim") in ("sgd", "adagrad", "rmsprop"):
        args = TrainingArguments(str(tmp_path), optim=arguments["optim"], optim_args=arguments["optim_args"])
        if not Trainer.get_optimizer_cls_and_kwargs(args)[1].keys() - {"lr"}:
            pytest.skip("this transformers ignores optim_args of optimizers of torch")


# Arguments of both trainers, `fused`, and the rule.
HONOURED = {
    "adamw_torch": ({"optim": "adamw_torch"}, None, "adamw"),
    "adamw_torch with betas": ({"optim": "adamw_torch", **ADAM}, None, "adamw"),
    "sgd with momentum": (MOMENTUM, None, "torch.optim.sgd.SGD"),
    "momentum in both": (MOMENTUM, lowmem.FusedConfig(momentum=0.9), "torch.optim.sgd.SGD"),
    "rmsprop": ({"optim": "rmsprop", "optim_args": "alpha=0.9"}, None, "torch.optim.rmsprop.RMSprop"),
    "adafactor": ({"optim": "adafactor"}, None, "transformers.optimization.Adafactor"),
}


@pytest.mark.parametrize(("arguments", "fused", "rule"), HONOURED.values(), ids=HONOURED)
@pytest.mark.usefixtures("read_optim_args")
def test_training_is_that_of_the_named_optimizer_to_the_last_bit(make, arguments, fused, rule):
    arguments = {"max_steps": 4, "weight_decay": 0.1, "learning_rate": 1e-3, **arguments}
    ordinary, trainer = both(lambda mixin: make(None if mixin else Trainer, fused=fused, **arguments))
    assert {group["rule"] for group in trainer.optimizer.param_groups} == {rule}
    assert same(trainer.model.parameters(), ordinary.model.parameters())


@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_rules_of_this_package_by_their_names_in_hugging_face(make, name):
    assert make(optim=name).create_optimizer().param_groups[0]["rule"] == name


ADAMW = lowmem.FusedConfig(rule="adamw")
REFUSED = {
    "an optimizer beside a rule": (
        ADAMW,
        {"optim": "adamw_torch"},
        "optim='adamw_torch' has no effect, because fused.rule='adamw' names the optimizer. Omit optim and set",
    ),
    "arguments beside a rule": (ADAMW, {"optim_args": "momentum=0.9"}, "optim_args='momentum=0.9' has no effect"),
    "betas of adalomo": (None, {"optim": "adalomo", "adam_beta1": 0.8}, "adam_beta1=0.8 has no effect with optim='ada"),
    "a misspelt hyperparameter": (lowmem.FusedConfig(wheight_decay=0.1), {}, "no hyperparameter 'wheight_decay'"),
    "other betas": (lowmem.FusedConfig(betas=(0.7, 0.95)), {"adam_beta1": 0.8}, r"contradicts betas=\(0.8, 0.999\)"),
    "another momentum": (lowmem.FusedConfig(momentum=0.8), MOMENTUM, "fused.momentum=0.8 contradicts momentum=0.9"),
    "ignored arguments": (None, {"optim": "adamw_torch", "optim_args": "momentum=0.9"}, "does not take 'momentum'"),
    "a package that is not there": (None, {"optim": "grokadamw"}, "optim='grokadamw': Please install grokadamw"),
    "projections": (None, {"optim": "sgd", "optim_target_modules": ["mlp"]}, "optim_target_modules=.'mlp'. has no"),
    "the whole model": (None, {"optim": "apollo_adamw"}, "optim='apollo_adamw': "),
    "8 bits": (
        None,
        {"optim": "adamw_bnb_8bit"},
        r"optim='adamw_bnb_8bit' is not supported.* set fused: \{rule: adamw, state_storage: 8bit\}",
    ),
    "another weight decay": (None, {"optim": "sgd", "optim_args": "weight_decay=0.1"}, "contradicts weight_decay=0.0"),
}


@pytest.mark.parametrize(("fused", "arguments", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("read_optim_args")
def test_options_the_rule_does_not_support_raise(make, fused, arguments, message):
    with pytest.raises((ConfigError, UnsupportedError), match=message) as raised:
        make(fused=fused, **arguments)
    assert "OptimizerNames" not in str(raised.value)


def test_arguments_changed_before_training_take_effect(make):
    """A hyperparameter search changes arguments in this way."""

    def changed(mixin):
        trainer = make(None if mixin else Trainer, optim="adamw_torch", max_steps=3)
        trainer.args.max_grad_norm, trainer.args.adam_beta1, trainer.args.learning_rate = 0.5, 0.7, 1e-3
        return trainer

    ordinary, trainer = both(changed)
    assert same(trainer.model.parameters(), ordinary.model.parameters())
    trainer.args.max_grad_norm = 0.1
    with pytest.raises(ConfigError, match=r"max_grad_norm=0\.1, but the optimizer has clip_norm=0\.5"):
        trainer.train()
