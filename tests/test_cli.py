"""Tests commands as users run them: TRL's files, complete runs, and one message per user error."""

import contextlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import save_file
from support.runs import assets, inside, logged, lowmem, train, write
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, set_seed

from benchmarks import families
from lowmem import cli, rules
from lowmem.run import build, reductions, report

pytestmark = pytest.mark.usefixtures("sketched_pictures")


def saving(folder, command="sft", **changes):
    """Returns the YAML file of a six-step run that saves and evaluates after step four and saves at its end."""
    steps = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, "logging_steps": 2}
    evaluation = {"eval_strategy": "steps", "eval_steps": 4, "test_split_size": 0.25}
    return write(folder, command, **steps, **evaluation, **changes)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


# --- Files from TRL's documentation -----------------------------------------------------------------------------------

ON_CPUS = "bf16: false\nreport_to: none\nlogging_steps: 1\nmax_steps: 3\noptim: adamw_torch\n"
LORA = "use_peft: true\nlora_r: 32\nlora_alpha: 16\nlora_target_modules: [q_proj, v_proj]\n"
FILES = {
    "SFT": ("sft", "dataset_config: language_modeling\nlearning_rate: 2.0e-5\nlr_scheduler_type: cosine\n"),
    "SFT, LoRA": (
        "sft",
        "dataset_config: prompt_completion\nlearning_rate: 2.0e-4\npacking: true\nmax_length: 64\n"
        f"per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\n{LORA}",
    ),
    "DPO": ("dpo", "dataset_config: preference\nlearning_rate: 5.0e-7\nbeta: 0.1\nper_device_train_batch_size: 2\n"),
    "reward": ("reward", "dataset_config: implicit_prompt_preference\nlearning_rate: 1.0e-5\nmax_length: 32\n"),
    "KTO": ("kto", "dataset_config: unpaired_preference\nlearning_rate: 5.0e-7\nper_device_train_batch_size: 4\n"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_for_trl_give_its_losses(case, tmp_path):
    """The losses are bitwise equal with TRL's head and equal up to rounding with lowmem's."""
    command, text = FILES[case]
    names = f"model_name_or_path: {assets() / 'model'}\ndataset_name: {assets() / 'zen'}\n"
    (tmp_path / "trl.yaml").write_text(f"{names}{text}{ON_CPUS}")
    (tmp_path / "lowmem.yaml").write_text(f"{names}{text}{ON_CPUS}layers: {{computed_gradients: false}}\n")
    script = importlib.import_module(f"trl.scripts.{command}")
    words = ["--config", str(tmp_path / "trl.yaml"), "--output_dir", str(tmp_path / "trl")]
    set_seed(42)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        script.main(*script.make_parser().parse_args_and_config(words))
    theirs = json.loads((tmp_path / "trl" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    losses = [record["loss"] for record in theirs if "loss" in record]
    for name, tolerance in (("lowmem", 0), ("trl", 1e-5)):
        run_dir = tmp_path / f"of {name}.yaml"
        ended = lowmem(command, "--config", tmp_path / f"{name}.yaml", "--output_dir", run_dir)
        assert (ended.status, ended.err) == (0, "")
        assert logged(run_dir) == pytest.approx(losses, rel=tolerance, abs=0)


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_an_end_to_end_run(tmp_path, run_dir):
    ended = train(tmp_path, "sft", "--config", saving(tmp_path), "--learning_rate", 0.05, "--fused.clip_threshold", 0.9)
    assert (ended.status, ended.err) == (0, "")
    assert "LlamaForCausalLM" in ended.out and "data       12 rows, " in ended.out
    assert "weights in float32 (exact)" in ended.out
    assert (
        "updates    during backward, each parameter as soon as its gradient is complete (policy immediate)\n"
        in ended.out
    )
    assert ended.out.count("  grad norm ") == 3 and "  eval loss " in ended.out
    of_libraries = ("tokenizer", "generation", "training", "README")
    assert {path.name for path in run_dir.iterdir() if not path.name.startswith(of_libraries)} == {
        "config.yaml", "metrics.jsonl", "loss.png", "checkpoint-4", "checkpoint-6",
        "config.json", "model.safetensors", "chat_template.jinja",
    }  # fmt: skip
    text = (run_dir / "config.yaml").read_text()
    assert f"#   lowmem sft --config {run_dir}/config.yaml --resume_from_checkpoint last\n" in text
    saved = yaml.safe_load(text)
    assert saved["fused"]["clip_threshold"] == 0.9 and saved["learning_rate"] == 0.05
    losses = logged(run_dir)
    assert losses[-1] < losses[0] and logged(run_dir, "eval_loss")
    assert weights(run_dir) == weights(run_dir / "checkpoint-6")
    AutoModelForCausalLM.from_pretrained(run_dir / "checkpoint-6")
    assert AutoTokenizer.from_pretrained(run_dir).chat_template is not None
    assert re.search(r"\n# lowmem 0\.1\.0, python 3\.\d+\.\d+, torch 2\.", text)

    card = (run_dir / "README.md").read_text()
    assert "is a fine-tuned version of `model`." in card and "None" not in card
    answer = lowmem("generate", run_dir, "where 3", "--max-new-tokens", 5)
    assert (answer.status, answer.err) == (0, "")
    assert lowmem("generate", run_dir / "checkpoint-6", "where 3", "--max-new-tokens", 5).out == answer.out

    again = lowmem("sft", "--config", run_dir / "config.yaml", "--output_dir", tmp_path / "again")
    assert again.status == 0 and logged(tmp_path / "again") == losses


def test_the_rules_of_groups_and_a_statistic_are_reported(tmp_path, run_dir):
    groups = [{"match": "norm|embed", "rule": "adamw", "lr": 1e-3}]
    ended = train(tmp_path, "sft", "--config", write(tmp_path, fused={"rule": "scaled_adam", "groups": groups}))
    assert (ended.status, ended.err) == (0, "")
    rules = r"optimizer  scaled_adam, lr 0.001: [\d,]+ parameters; adamw, lr 0.001: [\d,]+ parameters;"
    assert re.search(rules, ended.out)
    names = logged(run_dir, "dominant_parameter")
    assert len(names) == 2 and f"dominant parameter {names[0]}" in ended.out


def test_a_policy_is_trained(tmp_path, run_dir):
    ended = train(tmp_path, "rloo", "--config", write(tmp_path, "rloo", save_strategy="steps", save_steps=2))
    assert (ended.status, ended.err) == (0, "")
    assert len(logged(run_dir)) == 2 and (run_dir / "checkpoint-2" / "optimizer.safetensors").exists()


# --- Resuming ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of a completed run of six steps."""
    folder = tmp_path_factory.mktemp("finished")
    assert lowmem("sft", "--config", saving(folder)).status == 0
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """Copies that run to a folder whose name contains characters that are special in a shell and a console."""
    return shutil.copytree(finished, tmp_path / "a copy [bold]")


def read(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def resume(run, *words):
    return lowmem("sft", "--config", run / "config.yaml", "--resume_from_checkpoint", "last", *words)


def test_a_copied_run_continues_in_the_copy(finished, run):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    ended = resume(run, "--max_steps", 8)
    assert ended.status == 0, ended.err
    assert f"lowmem generate '{run}'" in ended.out and (run / "checkpoint-8").exists()
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    text = (run / "config.yaml").read_text()
    saved = yaml.safe_load(text)
    assert saved["output_dir"] == str(run)
    assert "resume_from_checkpoint" not in saved  # a new run with this file starts from the beginning
    assert f"lowmem sft --config '{run}/config.yaml' --resume_from_checkpoint last" in text


def test_a_finished_run_is_not_changed(run, caplog):
    """Job scripts may pass a resume argument every time, even after the run is complete."""
    metrics, saved = read(run), weights(run / "checkpoint-6")
    ended = resume(run)
    assert ended.status == 0 and "train loss" not in ended.out and "\ndone\n" in ended.out
    assert f"training is already complete: {run}/checkpoint-6 is at step 6 of 6" in caplog.text
    assert read(run) == metrics[: len(read(run))] and weights(run / "checkpoint-6") == saved
    assert [record["step"] for record in read(run) if "loss" in record] == [2, 4, 6]


def test_a_failed_command_does_not_change_the_configuration_of_a_run(run):
    before = (run / "config.yaml").read_text()
    ended = resume(run, "--max_steps", 8, "--lr_scheduler_type", "warmup_stable_decay")
    assert ended.status == 2 and "'num_decay_steps'" in ended.err
    assert (run / "config.yaml").read_text() == before
    assert resume(run, "--max_steps", 8).status == 0 and "max_steps: 8" in (run / "config.yaml").read_text()


def test_checking_the_metric_does_not_change_a_run(tmp_path):
    evaluated = {**BEST, "model_init_kwargs": {"attention_dropout": 0.5}}
    for name in ("entropy", None):
        path = write(tmp_path, **evaluated | {"metric_for_best_model": name, "output_dir": str(tmp_path / f"{name}")})
        assert train(tmp_path, "sft", "--config", path).status == 0
    assert read(tmp_path / "entropy")[0]["loss"] == read(tmp_path / "None")[0]["loss"]
    assert weights(tmp_path / "entropy") == weights(tmp_path / "None")
    assert len(read(tmp_path / "entropy")) == len(read(tmp_path / "None"))


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(finished, run):
    for name in ("checkpoint-4", "checkpoint-6"):
        shutil.rmtree(run / name)
    ended = resume(run)
    assert ended.status == 0, ended.err
    assert "has no checkpoint yet, so the run starts from the beginning" in ended.err
    assert weights(run / "checkpoint-6") == weights(finished / "checkpoint-6")
    assert (run / "loss.png").stat().st_size


# --- Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "count"), [("", 2), ("--num_processes 3", 3), ("--num_processes 1", 1)])
def test_one_process_per_visible_gpu(words, count, tmp_path, monkeypatch):
    class Replaced(Exception):
        """Raised instead of replacing this process with another program."""

    launched = []

    def execv(_, arguments):
        launched.extend(arguments)
        raise Replaced

    monkeypatch.setattr(cli, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 2)))
    monkeypatch.setattr(os, "execv", execv)
    path = str(write(tmp_path, use_cpu=None, max_steps=1))
    ended = lowmem("sft", "--config", path, *words.split())
    if count == 1:
        assert (ended.status, launched) == (0, []), ended.err
    else:
        assert f"starting {count} processes, each with a full copy of the weights" in ended.out
        assert launched[4:] == [f"--nproc_per_node={count}", "-m", "lowmem", "sft", "--config", path, *words.split()]


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_ctrl_c_before_training_or_twice_leaves_no_files(tmp_path, run_dir, monkeypatch):
    monkeypatch.setattr(build, "trainer", failing(KeyboardInterrupt))
    ended = lowmem("sft", "--config", write(tmp_path))
    assert (ended.status, ended.err) == (130, "interrupted\n") and not run_dir.exists()


def test_a_defect_is_one_line_and_keeps_its_traceback(tmp_path, run_dir, monkeypatch):
    monkeypatch.setattr(report.RunReport, "on_step_end", failing(KeyError("a [bold] bug")))
    ended = lowmem("sft", "--config", write(tmp_path))
    assert ended.status == 3
    assert ended.err == "error: unexpected KeyError: 'a [bold] bug'. Add --traceback to see where\n"
    assert "in fail" in (run_dir / "traceback.txt").read_text()
    with pytest.raises(KeyError):
        lowmem("sft", "--config", tmp_path / "sft.yaml", "--output_dir", tmp_path / "two", "--traceback")


def test_a_library_that_cannot_compute_the_first_step_is_named(tmp_path, run_dir, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "logsigmoid", len)
    ended = lowmem("reward", "--config", write(tmp_path, "reward"))
    assert ended.status == 2 and not run_dir.exists()
    where = r"trl \S+ \(reward_trainer.py, line \d+\) fails with AttributeError: 'int' object"
    assert re.search(rf"error: the first step cannot be computed: {where}", ended.err), ended.err


def test_a_router_without_an_auxiliary_loss_is_refused(tmp_path, run_dir):
    model = AutoModelForCausalLM.from_config(families.config("deepseek_v3", pad_token_id=None))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(assets() / "model").save_pretrained(tmp_path / "model")
    path = write(tmp_path, model_name_or_path=str(tmp_path / "model"), router_aux_loss_coef=0.01)
    ended = lowmem("sft", "--config", path)
    assert ended.status == 2 and not run_dir.exists()
    assert "DeepseekV3ForCausalLM has no auxiliary loss of its router. Set router_aux_loss_coef: 0" in ended.err


@pytest.mark.troubleshooting("out of memory")
def test_out_of_memory_errors_show_the_plan(tmp_path, run_dir, monkeypatch):
    monkeypatch.setattr(report.RunReport, "on_step_end", failing(torch.OutOfMemoryError("Tried to allocate 20.00 MiB")))
    ended = lowmem("sft", "--config", write(tmp_path, max_length=16, dtype="bfloat16", bf16=False))
    assert ended.status == 2
    assert (
        "error: out of memory: Tried to allocate 20.00 MiB. Arguments that reduce the memory of a step: " in ended.err
    )
    assert " --per_device_train_batch_size 1, --max_length 8. `lowmem plan` shows by how much" in ended.err
    assert f"lowmem sft --config {run_dir}/config.yaml --resume_from_checkpoint last" in ended.err
    monkeypatch.setattr(reductions, "reductions", failing(KeyError("a defect")))
    ended = lowmem("sft", "--config", write(tmp_path, output_dir=str(tmp_path / "again")))
    assert "error: out of memory: Tried to allocate 20.00 MiB. Then continue with" in ended.err


# --- Mistakes ---------------------------------------------------------------------------------------------------------


def missing(*names):
    """Hides installed packages."""

    def change(folder, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest)
        )
        monkeypatch.setattr("trl.trainer.utils.is_peft_available", lambda: "peft" not in names)

    return change


def no_pad_token(folder, monkeypatch):
    shutil.copytree(assets() / "model", folder / "model")
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        settings = json.loads((folder / "model" / name).read_text())
        for key in ("pad_token", "pad_token_id", "eos_token", "eos_token_id"):
            settings.pop(key, None)
        (folder / "model" / name).write_text(json.dumps(settings))


def no_template(folder, monkeypatch):
    shutil.copytree(assets() / "model", folder / "model")
    (folder / "model" / "chat_template.jinja").unlink()


ZERO = {"deepspeed": {"zero_optimization": {"stage": 3}}}
BEST = {"metric_for_best_model": "foo", "eval_strategy": "steps", "eval_steps": 1, "test_split_size": 0.25}

# Command, changes to its file, arguments, the message, and other changes.
MISTAKES = {
    "no pad token": ("sft", {"model_name_or_path": "model"}, "", "`pad_token`", no_pad_token),
    "LoRA without PEFT": ("sft", {"use_peft": True}, "", "PEFT", missing("peft")),
    "DeepSpeed is not installed": ("sft", ZERO, "", "Run: pip install deepspeed", missing("deepspeed")),
    "DeepSpeed without a launcher": ("sft", ZERO, "", "Start it with a launcher"),
    "a folder that cannot be written": ("sft", {"output_dir": "/proc/run"}, "", "/proc/run: cannot be written: "),
    "no model": ("sft", {"model_name_or_path": None}, "", "no model: set model_name_or_path"),
    "no such model": ("sft", {"model_name_or_path": "no/such"}, "", "SFTConfig of no/such: We couldn't connect"),
    "no reward": ("grpo", {"reward_model_name_or_path": None}, "", "no reward: set reward_funcs"),
    "unknown reward": ("grpo", {"reward_funcs": ["no_module.f"]}, "", "reward_funcs: 'no_module.f' is not a reward"),
    "no chat template": ("sft", {"model_name_or_path": "model"}, "", "into chat_template.jinja", no_template),
    "an unknown metric": ("sft", BEST, "", "metric_for_best_model 'foo' is unknown. An evaluation has loss, "),
    "a plan of GRPO": ("plan grpo", {}, "", "grpo cannot be planned: its step also generates"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_exit_with_one_message_and_leave_no_files(case, tmp_path, monkeypatch):
    command, changes, words, message, *more = MISTAKES[case]
    path = write(tmp_path, command.split()[-1], **changes)
    for change in more:
        change(tmp_path, monkeypatch)
    ended = train(tmp_path, *command.split(), "--config", path, *words.split())
    assert ended.status == 2, ended
    assert message in ended.err and "Traceback" not in ended.err
    assert ended.err.count("\n") == 1, ended.err


def test_several_gpus_in_one_process_end_a_run_before_it_loads_anything(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 2)
    ended = train(tmp_path, "sft", "--config", write(tmp_path, fused=None))
    assert ended.status == 2 and "one process sees 2 GPUs" in ended.err and "loading" not in ended.out


@pytest.mark.parametrize(
    ("words", "message"),
    [("--report_to clearml", "ClearMLCallback requires"), ("--push_to_hub", "HF_HUB_OFFLINE")],
)
def test_a_missing_service_ends_a_run_before_its_first_step(words, message, tmp_path):
    ended = train(tmp_path, "sft", "--config", write(tmp_path, fused=None), *words.split())
    assert ended.status == 2 and message in ended.err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("stf", "invalid choice: 'stf'"),
        ("plan", "the following arguments are required: COMMAND"),
        ("rules adamww", "Did you mean 'adamw'"),
        ("rules --model x", "--model needs the name of a rule"),
        ("sft", "no data: set dataset_name"),
        ("generate . hello --max-new-tokens 0", "--max-new-tokens=0 is not valid. Expected a whole number >= 1"),
    ],
)
def test_mistakes_before_a_file_is_read(words, message, tmp_path):
    with inside(tmp_path):
        ended = lowmem(*words.split())
    assert ended.status == 2 and message in ended.err and not list(tmp_path.iterdir())


# --- generate, rules and help -----------------------------------------------------------------------------------------


def test_the_printed_generate_command_uses_the_adapters(tmp_path):
    """The answer must equal the merged model's answer and differ from the base model's answer."""
    lora = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "fused": None, "learning_rate": 1.0}
    ended = train(tmp_path, "sft", "--config", write(tmp_path, **lora, save_strategy="steps", save_steps=2))
    assert ended.status == 0, ended.err
    words = shlex.split(ended.out.partition("try it")[2])
    answer = lowmem(*words[1:], "--max-new-tokens", 8)
    assert (answer.status, answer.err) == (0, ""), answer
    base = AutoModelForCausalLM.from_pretrained(assets() / "model")
    PeftModel.from_pretrained(base, tmp_path / "run").merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(assets() / "model").save_pretrained(tmp_path / "merged")
    assert answer.out == lowmem("generate", tmp_path / "merged", *words[3:], "--max-new-tokens", 8).out
    assert answer.out != lowmem("generate", assets() / "model", *words[3:], "--max-new-tokens", 8).out


def test_generate_says_which_checkpoint_answers(run, tmp_path, monkeypatch):
    assert "/nope was not found" in lowmem("generate", "/nope", "hello").err
    assert "No valid checkpoint found in output directory" in lowmem("generate", tmp_path, "hello").err
    (run / "config.json").unlink()  # from the final model
    (run / "checkpoint-6" / "model.safetensors").write_bytes(b"")
    ended = lowmem("generate", run, "hello", "--max-new-tokens", 100)
    assert ended.status == 0
    assert f"{run}/checkpoint-6/model.safetensors is damaged" in ended.err
    assert f"; answering with {run}/checkpoint-4\n" in ended.err
    assert "the answer is limited to" in ended.err
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)  # as in models without sdpa
    ended = lowmem("generate", run, "hello " * 100)
    assert ended.status == 2 and "tokens, but the model accepts 1 to 63" in ended.err
    sampled = [lowmem("generate", run, "hello", "--temperature", 0.8, "--system", "be brief").out for _ in range(2)]
    assert sampled[0] == sampled[1]
    plain = shutil.copytree(assets() / "model", tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    assert lowmem("generate", plain, "hello", "--max-new-tokens", 5).status == 0
    ended = lowmem("generate", plain, "hello", "--system", "be brief")
    assert ended.status == 2 and "has no chat template. Omit --system" in ended.err


def test_lowmem_rules_prints_measured_values():
    ended = lowmem("rules")
    assert (ended.status, ended.err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in ended.out.partition("import path")[0].splitlines() if line}
    assert rows["lomo"][:2] == ["0", "0.01"] and rows["adamw"][0] == "4"
    assert rows["torch.optim.AdamW"][0] == "4"
    for row in rules.table():
        rate, origin = row.usual_lr
        assert f"{rate:g}" in rows[row.name] and origin
    assert "clip_threshold" not in ended.out and "`lowmem rules NAME` shows the options" in ended.out
    assert lowmem("rules", "torch.optim.SGD").out.startswith("0 bytes of states")


def test_lowmem_rules_prints_the_learning_rate_for_a_model(tmp_path):
    """The learning rate is relative to the root mean square of the weights, which are in two files."""
    files = [f"model-0000{number}-of-00002.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        save_file({f"w{number}": torch.full((100, 10), (0.01, 0.03)[number])}, tmp_path / file)
    index = {"weight_map": {f"w{number}": file for number, file in enumerate(files)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ended, size = lowmem("rules", "adalomo", "--model", tmp_path), 0.0005**0.5
    assert ended.status == 0
    assert f"AdamW's 2e-05 corresponds to about {0.9 * 2e-5 / size:.2g} to {1.3 * 2e-5 / size:.2g} for" in ended.out
    assert "  clip_threshold: 1.0\n" in ended.out and "arXiv:2310.10195" in ended.out
    assert lowmem("rules", "adalomo", "--model", tmp_path / "none").status == 2


def test_devices_are_looked_for_after_env_is_set(tmp_path, monkeypatch):
    """CUDA reads CUDA_VISIBLE_DEVICES only once, so `env` has to be set first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(build, "trainer", failing(KeyboardInterrupt))
    visible = []
    for module in (torch.cuda, torch.accelerator):
        look = module.is_available
        monkeypatch.setattr(
            module, "is_available", lambda look=look: visible.append(os.environ["CUDA_VISIBLE_DEVICES"]) or look()
        )
    for command in ("sft", "plan sft"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        lowmem(*command.split(), "--config", write(tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}))
    assert set(visible) == {""}
