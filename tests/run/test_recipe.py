"""Tests TRL's arguments and the sections `fused` and `layers` of training commands, as arguments and in YAML."""

import importlib
import os
import pkgutil
import re

import pytest
import torch
from support import runs
from transformers import SchedulerType
from trl.scripts.utils import DatasetConfig

from lowmem import FusedConfig, cli
from lowmem.errors import ConfigError
from lowmem.options import LayersConfig
from lowmem.run.parser import FORMER, Parser
from lowmem.run.recipe import parse
from lowmem.run.yaml_file import SECTIONS

PARTS = ("script", "training", "model", "mixture", "fused", "layers")


@pytest.fixture
def parsed(tmp_path):
    """Returns a function that parses a command's arguments, optionally with these lines as a YAML file."""

    def parse_words(text="", *words, command="sft", **options):
        config = []
        if text:
            (tmp_path / "c.yaml").write_text(text)
            config = ["--config", str(tmp_path / "c.yaml")]
        return parse(command, [*config, "--output_dir", str(tmp_path / "run"), *words], **options)

    return parse_words


@pytest.fixture
def error_message(parsed):
    """Returns a function that parses invalid arguments and returns the error message."""

    def parse_invalid(*words, **options):
        with pytest.raises(ConfigError) as error:
            parsed(*words, **options)
        return str(error.value)

    return parse_invalid


def same(one, other, parts=PARTS):
    return all(getattr(one, part) == getattr(other, part) for part in parts)


# --- Values -----------------------------------------------------------------------------------------------------------

# A YAML line, the equivalent arguments (or None), the part of the recipe that gets the value, and the value.
VALUES = [
    ("learning_rate: 1e-3", ["--learning_rate", "1e-3"], "training", 1e-3),
    ("seed: 1_000", ["--seed", "1_000"], "training", 1000),
    ("packing: True", ["--packing", "yes"], "training", True),
    ("eval_strategy: no", ["--eval_strategy", "no"], "training", "no"),
    ("lr_scheduler_type: cosine", ["--lr_scheduler_type", "cosine"], "training", SchedulerType.COSINE),
    ("max_length: null", None, "training", None),
    ("run_name: 2026-01-01", ["--run_name", "2026-01-01"], "training", "2026-01-01"),
    ("eos_token: <|end|>", ["--eos_token", "<|end|>"], "training", "<|end|>"),
    ("report_to: [none]", ["--report_to", "none"], "training", []),
    ("lora_target_modules: [q_proj, v_proj]", ["--lora_target_modules", "q_proj", "v_proj"], "model", None),
    ("model_init_kwargs: {a: {b: [1, x]}}", ["--model_init_kwargs", '{"a": {"b": [1, "x"]}}'], "training", None),
    ("datasets: [json]", ["--datasets", "json"], "mixture", [DatasetConfig("json")]),
    ("layers: {mlp_tile: 64}", ["--layers.mlp_tile", "64"], "layers", 64),
    ("max_grad_norm: .inf", ["--max_grad_norm", "inf"], "training", float("inf")),
    ("datasets: [{path: json, data_files: [a, b], fraction: 0.5}]", None, "mixture", None),
    ("fused: {rule: adamw, betas: [0.9, 0.95], loss_scale: {init_scale: 8}, clip_norm: null}", None, "fused", None),
    ("fused: {rule: lion, groups: [{match: a|b, lr: 1e-3}]}", None, "fused", None),
]


@pytest.mark.parametrize(("text", "words", "part", "value"), VALUES, ids=[text for text, *_ in VALUES])
def test_a_value_means_in_yaml_what_it_means_on_the_command_line(text, words, part, value, parsed):
    """The file that a run writes must also preserve it."""
    arguments = parsed(text)
    written = arguments.to_yaml()
    again = parsed(written)
    assert same(arguments, again) and again.to_yaml() == written
    assert set(runs.yaml.safe_load(written)) <= {text.partition(":")[0].partition(".")[0], "output_dir"}
    if words is not None:
        assert same(arguments, parsed("", *words))
    name = text.replace("layers: {", "").partition(":")[0]
    if value is not None:
        assert getattr(getattr(arguments, part), name) == value


def test_the_command_line_overrides_the_file_and_optim_sets_the_default(parsed):
    arguments = parsed("learning_rate: 1\nfused: {rule: lion, betas: [0.5, 0.5]}", "--learning_rate", "2",
                       "--fused.rule", "adamw")  # fmt: skip
    assert arguments.training.learning_rate == 2 and arguments.fused.rule == "adamw"
    assert parsed().fused is None and parsed().layers == LayersConfig()


def test_a_key_of_a_section_overrides_a_merged_one(parsed):
    fused = parsed("fused:\n  <<: {rule: adamw, policy: deferred}\n  rule: lion").fused
    assert fused == FusedConfig(rule="lion", policy="deferred")


@pytest.mark.parametrize("rule", ["adalomo", "torch.optim.SGD"])
def test_hyperparameters_of_the_rule_are_arguments(rule, parsed, error_message):
    name = {"adalomo": "clip_threshold", "torch.optim.SGD": "momentum"}[rule]
    nested = parsed(f"fused: {{rule: {rule}, {name}: 0.5}}")
    assert nested.fused == FusedConfig(rule=rule, **{name: 0.5})
    assert nested.fused == parsed("", "--fused.rule", rule, f"--fused.{name}", "0.5").fused
    assert nested.fused == parsed(f"fused: {{rule: {rule}}}", f"--fused.{name}", "0.5").fused
    assert f"line 1: unknown key 'fused.{name}'. The rule lion takes" in error_message(
        f"fused: {{{name}: 1, rule: lion}}"
    )


# --- Mistakes ---------------------------------------------------------------------------------------------------------

# YAML lines and their error message, which names the line and the correction.
MISTAKES = {
    "learning_rte: 1": "c.yaml, line 1: unknown key 'learning_rte'. Did you mean 'learning_rate'?",
    "seed: 1\nseed: 2": "c.yaml, line 2: the key 'seed' is repeated",
    "seed: 1\n\nmax_length: 2.5": "c.yaml, line 3: max_length: invalid int value: '2.5'",
    "learning_rate: [1, 2]": "line 1: learning_rate: expected a single value",
    "datasets: [{path: json, data_file: a}]": "line 1: datasets: DatasetConfig.__init__() got an unexpected",
    "mlp_tile: 3": "unknown key 'mlp_tile'. Did you mean 'layers.mlp_tile'?",
    "seed: 1\nlayers:\n  mlp_tile: 0": "c.yaml, line 3: layers: mlp_tile=0",
    "layers:\n  computed_gradients: true": "c.yaml, line 2: layers: computed_gradients=True is not supported",
    "fused:\n  rule: lomo\n  rounding: up": "c.yaml, line 3: fused: rounding 'up' is unknown",
    "fused: {rule: adaloom, clip_threshold: 1}": "line 1: fused: rule 'adaloom' is unknown. Did you mean 'adalomo'?",
    "fused: {groups: 3}": "line 1: fused: groups=3",
    "fused: {loss_scale: {init: 8}}": "line 1: fused: loss_scale: DynamicScale.__init__() got an unexpected",
    "fused: adamw": "line 1: fused is a section",
    "logging_steps: 0": "c.yaml, line 1: logging_steps=0.0 is not valid. Expected a number > 0",
    "lr_scheduler_type: greedy": "c.yaml: SFTConfig: lr_scheduler_type greedy requires an eval strategy",
    "seed: [1": "c.yaml, line 1: expected ',' or ']'",
    "a: &x [*x]": "line 1: found unconstructable recursive node",
    "seed: !!python/object:os.system 3": "line 1: could not determine a constructor",
    "hub_token: hf_abcdefghijklmnopqrst": "line 1: hub_token contains a password or token",
    "accelerate_config: fsdp2": "the launcher before the command: accelerate launch OPTIONS -m lowmem sft ...",
    "seed: 1\nmax_length: !!int x": "c.yaml, line 2: 'x' is not of the type !!int",
    'env: {a: "\\0"}': "c.yaml, line 1: env: a variable cannot be set",
    "model_init_kwargs: " + "[" * 100_000: "c.yaml: it is nested too deeply",
    "model_init_kwargs: '[1]'": "line 1: model_init_kwargs: expected a mapping",
    "dataset_name: a\ndatasets: [json]": "line 1: dataset_name has no effect together with datasets",
    "torch_dtype: bfloat16": "It belongs to an earlier version: write dtype instead",
    "warmup_ratio: 0.1": "write warmup_steps: SHARE",
    "num_train_epochs: .nan": "line 1: num_train_epochs=nan is not valid. Expected a number",
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_a_file(text, error_message):
    assert MISTAKES[text] in error_message(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learning_rat 1", "unknown argument 'learning_rat'. Did you mean 'learning_rate'?"),
        ("--learning_rate a", "--learning_rate: invalid float value: 'a'"),
        ("stray", "unknown argument 'stray'"),
        ("--fused.betas [1", "--fused.betas: '[1' is not YAML"),
        ("--config none.yaml", "none.yaml cannot be read: No such file"),
        ("--num_processes 2 --max_steps 3", "the command line of a training command. In `lowmem plan`, it is --ranks"),
        ("--model_init_kwargs " + '{"a":' * 20_000, "is not YAML: it is nested too deeply"),
    ],
)
def test_mistakes_on_the_command_line(words, message, error_message):
    assert message in error_message("", *words.split())
    assert ("launcher" in error_message("", *words.split())) == ("accelerate" in message)


NONSENSE = {
    "gradient_accumulation_steps": (-1, 0), "per_device_train_batch_size": (0,), "per_device_eval_batch_size": (0,),
    "max_length": (-1, 0), "save_steps": (0, -1), "eval_steps": (0, -3), "logging_steps": (-1,), "max_steps": (0, -2),
    "num_train_epochs": (0, -1), "seed": (-1, 2**32), "data_seed": (-1,), "dataloader_num_workers": (-1,),
    "label_smoothing_factor": (2, -0.1), "lora_dropout": (".nan", 1), "lora_r": (0,), "learning_rate": (-1, ".inf"),
    "neftune_noise_alpha": (-1, ".nan"), "adam_epsilon": (".nan",), "warmup_steps": (-1,),
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_numbers_out_of_range_raise_with_their_place(name, error_message, parsed):
    for value in NONSENSE[name]:
        assert f"c.yaml, line 2: {name}=" in error_message(f"run_name: a\n{name}: {value}")
        assert (message := error_message("", f"--{name}={str(value).removeprefix('.')}")).startswith(f"--{name}=")
        assert "is not valid. Expected a" in message
    error_message(f"{name}: {NONSENSE[name][0]}", "--packing", "true")
    parsed(f"{name}: {NONSENSE[name][0]}", f"--{name}", "0.5" if name == "lora_dropout" else "1")  # comes before it


def test_replacements_of_former_arguments_exist(parsed):
    known = {name for command in cli.COMMANDS for name in Parser(command, "adamw").known()}
    assert not known & FORMER.keys()
    for now in FORMER.values():
        assert now.split(":")[0] in known
        if ":" in now and "SHARE" not in now:
            parsed(now)


def test_environment_variables_of_a_file_are_set_and_not_written(parsed, monkeypatch):
    monkeypatch.setenv("LOWMEM_TEST_API_KEY", "before")
    arguments = parsed("seed: 3\nenv: {LOWMEM_TEST_API_KEY: abcdefgh12345}")
    assert os.environ["LOWMEM_TEST_API_KEY"] == "abcdefgh12345"
    assert runs.yaml.safe_load(arguments.to_yaml()).keys() == {"seed", "output_dir"}


# --- The parser -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_lists_every_argument(command, capsys):
    """Lists TRL's arguments, the options of both sections, and the rule's hyperparameters."""
    with pytest.raises(SystemExit) as end:
        parse(command, ["--help", "--fused.rule", "adalomo"])
    text = capsys.readouterr().out
    theirs = importlib.import_module(f"trl.scripts.{command}").make_parser()
    names = [option for action in theirs._actions for option in action.option_strings]
    names += [f"--{section}.{name}" for section, kind in SECTIONS.items()
              for name in kind.__dataclass_fields__ if name != "hyper"]  # fmt: skip
    listed = set(text.replace(",", " ").replace("[", " ").replace("]", " ").split())
    assert end.value.code == 0
    assert not {*names, "--fused.clip_threshold", "--config", "--traceback"} - listed


def test_the_local_rank_of_a_launcher_is_before_the_command():
    command, rest = cli._parser().parse_known_args(["--local_rank=1", "sft", "--config", "x", "--help"])
    assert (command.local_rank, command.training, rest) == (1, "sft", ["--config", "x", "--help"])


@pytest.mark.parametrize(
    ("words", "gpu", "non_blocking"),
    [
        ((), True, True),
        ((), False, False),
        (("--accelerator_config", '{"split_batches": false}'), True, False),
    ],
    ids=["GPU", "CPU", "set"],
)
def test_batches_are_copied_from_pinned_memory_without_waiting(words, gpu, non_blocking, parsed, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    arguments = parsed({}, "--bf16", "false", *words).training
    assert arguments.accelerator_config.non_blocking is non_blocking
    assert not arguments.logging_nan_inf_filter


def test_arguments_for_a_missing_device_raise(parsed):
    """`bf16` and half-precision steps need a GPU."""
    assert not parsed("bf16: true", device="gpu").training.bf16
    assert parsed("bf16: true", device="cpu").training.bf16
    assert parsed("fp16: true", device="gpu").training.use_cpu


# --- The file of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", runs.CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_parsed(path, monkeypatch):
    """Each file is parsed with the command in its first lines, which agree with the table of all configurations."""
    monkeypatch.chdir(path.parents[1])
    text, listed = path.read_text(), runs.listed_configs()[path.name]
    (command,) = re.findall(rf"(?m)^# (?:.* )?lowmem (\w+) --config configs/{path.name}$", text)
    arguments = parse(command, ["--config", str(path)], device="gpu")
    assert command.upper() == listed["task"]
    for pattern, column in ((r"Planned peak: ([\d.]+) GiB", "planned GiB per GPU"), (r"Disk: (\d+) GB", "disk, GB")):
        assert [cell for cell in [listed[column]] if cell] == re.findall(pattern, text)
    assert path.stem == "quickstart" or arguments.model.model_name_or_path.endswith("/" + listed["model"].split(",")[0])
    assert f"runs/{path.stem}".startswith(str(arguments.training.output_dir))
    assert arguments.fused.rule == "adalomo" and arguments.training.learning_rate
    assert command != "grpo" or callable(pkgutil.resolve_name(*arguments.script.reward_funcs))
