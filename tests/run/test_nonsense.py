"""Nonsense in a configuration: each kind is refused before anything runs, by its key and in a short message."""

import json
import re

import pytest
from pydantic import TypeAdapter, ValidationError
from runs import LONGEST, SMALL, samples, text_of, train, write_data
from trl import SFTConfig

from lowmem.errors import ConfigError, UnsupportedError
from lowmem.hf import sharding
from lowmem.run import build, secrets
from lowmem.run.config import ELSEWHERE, SYNONYMS, load, save
from lowmem.run.data import DataConfig
from lowmem.run.fields import trainer_types
from lowmem.run.source import Source


@pytest.fixture
def path(tmp_path):
    """A valid configuration."""
    path = tmp_path / "run.yaml"
    path.write_text(text_of(SMALL[0]))
    return path


def refused(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert len(str(caught.value)) < LONGEST
    return str(caught.value)


# --- Ranges of the trainer's fields -------------------------------------------------------------------------------

RANGES = {
    "per_device_train_batch_size=0": "at least 1",
    "per_device_eval_batch_size=-1": "at least 1",
    "gradient_accumulation_steps=-1": "at least 1",
    "max_steps=0": "at least 1, or -1 for all epochs",
    "num_train_epochs=.inf": "finite",
    "num_train_epochs=0": "greater than 0",
    "warmup_steps=.nan": "finite",
    "warmup_steps=-1": "a whole number of steps, or a part of the training between 0 and 1",
    "warmup_steps=1.5": "a whole number of steps, or a part of the training between 0 and 1",
    "dataloader_num_workers=-1": "0 to 1024",
    "dataloader_prefetch_factor=0": "at least 1",
    "neftune_noise_alpha=.nan": "finite",
    "label_smoothing_factor=2": "at least 0 and less than 1",
    "save_steps=-1": "a whole number of steps, or a part of the training between 0 and 1",
    "logging_steps=0": "a whole number of steps, or a part of the training between 0 and 1",
    "save_total_limit=0": "at least 1",
    "eval_accumulation_steps=0": "at least 1",
    "torch_empty_cache_steps=0": "at least 1",
    "ddp_timeout=0": "at least 1",
    "pad_to_multiple_of=0": "at least 1",
    "router_aux_loss_coef=-1": "at least 0",
    "log_level=loud": "'passive'",
    "truncation_mode=middle": "'keep_start' or 'keep_end'",
    "ddp_backend=carrier": "'gloo'",
    "lr_scheduler_kwargs=3": "a mapping",
    "fsdp_config={min_num_params: -1}": "at least 0",
    "fsdp_config={version: two}": "a valid integer",
    "fsdp_config={fsdp_version: 2.5}": "a valid integer",
    "deepspeed={zero_optimization: 3}": "a mapping",
    "deepspeed={optimizer: {params: 3}}": "a mapping",
    "deepspeed={wall_clock_breakdown: yes}": "a valid boolean",
    "deepspeed={fp16: {initial_scale_power: 5000}}": "0 to 64",
}


@pytest.mark.parametrize(("setting", "allowed"), RANGES.items(), ids=list(RANGES))
def test_a_value_out_of_range_is_refused(setting, allowed, path):
    message = refused(path, f"trainer.{setting}")
    key = "trainer." + setting.partition("=")[0]
    assert message.startswith("override ") and key in message
    assert allowed in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -7])
def test_a_number_without_meaning_is_refused_by_every_field(value):
    names = {name for name in SFTConfig.__dataclass_fields__ if f"trainer.{name}" not in ELSEWHERE}
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(trainer_types(ELSEWHERE)).validate_json(json.dumps(dict.fromkeys(names, value)))
    assert {error["loc"][0] for error in caught.value.errors()} == names


NO_EFFECT = {
    "eval_steps=5": "without evaluation; set trainer.eval_strategy",
    "load_best_model_at_end=true": "without evaluation",
    "bf16_full_eval=true": "without evaluation",
    "dataloader_prefetch_factor=2": "without trainer.dataloader_num_workers",
    "dataloader_persistent_workers=true": "without trainer.dataloader_num_workers",
    "hub_model_id=me/model": "without trainer.push_to_hub",
    "metric_for_best_model=loss": "without trainer.load_best_model_at_end",
    "liger_kernel_config={rope: true}": "without trainer.use_liger_kernel",
    "fsdp_config={cpu_offload: true}": "without trainer.fsdp",
    "length_column_name=n": "unless trainer.train_sampling_strategy is group_by_length",
    "trackio_space_id=me/space": "unless trainer.report_to has trackio",
    "lr_scheduler_type=constant": "set that to constant_with_warmup",
}


@pytest.mark.parametrize(("setting", "said"), NO_EFFECT.items(), ids=list(NO_EFFECT))
def test_a_field_without_effect_is_refused(setting, said, path):
    message = refused(path, f"trainer.{setting}")
    assert "has no effect" in message and said in message


def test_options_of_what_is_switched_off_in_so_many_words_may_stay(path):
    off = ["trainer.eval_strategy=no", "trainer.eval_steps=5", "trainer.save_strategy=no", "trainer.save_steps=5"]
    assert load(path, off).trainer["eval_steps"] == 5
    strategies = ["trainer.save_strategy=epoch", "trainer.save_steps=5"]
    assert "'trainer.save_steps' has no effect unless trainer.save_strategy is steps" in refused(path, *strategies)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["lr_scheduler_type=cosine", "lr_scheduler_kwargs={num_cycels: 2}"], "num_cycels"),
        (["lr_scheduler_type=polynomial", "lr_scheduler_kwargs={lr_end: 2}"], "must be smaller than initial lr"),
        (["lr_scheduler_type=cosine", "lr_scheduler_kwargs={num_cycles: x}"], "no schedule can be made"),
        (["lr_scheduler_type=polynomial", "lr_scheduler_kwargs={lr_end: -2}"], "negative or no numbers"),
        (["load_best_model_at_end=true", "eval_strategy=epoch", "save_strategy=steps"], "save and eval strategy"),
    ],
)
def test_arguments_that_cannot_work_together_are_refused(settings, said, path):
    config = load(
        path, [*(f"trainer.{setting}" for setting in settings), "data.eval_fraction=0.5", "trainer.max_steps=9"]
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        build.arguments(config, samples(held_out=True))


# --- The model ----------------------------------------------------------------------------------------------------

MODELS = {
    "hidden_size=0": "at least 1",
    "num_hidden_layers=0": "1 to 2000",
    "num_hidden_layers=1e9": "1 to 2000",
    "num_attention_heads=0": "at least 1",
    "num_attention_heads=3": "not a multiple of the number of attention heads",
    "num_key_value_heads=3": "can't make a llama model",
    "head_dim=7": "can't make a llama model",
    "hidden_act=nope": "can't make a llama model: KeyError: 'nope'",
    "rope_parameters={rope_type: nope}": "can't make a llama model",
    "rope_parameters={rope_theta: .nan}": "finite",
    "rope_theta=-1": "greater than 0",
    "rms_norm_eps=.nan": "at least 0 and less than 1",
    "attention_dropout=2": "at least 0 and less than 1",
    "initializer_range=.inf": "at least 0",
    "pad_token_id=1000000": "can't make a llama model",
    "attention_bias=yes": "can't make a llama model",
    "model_type=[1]": "model_type [1] is unknown",
}


@pytest.mark.parametrize(("setting", "said"), MODELS.items(), ids=list(MODELS))
def test_a_model_that_cannot_be_made_is_refused(setting, said, path):
    message = refused(path, f"model.config.{setting}")
    assert said in message and "model.config" in message


def test_a_vocabulary_that_no_machine_can_hold_is_refused(path):
    """The trainer of tokenizers would end the process."""
    assert "less than or equal to 4194304" in refused(path, "model.train_tokenizer.vocab_size=2147483648")


def test_a_seed_has_32_bits(path):
    assert load(path, ["seed=4294967295"]).seed == 2**32 - 1
    assert "'seed' should be less than 4294967296" in refused(path, "seed=4294967296")


# --- YAML ---------------------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [*{before}, *{before}]}}\n"
    for before, name in zip("abcdefghijklmnopqrst", "bcdefghijklmnopqrstu", strict=True)
)
TEXTS = {
    "aliases": (BOMB, "fewer than 20,000 values, aliases included"),
    "merges": (MERGES, "fewer than 20,000 values, aliases included"),
    "brackets": ("a: " + "[" * 10_000, "nested more than 40 deep"),
    "closed brackets": ("a: " + "[" * 60 + "]" * 60, "line 1: not valid YAML: nested more than 40 deep"),
    "itself": ("a: &a [*a]", "nested more than 40 deep, or in itself"),
    "itself by merging": ("a: &a {<<: *a}", "nested more than 40 deep, or in itself"),
    "int": ("a: 1\nb: !!int x", "line 2: not valid YAML: 'x' is not of type int"),
    "float": ("a: !!float x", "line 1: not valid YAML: 'x' is not of type float"),
    "bool": ("a: !!bool x", "line 1: not valid YAML: 'x' is not of type bool"),
    "binary": ("a: !!binary YQ==", "!!binary is a type that a configuration does not have"),
    "python": ("a: !!python/object/apply:os.getcwd []", "is a type that a configuration does not have"),
    "digits": ("a: " + "9" * 10_000, "is not of type int"),
    "65 bits": ("a: 18446744073709551616", "does not fit into an integer of 64 bits"),
    "1e400": ("a: 1e400", "does not fit into a number of 64 bits"),
    "escape": ('a: "\\x07"', "contains the character U+0007"),
    "surrogate": ('a: "\\ud800"', "contains the character U+D800"),
    "control": ("a: \x07", "special characters are not allowed"),
    "number as a key": ("1: a", "a key is a string; found 1"),
    "list as a key": ("[a]: 1", "a key is a string; found a seq"),
    "twice": ("a: {b: 1, b: hf_abcdefghijklmnopqrst}", "the key 'b' is already on line 1"),
    "size": ("a: " + "x" * 300_000, "more than 256 KiB"),
    "alias": ("a: *" + "x" * 5000, "found undefined alias"),
    "tag": ("a: !" + "x" * 5000 + " 1", "is a type that a configuration does not have"),
    "documents": ("a: 1\n---\nb: 2\n", "found another document"),
}


@pytest.mark.parametrize(("text", "said"), TEXTS.values(), ids=list(TEXTS))
def test_yaml_that_cannot_be_read_is_refused_with_its_line(text, said, path):
    path.write_text(text, encoding="utf-8")
    message = refused(path)
    assert message.startswith(str(path)) and said in message
    assert len(message) < 600


@pytest.mark.parametrize("text", ["\ufeffa: 1\nb: 2\n", "a: 1\r\nb: 2\r\n", "a: 1\rb: 2\r", "a:  1\nb: 2 # ü\n"])
def test_marks_and_ends_of_lines_of_other_systems_are_read(text, path):
    path.write_bytes(text.encode())
    assert Source.read(path).data == {"a": 1, "b": 2}


def test_five_hundred_unknown_keys_are_a_short_message(path):
    path.write_text(path.read_text() + "".join(f"key_{n}: 1\n" for n in range(500)))
    message = refused(path)
    assert message.count("\n") == 5 and message.endswith("and 495 more like these.")


@pytest.mark.parametrize("key", ["x" * 5000, "data." + "x" * 5000, "trainer.report_to.0", "a" + ".b" * 100])
def test_a_long_key_or_value_is_shortened(key, path):
    assert len(refused(path, f"{key}={'y' * 5000}")) < 800


def test_a_value_of_any_length_is_shortened(path):
    for key in ("seed", "model.dtype", "optimizer.rule", "model.config.model_type", "trainer.lr_scheduler_type"):
        assert len(refused(path, f"{key}={'y' * 5000}")) < 1000, key


# --- Names of other tools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("lr=1", "optimizer.lr"),
        ("trainer.lr=1", "optimizer.lr"),
        ("batch_size=1", "trainer.per_device_train_batch_size"),
        ("data.batch_size=1", "trainer.per_device_train_batch_size"),
        ("epochs=1", "trainer.num_train_epochs"),
        ("trainer.num_epochs=1", "trainer.num_train_epochs"),
        ("grad_clip=1", "optimizer.clip_norm"),
        ("optimizer.max_grad_norm=1", "optimizer.clip_norm"),
        ("max_steps=1", "trainer.max_steps"),
        ("max_length=1", "data.max_length"),
        ("trainer.dtype=float32", "model.dtype"),
        ("output_dir=x", "run_dir"),
    ],
)
def test_a_key_by_another_name_or_in_another_section_is_recognized(override, guess, path):
    assert f"Did you mean '{guess}'?" in refused(path, override)


def test_the_keys_that_stand_for_others_exist(path):
    config = load(path)
    known = {"run_dir", "seed", "optimizer.weight_decay"}
    known |= {f"optimizer.{name}" for name in vars(config.optimizer)} | {f"model.{name}" for name in vars(config.model)}
    known |= {f"data.{name}" for name in DataConfig.__dataclass_fields__}
    known |= {f"trainer.{name}" for name in build.arguments(config, samples(held_out=False)).to_dict()}
    assert set(SYNONYMS.values()) <= known


# --- Engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "(JSON, read as YAML): "),
        ("[]", "'trainer.deepspeed' should be a mapping, found []"),
        ('{"gradient_clipping": 1e400}', "line 1: 1e400 does not fit"),
        ('{"bf16": {},\n "bf16": {}}', "line 2: not valid YAML: the key 'bf16' is already on line 1"),
        ("[" * 100_000, "nested more than 40 deep"),
        ('{\n\t"dump_state": "x"\n}', "line 2: 'trainer.deepspeed.dump_state' should be a valid boolean"),
    ],
)
def test_a_json_file_of_an_engine_is_refused_with_its_line(content, said, path, tmp_path):
    (tmp_path / "zero3.json").write_text(content)
    message = refused(path, f"trainer.deepspeed={tmp_path}/zero3.json")
    assert f"{tmp_path}/zero3.json" in message and said in message


def test_a_folder_or_a_missing_file_of_an_engine_is_named(path, tmp_path):
    assert "Is a directory" in refused(path, f"trainer.deepspeed={tmp_path}")
    assert "No such file" in refused(path, "trainer.fsdp=true", "trainer.fsdp_config=absent.json")


@pytest.mark.parametrize(
    ("deepspeed", "said"),
    [
        (
            {"zero_optimisation": {"stage": 3}},
            "does not know the key 'zero_optimisation'. Did you mean 'zero_optimization'",
        ),
        ({"zero_optimization": {"stage": 3, "stagee": 1}}, "stagee"),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": -1}}, "reduce_bucket_size"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "moon"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "simultaneously"),
        ({"zero_optimization": {"stage": 3}, "fp16": {"hysteresis": "x"}}, "hysteresis"),
        ({"zero_optimization": {"stage": 3}, "fp16": {"loss_scale": -1}}, "fp16.loss_scale must be >= 0"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage is '3'; set it to 3"),
        ({"zero_optimization": {"stage": 3}, "gradient_clipping": "high"}, "gradient_clipping is high, and"),
    ],
)
def test_deepspeed_refuses_what_it_would_ignore(deepspeed, said, path):
    pytest.importorskip("deepspeed")
    config = load(path, [f"trainer.deepspeed={json.dumps(deepspeed)}"])
    with pytest.raises((ConfigError, UnsupportedError), match=re.escape(said)):
        sharding.of(build.arguments(config, samples(held_out=False)))


# --- Credentials --------------------------------------------------------------------------------------------------

SECRET = "correcthorse"


@pytest.mark.parametrize(
    "override",
    [
        f"trainer.hub_token={SECRET}",
        f"trainer.lr_scheduler_kwargs.api_key={SECRET}",
        f"trainer.accelerator_config={{password: {SECRET}}}",
        f"trainer.report_to=[{{WANDB_API_KEY: {SECRET}}}]",
        f"model.config.my_secret={SECRET}",
        f"data.path=https://me:{SECRET}@example.org/a.jsonl",
        f"model.path=https://{SECRET}@example.org/model",
        f"trainer.run_name=hf_{SECRET}{SECRET}",
        f"hf_token={SECRET}",
    ],
)
def test_a_credential_is_refused_and_not_repeated(override, path):
    message = refused(path, override)
    assert SECRET not in message and ("copied into run_dir" in message)


def test_a_credential_in_a_file_is_refused_with_its_line(path):
    path.write_text(path.read_text() + f"api_key: {SECRET}\n")
    message = refused(path)
    assert message.startswith(f"{path}, line {len(path.read_text().splitlines())}: 'api_key'") and SECRET not in message


@pytest.mark.parametrize(
    ("text", "blank"),
    [
        (f"lowmem train a.yaml trainer.hub_token={SECRET} seed=1", "lowmem train a.yaml trainer.hub_token=*** seed=1"),
        (f"a.api_key='{SECRET} {SECRET}' b=1", "a.api_key=*** b=1"),
        (f'{{"password": "{SECRET}", "n": 1}}', '{"password": ***, "n": 1}'),
        (f"run_name=hf_{SECRET}{SECRET}", "run_name=***"),
        (f"data.path=https://me:{SECRET}@host/x", "data.path=https://***@host/x"),
    ],
)
def test_credentials_are_blanked(text, blank):
    assert secrets.redacted(text) == blank


@pytest.mark.parametrize(
    "text",
    [
        "trainer.eos_token=<|end|>",
        "trainer.pad_token=<pad>",
        "model.tokenizer=org/name",
        "model.train_tokenizer={vocab_size: 512}",
        "trainer.include_num_input_tokens_seen=all",
        "data.path=hf://datasets/me/data@main",
    ],
)
def test_what_only_looks_like_a_credential_is_left(text, path):
    assert secrets.redacted(text) == text
    assert not list(secrets.find({"a": dict([text.partition("=")[::2]])}))


# --- The rest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", ["loss_scale=0", "loss_scale=.inf", "clip_norm=.inf", "clip_norm=0", "clip_value=.nan"]
)
def test_numbers_of_the_optimizer_that_mean_nothing_are_refused(setting, path):
    assert setting.partition("=")[0] in refused(path, f"optimizer.{setting}")


@pytest.mark.parametrize("setting", ["trainer.gradient_accumulation_steps=-1", "model.config.num_key_value_heads=3"])
def test_the_command_leaves_nothing(setting, path, tmp_path):
    write_data(tmp_path)
    assert train(tmp_path, path, setting)[0] == 2


def test_positions_that_the_model_does_not_have_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text_of(SMALL[1]))
    write_data(tmp_path)
    status, said = train(tmp_path, path, "data.max_length=65")
    assert status == 2 and "the model has 64 positions. Set data.max_length to at most that." in said


def test_every_small_run_is_valid(tmp_path):
    for number, config in enumerate(SMALL):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text_of(config))
        save(load(path), tmp_path / "saved.yaml")
        assert load(tmp_path / "saved.yaml") == load(path)
