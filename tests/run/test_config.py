"""Configurations: what is read, what is refused and how that is said, and that what is written reads back."""

import pytest
import torch
import yaml
from trl import SFTConfig

from lowmem.errors import ConfigError, LowmemError
from lowmem.run.config import ELSEWHERE, load, save
from lowmem.run.data import DataConfig, sft_arguments
from lowmem.run.source import reason

TEXT = """\
run_dir: runs/one
model:
  config: {model_type: llama, hidden_size: 64, rope_theta: 1e6}
  train_tokenizer: {vocab_size: 512}
data:
  path: data.jsonl
optimizer:
  rule: adalomo
  lr: 1e-3
trainer:
  max_steps: 20
  eval_strategy: no
"""


@pytest.fixture
def write(tmp_path):
    """A function that writes a configuration, `TEXT` with a part of it replaced."""

    def write(old="", new="", text=TEXT):
        assert old in text
        path = tmp_path / "run.yaml"
        path.write_text(text.replace(old, new, 1) if old else text)
        return path

    return write


def refused(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


# --- What is read -------------------------------------------------------------------------------------------------


def test_sections_become_dataclasses(write):
    config = load(write())
    assert config.run_dir == "runs/one"
    assert config.model.train_tokenizer.vocab_size == 512
    assert config.model.config["rope_theta"] == 1e6
    assert config.data == DataConfig(path="data.jsonl")
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.rule == "adalomo"
    assert config.trainer == {"max_steps": 20, "eval_strategy": "no"}


@pytest.mark.parametrize("written", ["1e-3", "1.0e-3", "0.001", "1E-3", ".1e-2"])
def test_a_number_is_a_number_however_it_is_written(written, write):
    assert load(write("lr: 1e-3", f"lr: {written}")).optimizer.lr == 1e-3
    assert load(write(), [f"optimizer.lr={written}"]).optimizer.lr == 1e-3


def test_a_whole_number_may_have_an_exponent(write):
    steps = load(write(), ["trainer.max_steps=1e3"]).trainer["max_steps"]
    assert (steps, type(steps)) == (1000, int)


def test_words_and_dates_stay_strings(write):
    config = load(write("run_dir: runs/one", "run_dir: 2024-01-01"), ["data.split=on", "data.eval_split=1:30"])
    assert (config.run_dir, config.data.split, config.data.eval_split) == ("2024-01-01", "on", "1:30")


def test_overrides_reach_any_depth_and_win(write):
    config = load(
        write(),
        ["trainer.max_steps=10", "model.config.num_hidden_layers=2", "data.columns.output=answer", "data.split=a=b"],
    )
    assert config.trainer["max_steps"] == 10
    assert config.model.config["num_hidden_layers"] == 2 and config.model.config["hidden_size"] == 64
    assert config.data.columns == {"output": "answer"}
    assert config.data.split == "a=b"


def test_an_override_replaces_a_whole_section(write):
    assert load(write(), ["trainer={save_steps: 5}"]).trainer == {"save_steps": 5}


def test_an_override_can_choose_pretrained_weights(write):
    model = load(write(), ["model.config=null", "model.train_tokenizer=", "model.path=org/name"]).model
    assert (model.path, model.config, model.train_tokenizer) == ("org/name", None, None)


def test_hyperparameters_of_the_rule_are_set_beside_the_options(write):
    config = load(write(), ["optimizer.clip_threshold=2", "optimizer.eps=[1e-30, 1e-4]", "optimizer.clip_value=1"])
    assert config.optimizer.hyper == {"clip_threshold": 2, "eps": (1e-30, 1e-4)}
    assert config.optimizer.clip_value == 1


def test_hyperparameters_of_a_torch_optimizer_are_known(write):
    config = load(write(), ["optimizer.rule=torch.optim.AdamW", "optimizer.betas=[0.9, 0.95]"])
    assert config.optimizer.hyper == {"betas": (0.9, 0.95)}


def test_groups_take_a_rule_and_its_hyperparameters(write):
    groups = "optimizer.groups=[{match: norm, weight_decay: 0}, {match: ^lm_head, rule: adamw, betas: [0, 0.9]}]"
    assert load(write(), [groups]).optimizer.groups == (
        {"match": "norm", "weight_decay": 0},
        {"match": "^lm_head", "rule": "adamw", "betas": (0, 0.9)},
    )


@pytest.mark.parametrize(
    ("group", "line", "problem"),
    [
        (
            "  match: a\n      weight_decy: 0",
            12,
            "unknown key 'optimizer.groups.0.weight_decy'. Did you mean 'weight_decay'?",
        ),
        ("  match: a\n      betas: [0, 0]", 12, "unknown key 'optimizer.groups.0.betas'."),
        ("  match: a\n      rule: adamww", 12, "rule 'adamww' is unknown. Did you mean 'adamw'?"),
        ("  match: a\n      lr: fast", 12, "'optimizer.groups.0.lr' should be a valid number, found \"fast\"."),
        ("  rule: adamw", 11, "missing optimizer.groups.0.match."),
        ("  head", 11, "'optimizer.groups.0' should be a mapping, found \"head\"."),
    ],
)
def test_a_wrong_key_of_a_group_has_its_line(group, line, problem, write):
    path = write("lr: 1e-3", f"lr: 1e-3\n  groups:\n    - {group.strip()}")
    assert refused(path).startswith(f"{path}, line {line}: {problem}")


def test_one_seed_for_all(write):
    config = load(write(), ["seed=7"])
    assert (config.seed, config.optimizer.seed) == (7, 7)
    assert "set seed" in refused(write(), "optimizer.seed=3")


def test_merge_keys_work(write):
    path = write(text=TEXT.replace("trainer:\n", "trainer:\n  <<: {save_steps: 5}\n"))
    assert load(path).trainer == {"save_steps": 5, "max_steps": 20, "eval_strategy": "no"}


# --- What is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.lr=1e-5", "optimizer.eps=[1e-30, 1e-4]", "optimizer.loss_scale=1024", "seed=3"],
        ["model.config=null", "model.train_tokenizer=null", "model.path=org/name", "data.columns={output: b}"],
        ["data.split='1e-3'", "data.eval_split='true'", "run_dir='010'", "trainer.run_name=über"],
        ["optimizer.rule=adamw", "optimizer.betas=[0.8, 0.9]", "optimizer.groups=[{match: '^lm_head', lr: 1}]"],
        ["optimizer.groups=[{match: a, rule: adamw, betas: [0.8, 0.9]}, {match: b, clip_threshold: 2}]"],
        ["optimizer.groups=[{match: a, rounding: stochastic, state_storage: bfloat16}]", "optimizer.norm_type=.inf"],
        ["trainer.lr_scheduler_kwargs={min_lr: 1e-6}", "trainer.report_to=[tensorboard]", "trainer.bf16=false"],
    ],
)
def test_what_is_saved_reads_back_equal(overrides, write, tmp_path):
    config = load(write(), overrides)
    save(config, tmp_path / "saved.yaml")
    assert load(tmp_path / "saved.yaml") == config


STRINGS = [
    "no",
    "1e-3",
    "010",
    "1:30",
    "2024-01-01",
    "~",
    "",
    " a ",
    "a: b",
    "# a",
    "x\ny",
    "<<",
    "=",
    "ü",
    "0x1",
    "- a",
]


def test_any_string_reads_back_here_and_with_other_readers(write, tmp_path):
    config = load(write())
    config.trainer["report_to"] = STRINGS
    save(config, tmp_path / "saved.yaml")
    assert load(tmp_path / "saved.yaml") == config
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text())["trainer"]["report_to"] == STRINGS


def test_other_yaml_readers_see_the_same_values(write, tmp_path):
    save(load(write(), ["optimizer.lr=1e-5"]), tmp_path / "saved.yaml")
    plain = yaml.safe_load((tmp_path / "saved.yaml").read_text())
    assert plain["optimizer"]["lr"] == 1e-5
    assert plain["trainer"]["eval_strategy"] == "no"


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(write, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inside").touch()
    with pytest.raises(LowmemError, match=r"taken: can't be written: .*directory"):
        save(load(write()), tmp_path / "taken")
    assert not list(tmp_path.glob(".*.tmp"))


# --- What is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "guess"),
    [
        ("max_steps", "max_step", 11, "trainer.max_step", "max_steps"),
        ("path: data", "paths: data", 6, "data.paths", "path"),
        ("hidden_size", "hiden_size", 3, "model.config.hiden_size", "hidden_size"),
        ("vocab_size", "vocab", 4, "model.train_tokenizer.vocab", "vocab_size"),
        ("trainer:", "trainr:", 10, "trainr", "trainer"),
        ("lr: 1e-3", "lr: 1e-3\n  clip_treshold: 1", 10, "optimizer.clip_treshold", "clip_threshold"),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest(old, new, line, key, guess, write):
    path = write(old, new)
    assert refused(path).startswith(f"{path}, line {line}: unknown key '{key}'. Did you mean '{guess}'?")


def test_an_unknown_key_like_no_other_lists_the_known_ones(write):
    said = refused(write(), "model.zzz=1")
    assert "override 'model.zzz=1': unknown key 'model.zzz'" in said and "train_tokenizer" in said


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.max_steps=many", "'trainer.max_steps' should be a valid integer, found \"many\"."),
        ("trainer.max_steps=1.5", "'trainer.max_steps' should be a valid integer, found 1.5."),
        ("trainer.max_steps=true", "'trainer.max_steps' should be a valid integer, found true."),
        ("trainer.bf16=yes", "'trainer.bf16' should be a valid boolean, found \"yes\"."),
        ("trainer.report_to=[1]", "'trainer.report_to.0' should be a valid string, found 1."),
        (
            "trainer.report_to={a: 1}",
            "'trainer.report_to' should be a valid string or a valid list, found {\"a\": 1}.",
        ),
        (
            "trainer.activation_checkpointing=1",
            "'trainer.activation_checkpointing' should be a valid boolean, found 1.",
        ),
        ("trainer=null", "'trainer' should be a mapping, found null."),
        ("optimizer=adamw", "'optimizer' should be a mapping, found \"adamw\"."),
        ("optimizer.lr='1e-3'", "'optimizer.lr' should be a valid number, found \"1e-3\"."),
        ("optimizer.lr=null", "'optimizer.lr' should be a valid number, found null."),
        ("optimizer.lr=0", "'optimizer.lr' should be greater than 0, found 0."),
        ("optimizer.lr=.nan", "'optimizer.lr' should be a finite number, found NaN."),
        ("optimizer.rule=3", "rule 3 is neither a name"),
        ("optimizer.loss_scale=true", "should be a valid number or 'dynamic' or a mapping, found true."),
        (
            "optimizer.loss_scale={min_scal: 3}",
            "unknown key 'optimizer.loss_scale.min_scal'. Did you mean 'min_scale'?",
        ),
        (
            "optimizer.loss_scale={min_scale: a}",
            "'optimizer.loss_scale.min_scale' should be a valid number, found \"a\".",
        ),
        ("optimizer.loss_scale={min_scale: -1}", "loss_scale.min_scale=-1.0 is not"),
        ("optimizer.eps=[1e-30]", "missing optimizer.eps.1."),
        ("optimizer.clip_threshold=high", "'optimizer.clip_threshold' should be a valid number, found \"high\"."),
        ("data.columns={output: 3}", "'data.columns.output' should be a valid string, found 3."),
        ("data.columns={ouput: a}", "found \"ouput\". Did you mean 'output'?"),
        ("data.path=[a, b]", '\'data.path\' should be a valid string, found ["a", "b"].'),
        ("data.kind=mesages", "found \"mesages\". Did you mean 'messages'?"),
        (
            "model.train_tokenizer.vocab_size=0",
            "'model.train_tokenizer.vocab_size' should be greater than or equal to 262, found 0.",
        ),
        ("seed=one", "'seed' should be a valid integer, found \"one\"."),
        ("seed=-1", "'seed' should be greater than or equal to 0, found -1."),
        ("run_dir=''", "'run_dir' should have at least 1 character, found \"\"."),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected_and_found(override, problem, write):
    message = refused(write(), override)
    assert message.startswith(f"override {override!r}: ")
    assert problem in message


def test_a_wrong_type_in_the_file_has_its_line(write):
    path = write("lr: 1e-3", "lr: fast")
    assert refused(path) == f"{path}, line 9: 'optimizer.lr' should be a valid number, found \"fast\"."


def test_everything_that_is_wrong_is_reported_at_once(write):
    path = write("  path: data.jsonl", "  paths: data.jsonl\n  max_length: long")
    assert refused(path, "seed=-1").split("\n") == [
        f"{path}, line 6: unknown key 'data.paths'. Did you mean 'path'?",
        f"{path}, line 5: missing data.path.",
        f"{path}, line 7: 'data.max_length' should be a valid integer, found \"long\".",
        "override 'seed=-1': 'seed' should be greater than or equal to 0, found -1.",
    ]


@pytest.mark.parametrize(
    ("override", "guess"), [("model.dtype=bf16", "bfloat16"), ("trainer.lr_scheduler_type=cosin", "cosine")]
)
def test_an_unknown_choice_names_the_nearest(override, guess, write):
    said = refused(write(), override)
    assert "should be '" in said and f"Did you mean '{guess}'?" in said


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_key_that_is_set_elsewhere_is_refused_with_the_place(name, write):
    written = "***" if name == "trainer.hub_token" else "1"
    assert refused(write(), f"{name}=1") == f"override '{name}={written}': '{name}' is not set here: {ELSEWHERE[name]}."


def test_the_keys_that_are_set_elsewhere_exist_and_cover_what_the_data_sets():
    names = {name.removeprefix("trainer.") for name in ELSEWHERE if name.startswith("trainer.")}
    assert names <= set(SFTConfig.__dataclass_fields__)

    class Rows:
        column_names = ("text",)

    assert set(sft_arguments(DataConfig(path="a.txt"), Rows())) <= names


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.path=org/name"], "give either model.path"),
        (["model.config=null", "model.train_tokenizer=null"], "give either model.path"),
        (["model.tokenizer=org/name"], "model.tokenizer or model.train_tokenizer, not both"),
        (["model.train_tokenizer=null"], "model.config brings no tokenizer: set model.tokenizer"),
        (["model.config.model_type=lama"], "model.config.model_type 'lama' is unknown. Did you mean 'llama'?"),
        (["model.config={hidden_size: 64}"], "model_type None is unknown"),
        (["model.config.hidden_size=abc"], 'should be a valid integer or a valid list, found "abc".'),
        (["optimizer.rule=adalmo"], "Did you mean 'adalomo'?"),
        (["optimizer.weight_decay=-1"], "weight_decay=-1.0 is out of range"),
        (["optimizer.rounding=up"], "rounding 'up'"),
        (["optimizer.groups=[{match: '('}]"], "missing ), unterminated subpattern"),
        (["data.eval_path=a.jsonl", "data.eval_fraction=0.1"], "data.eval_path and data.eval_fraction are both set"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_their_place(overrides, said, write):
    message = refused(write(), *overrides)
    assert said in message
    assert f"override {overrides[0]!r}" in message


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ("run_dir: runs/one\n", "run_dir"),
        ("data:\n  path: data.jsonl\n", "data"),
        ("  path: data.jsonl\n", "data.path"),
        ("  lr: 1e-3\n", "optimizer.lr"),
    ],
)
def test_missing_keys_are_named(lines, missing, write):
    path = write(lines, "" if missing != "data.path" else "  split: train\n")
    said = refused(path)
    assert str(path) in said and said.endswith(f"missing {missing}.")


def test_a_key_that_is_written_twice_is_refused(write):
    path = write("lr: 1e-3", "lr: 1e-3\n  lr: 2e-3")
    duplicate = "the key 'lr' is already on line 9. Delete one of them"
    assert refused(path) == f"{path}, line 10: not valid YAML: {duplicate}."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run_dir: [a\nmodel: 3\n", "line 2: not valid YAML"),
        ("run_dir:\n\t- a\n", "line 2: not valid YAML"),
        ("run_dir: a\0", "not valid YAML"),
        ("run_dir: !!python/object:os.system {}", "line 1: not valid YAML: !!python/object:os.system is a type that"),
        ("run_dir: !!set {a}", "line 1: not valid YAML: !!set is a type that"),
        ("run_dir: &a [*a]", "line 1: not valid YAML: nested more than 40 deep, or in itself"),
        ("- run_dir\n", "a configuration is a mapping"),
        ("", "a configuration is a mapping of keys (run_dir, model, ...), not None"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_refused(text, said, write):
    path = write(text=text)
    message = refused(path)
    assert message.startswith(str(path)) and said in message


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert "absent.yaml: the configuration can't be read: [Errno 2] No such file" in refused(tmp_path / "absent.yaml")
    assert "can't be read: [Errno 21] Is a directory" in refused(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run_dir: \xe9\n")
    assert "can't be read: 'utf-8' codec can't decode byte 0xe9" in refused(tmp_path / "latin.yaml")


@pytest.mark.parametrize("override", ["trainer.max_steps", "=3", "trainer.=3", ""])
def test_an_override_without_key_or_value_is_refused(override, write):
    assert f"override {override!r}: an override is written key=value" in refused(write(), override)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("Class validation error:\n    heads do not divide"), "Class validation error: heads do not divide"),
        (ImportError("\nsentencepiece is missing.\n"), "sentencepiece is missing."),
        (torch.OutOfMemoryError("Tried to allocate 20.00 MiB"), "Tried to allocate 20.00 MiB"),
        (KeyError("nope"), "KeyError: 'nope'"),
        (NotImplementedError(), "NotImplementedError: no reason is given"),
        (TypeError("a" * 700), "TypeError: " + "a" * 439 + " ... " + "a" * 75),
    ],
)
def test_an_error_of_another_package_is_one_line(error, line):
    assert reason(error) == line


def test_an_override_below_a_value_is_refused(write):
    assert "data.path is 'data.jsonl', which has no keys" in refused(write(), "data.path.first=3")


def test_an_override_of_bad_yaml_is_refused(write):
    assert "override 'trainer.report_to=[a', line 1: not valid YAML" in refused(write(), "trainer.report_to=[a")
