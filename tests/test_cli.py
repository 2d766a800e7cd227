"""The commands as a user types them: a run from end to end, and each mistake as one message with exit status 2."""

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from processes import CONTEXT, PATIENCE, Launched, sketch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem import cli
from lowmem.layers import activations
from lowmem.run import build, report, terminal
from lowmem.step import program

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))

TOPICS = ("a list", "the path", "a number", "the name", "one file", "the lock", "a queue", "the tree")


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(Figure, "savefig", sketch)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def config(tmp_path, run_dir):
    """A small run as a YAML file, its data beside it."""
    pairs = [{"instruction": f"def get_{i}(self)", "output": f"Return {TOPICS[i % 8]} of {i}."} for i in range(48)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    text = yaml.safe_dump(
        {
            "run_dir": str(run_dir),
            "model": {
                "config": {
                    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                    "num_attention_heads": 2, "num_key_value_heads": 2,
                },
                "train_tokenizer": {"vocab_size": 300},
                "dtype": "float32",
            },
            "data": {"path": str(tmp_path / "pairs.jsonl"), "eval_fraction": 0.2, "max_length": 64},
            "optimizer": {"rule": "adalomo", "lr": 0.05},
            "trainer": {
                "max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 2, "save_steps": 4,
                "eval_strategy": "steps", "eval_steps": 4, "dataloader_pin_memory": False,
            },
        }
    )  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def lowmem(capsys, *arguments):
    """Runs a command; its exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as done:
        cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return done.value.code, printed.out, printed.err


def test_a_run_from_end_to_end(config, run_dir, capsys):
    code, out, err = lowmem(capsys, "train", config, "trainer.max_steps=8", "optimizer.clip_threshold=0.9")
    assert (code, err) == (0, "")
    assert "LlamaForCausalLM" in out
    assert "updates    during backward, each parameter as soon as its gradient is complete (policy immediate)\n" in out
    assert out.count("grad norm") == 4
    assert "evaluation" in out
    assert {path.name for path in run_dir.iterdir()} == {
        "config.yaml", "environment.json", "metrics.jsonl", "loss.png", "memory.png", "README.md",
        "checkpoint-4", "checkpoint-8",
    }  # fmt: skip
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["optimizer"]["clip_threshold"] == 0.9
    assert saved["trainer"]["max_steps"] == 8
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]

    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoint-8")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "checkpoint-8")
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert tokenizer.chat_template is not None

    code, out, err = lowmem(capsys, "generate", run_dir, "def get_3(self)", "--max-new-tokens", 5)
    assert (code, err) == (0, "")
    code, again, _ = lowmem(capsys, "generate", run_dir / "checkpoint-8", "def get_3(self)", "--max-new-tokens", 5)
    assert (code, again) == (0, out)


def test_the_saved_config_repeats_the_run(config, run_dir, capsys):
    lowmem(capsys, "train", config, "optimizer.rounding=stochastic", "model.dtype=bfloat16")
    code, _, _ = lowmem(capsys, "train", run_dir / "config.yaml", f"run_dir={run_dir}-2")
    assert code == 0
    first, second = (
        [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run_dir, Path(f"{run_dir}-2"))
    )
    assert first == second


def test_updates_that_rounding_would_lose_are_warned_about(config, run_dir, capsys, caplog):
    for dtype, rounding, warned, said in (
        ("bfloat16", "nearest", True, "bfloat16 (rounding nearest)"),
        ("bfloat16", "auto", False, "bfloat16 (rounding stochastic)"),
        ("float32", "nearest", False, "float32 (exact)"),
    ):
        caplog.clear()
        settings = (f"model.dtype={dtype}", f"optimizer.rounding={rounding}", f"run_dir={run_dir}-{dtype}-{rounding}")
        for command in ("train", "plan"):
            program._warn_of_lost_updates.cache_clear()  # it warns once per process
            code, out, _ = lowmem(capsys, command, config, *settings, "trainer.max_steps=1", "trainer.save_strategy=no")
            assert code == 0 and f"weights in {said}" in out
        assert sum("with rounding 'nearest' lose every update" in text for text in caplog.messages) == 2 * warned


def test_resuming_continues_from_the_newest_complete_checkpoint(config, run_dir, capsys):
    lowmem(capsys, "train", config)
    weights = run_dir / "checkpoint-6" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    code, out, err = lowmem(capsys, "train", run_dir / "config.yaml", "--resume")
    assert code == 0
    assert "resuming from" in out and "checkpoint-4" in out
    assert "skipped a damaged checkpoint" in err and "model.safetensors" in err
    assert weights.read_bytes() == content
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_inspect_shows_the_tokens_on_which_the_loss_is_computed(config, run_dir, capsys):
    code, out, _ = lowmem(capsys, "inspect", config, "--samples", 2)
    assert code == 0
    assert out.count("tokens, loss on") == 3
    assert "<|user|>def get_" in out
    assert "⟦Return" in out and "<|end|>⟧" in out
    assert not run_dir.exists()
    code, out, _ = lowmem(capsys, "inspect", config, "data.answer_only=false", "--samples", 1)
    assert "⟦<|user|>def get_" in out


def test_the_rule_of_each_group_is_shown(config, capsys):
    groups = "optimizer.groups=[{match: norm|embed, rule: adamw, lr: 1e-3}]"
    code, out, _ = lowmem(capsys, "inspect", config, groups, "--samples", 0)
    assert code == 0
    assert "adalomo    8 parameters: model.layers.0.self_attn.q_proj.weight" in out
    assert "adamw      4 parameters: model.embed_tokens.weight" in out
    code, out, err = lowmem(capsys, "train", config, groups, "trainer.max_steps=1", "trainer.save_strategy=no")
    assert (code, err) == (0, "")
    assert re.search(r"optimizer  adalomo, lr 0.05: [\d,]+ parameters; adamw, lr 0.001: [\d,]+ parameters;", out)
    assert "no_such_name" in lowmem(capsys, "inspect", config, "optimizer.groups=[{match: no_such_name}]")[2]


def test_bfloat16_on_a_slow_cpu_is_warned_about(config, capsys, monkeypatch):
    monkeypatch.setattr(build, "slow_bfloat16", lambda config, device: f"bfloat16 is slow on {device}")
    code, _, err = lowmem(capsys, "train", config, "trainer.max_steps=1", "trainer.save_strategy=no")
    assert (code, err) == (0, "bfloat16 is slow on cpu\n")


def test_rules_prints_what_is_measured(capsys):
    code, out, _ = lowmem(capsys, "rules")
    assert code == 0
    table = out.partition("import path")[0]
    rows = {line.split()[0]: line.split()[1:3] for line in table.splitlines() if line}
    assert rows["lomo"] == ["0", "0.01"]
    assert rows["adamw"][0] == "8"
    assert rows["torch.optim.AdamW"][0] == "4"
    assert rows["compensated"] == ["4", "4"] and rows["bfloat16"] == ["2"]  # a weight and a state, a state
    assert "clip_threshold" not in out and "`lowmem rules NAME` shows the options" in out
    code, out, _ = lowmem(capsys, "rules", "adalomo")
    assert code == 0
    assert "  clip_threshold: 1.0\n" in out and "arXiv:2310.10195" in out
    assert lowmem(capsys, "rules", "torch.optim.SGD")[1].startswith("0 bytes of states")
    assert "Did you mean 'adamw'" in lowmem(capsys, "rules", "adamww")[2]


@pytest.mark.parametrize(
    ("rule", "option", "key"),
    [
        ("adalomo", "weight_decay", "weight_decay"),
        ("lans", "wd", "wd"),
        ("adafactor", "weight_decay_rate", "weight_decay_rate"),
    ],
)
def test_weight_decay_by_the_rules_own_name(config, run_dir, capsys, rule, option, key):
    code, _, err = lowmem(
        capsys, "train", config, f"optimizer.rule={rule}", f"optimizer.{option}=0.125", "optimizer.lr=1e-3"
    )
    assert (code, err) == (0, "")
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["optimizer"][key] == 0.125
    with safe_open(run_dir / "checkpoint-6" / "optimizer.safetensors", framework="pt") as file:
        groups = json.loads(file.metadata()["lowmem"])["param_groups"]
    assert [group[key] for group in groups] == [0.125, {"adafactor": None}.get(rule, 0.0)]


def test_the_dominant_parameter_is_in_the_log(config, run_dir, capsys, monkeypatch):
    monkeypatch.setattr(terminal.out, "width", 200)
    code, out, err = lowmem(capsys, "train", config, "optimizer.rule=scaled_adam", "optimizer.lr=0.03")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = [line["dominant_parameter"] for line in lines if "loss" in line]
    assert len(names) == 3
    assert f"of the norm is {names[0]}" in out


def test_a_text_run_continues_its_prompt(config, run_dir, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("\n\n".join(f"Line {i} of the book goes on and on." for i in range(60)))
    text = (f"data.path={tmp_path}/book.txt", "data.packing=true", "data.eval_fraction=0.1")
    code, _, err = lowmem(capsys, "train", config, *text, "trainer.max_steps=4")
    assert (code, err) == (0, "")
    assert lowmem(capsys, "generate", run_dir, "Line 7", "--max-new-tokens", 4, "--temperature", 0.8)[0] == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    from lowmem.run.config import load

    config = load(path)
    assert config.trainer["save_steps"] if "save_strategy" not in config.trainer else True
    assert f"runs/{config.run_dir.removeprefix('runs/')}" == config.run_dir


def bad_line(folder):
    path = folder / "pairs.jsonl"
    lines = path.read_text().splitlines()
    lines[6] = lines[6][:-5]
    path.write_text("\n".join(lines))


def lost_field(folder):
    path = folder / "pairs.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = '{"instruction": "def f()"}'
    path.write_text("\n".join(lines))


MISTAKES = {
    "unknown key": (["trainer.max_step=3"], "Did you mean 'max_steps'"),
    "unknown section": (["optimiser.lr=3"], "Did you mean 'optimizer'"),
    "unknown hyperparameter": (["optimizer.clip_treshold=3"], "clip_threshold"),
    "wrong type": (["trainer.max_steps=many"], "trainer.max_steps"),
    "value out of range": (["optimizer.clip_threshold=-1"], "clip_threshold=-1"),
    "override without value": (["trainer.max_steps"], "key=value"),
    "missing data file": (["data.path=/nowhere/pairs.jsonl"], "/nowhere/pairs.jsonl"),
    "malformed line": (bad_line, "line 7"),
    "missing field": (lost_field, "record 5"),
    "empty data": (lambda folder: (folder / "pairs.jsonl").write_text(""), "no records"),
    "everything masked": (["data.max_length=3"], "max_length"),
    "unknown rule": (["optimizer.rule=adalmo"], "Did you mean 'adalomo'"),
    "unknown import path": (["optimizer.rule=torch.optim.AdamWW"], "Did you mean 'AdamW'"),
    "package not there": (["optimizer.rule=no_such_package.AdamX"], "no_such_package"),
    "closure": (["optimizer.rule=torch.optim.LBFGS"], "closure"),
    "sparse only": (["optimizer.rule=torch.optim.SparseAdam"], "sparse"),
    "a vector for Muon": (["optimizer.rule=torch.optim.Muon"], "input_layernorm.weight' of shape [32]"),
    "a logger not there": (["trainer.report_to=wandb"], "wandb"),
    "sharding without a launcher": (["trainer.deepspeed={zero_optimization: {stage: 3}}"], "trainer.deepspeed=null"),
    "FSDP without a launcher": (["trainer.fsdp=true"], "trainer.fsdp=false"),
    "unknown policy": (["optimizer.policy=later"], "optimizer.policy"),
    "unknown rounding": (["optimizer.rounding=up"], "rounding 'up'"),
    "accumulation in the hook": (
        ["trainer.gradient_accumulation_steps=4", "optimizer.policy=immediate"],
        "gradient_accumulation_steps=4",
    ),
    "clipping by norm in the hook": (["optimizer.clip_norm=1.0", "optimizer.policy=immediate"], "clip_norm"),
    "unknown store": (["optimizer.store=disc"], "Did you mean 'disk'?"),
    "a folder without its store": (["optimizer.store_dir=/tmp"], "store='disk'"),
    "fp16": (["trainer.fp16=true"], "fp16"),
    "nothing held out": (["data.eval_fraction=0"], "eval_fraction"),
    "vocabulary too small": (["model.config.vocab_size=40"], "vocab_size"),
    "no such model": (["model.config=null", "model.train_tokenizer=null", "model.path=/no/model"], "/no/model"),
    "misspelt model key": (["model.config.hidden_sizes=4"], "hidden_size"),
    "template not there": (["model.chat_template=/no/chat.jinja"], "/no/chat.jinja: model.chat_template can't be read"),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_and_nothing_is_left(change, message, config, run_dir, tmp_path, capsys):
    overrides = change if isinstance(change, list) else []
    if callable(change):
        change(tmp_path)
    code, _, err = lowmem(capsys, "train", config, *overrides)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert not run_dir.exists()


def test_an_existing_run_folder_is_not_touched(config, run_dir, capsys):
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    code, _, err = lowmem(capsys, "train", config)
    assert code == 2
    assert "is not empty (it has notes.txt). Set run_dir to another folder" in err
    assert [path.name for path in run_dir.iterdir()] == ["notes.txt"]


def test_a_finished_run_is_not_changed(config, run_dir, capsys, caplog):
    """Job scripts that always resume end well."""
    lowmem(capsys, "train", config, "trainer.max_steps=2")
    weights = (run_dir / "checkpoint-2" / "model.safetensors").read_bytes()
    metrics = (run_dir / "metrics.jsonl").read_text()
    code, out, _ = lowmem(capsys, "train", run_dir / "config.yaml", "--resume")
    assert code == 0
    assert f"nothing is left to train: {run_dir}/checkpoint-2 is at step 2 of 2" in caplog.text
    assert "mean loss" not in out and "\ndone: training loss" in out
    assert (run_dir / "metrics.jsonl").read_text() == metrics
    assert (run_dir / "checkpoint-2" / "model.safetensors").read_bytes() == weights
    assert not (run_dir / "checkpoint-3").exists()
    assert lowmem(capsys, "train", run_dir / "config.yaml", "--resume", "trainer.max_steps=3")[0] == 0


def test_resuming_without_a_run_is_refused(config, run_dir, capsys):
    assert "does not contain a run to resume" in lowmem(capsys, "train", config, "--resume")[2]
    assert not run_dir.exists()
    run_dir.mkdir()
    assert "No valid checkpoint found in output directory" in lowmem(capsys, "generate", run_dir, "hello")[2]


def test_a_tokenizer_without_chat_template_is_refused(config, run_dir, tmp_path, capsys):
    from lowmem.run.tokenizers import train_tokenizer

    plain = train_tokenizer(["some text"], 300)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    code, _, err = lowmem(capsys, "train", config, "model.train_tokenizer=null", f"model.tokenizer={tmp_path}/plain")
    assert code == 2
    assert "model.chat_template" in err
    assert not run_dir.exists()


def test_reentrant_checkpointing_trains_like_non_reentrant(config, run_dir, capsys):
    # each weight has one gradient per backward here; the optimizer's own tests cover weights with several
    losses = []
    for kind in ("true", "false"):
        checkpointing = ("trainer.activation_checkpointing=true", "model.config.tie_word_embeddings=true")
        reentrant = f"trainer.activation_checkpointing_kwargs={{use_reentrant: {kind}}}"
        code, _, err = lowmem(capsys, "train", config, *checkpointing, reentrant, f"run_dir={run_dir}-{kind}")
        assert code == 0, err
        lines = Path(f"{run_dir}-{kind}", "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1]


def test_ctrl_c_ends_with_a_loadable_checkpoint(config, run_dir, capsys):
    # no other checkpoint, however many steps are taken before the signal comes
    settings = ("trainer.max_steps=100000", "trainer.save_steps=100000", "trainer.eval_strategy=no")
    started = Launched.ranks(0, "lowmem", "train", str(config), *settings, "trainer.logging_steps=1")
    started.wait_for("grad norm")
    os.kill(started.processes[0].pid, signal.SIGINT)
    done = started.finish()
    assert done.returncode == 130, done.stderr
    assert "stopping after this step" in done.stderr
    assert "continue with: lowmem train" in done.stdout and "--resume" in done.stdout
    (folder,) = run_dir.glob("checkpoint-*")
    AutoModelForCausalLM.from_pretrained(folder)
    step = int(folder.name.removeprefix("checkpoint-"))
    code, out, err = lowmem(capsys, "train", run_dir / "config.yaml", "--resume", f"trainer.max_steps={step + 2}")
    assert code == 0, err
    assert f"resuming from {folder}" in out


def train_with_small_files(config, end):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as done:
        cli.main(["train", str(config)])
    end.send((done.value.code, errors.getvalue()))


def test_a_full_disk_is_reported_and_leaves_no_partial_checkpoint(config, run_dir):
    ours, its = CONTEXT.Pipe()
    process = CONTEXT.Process(target=train_with_small_files, args=(config, its), daemon=True)
    process.start()
    its.close()
    code, err = ours.recv()
    process.join(PATIENCE)
    assert code == 2, err
    assert "error: " in err and "could not be written" in err
    assert not list(run_dir.glob("checkpoint-*"))
    assert not (run_dir / ".saving").exists()


# --- Runs that were moved, killed, damaged or named oddly -----------------------------------------------------------


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_a_copied_run_continues_in_its_own_folder(config, run_dir, tmp_path, capsys):
    lowmem(capsys, "train", config)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    copy = tmp_path / "a copy [bold]"
    shutil.copytree(run_dir, copy)
    code, out, err = lowmem(capsys, "train", copy / "config.yaml", "--resume", "trainer.max_steps=8")
    assert code == 0, err
    assert f"this run was started in {run_dir}; continuing in {copy}" in err
    assert f"resuming from {copy}/checkpoint-6" in out
    assert f"lowmem generate '{copy}'" in out
    assert (copy / "checkpoint-8").exists()
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    assert yaml.safe_load((copy / "config.yaml").read_text())["run_dir"] == str(copy)
    assert f"lowmem train '{copy}/config.yaml' --resume" in (copy / "README.md").read_text()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(config, run_dir, capsys):
    lowmem(capsys, "train", config)
    final = weights(run_dir / "checkpoint-6")
    for name in ("checkpoint-4", "checkpoint-6"):
        shutil.rmtree(run_dir / name)
    assert "Continue it with --resume" in lowmem(capsys, "train", config)[2]
    code, _, err = lowmem(capsys, "train", run_dir / "config.yaml", "--resume")
    assert code == 0, err
    assert "has no checkpoint yet, so the run starts from its beginning" in err
    assert weights(run_dir / "checkpoint-6") == final
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_other_data_under_the_same_path_is_refused(config, run_dir, tmp_path, capsys):
    lowmem(capsys, "train", config)
    data = tmp_path / "pairs.jsonl"
    before = data.read_text()
    data.write_text(before.replace("Return a queue of 14.", "Return a queue of 99."))
    code, _, err = lowmem(capsys, "train", run_dir / "config.yaml", "--resume", "trainer.max_steps=7")
    assert code == 2
    assert f"{data}, as it is tokenized now, is not what {run_dir}/checkpoint-6 was trained on" in err
    data.write_text(before)
    assert lowmem(capsys, "train", run_dir / "config.yaml", "--resume", "trainer.max_steps=7")[0] == 0


def test_what_was_not_drawn_is_drawn_on_resume(config, run_dir, capsys):
    lowmem(capsys, "train", config)
    for name in ("README.md", "loss.png", "memory.png"):
        (run_dir / name).unlink()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("{damaged}\n")
    code, out, err = lowmem(capsys, "train", run_dir / "config.yaml", "--resume")
    assert code == 0, err
    assert "left out 1 damaged lines" in out
    assert all((run_dir / name).stat().st_size for name in ("README.md", "loss.png", "memory.png"))


def test_lines_fit_in_eighty_columns(config, capsys):
    code, out, _ = lowmem(capsys, "train", config, "optimizer.clip_norm=1.0", "trainer.logging_steps=1")
    assert code == 0
    logged = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(logged) >= 8
    assert all(len(line) <= 80 for line in logged)
    assert "0:00:0" in logged[0] and " left" in logged[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--temperature", "-1"], "--temperature -1.0"),
    ],
)
def test_nonsense_for_generate_is_refused(arguments, message, tmp_path, capsys):
    code, _, err = lowmem(capsys, "generate", tmp_path, "hello", *arguments)
    assert code == 2
    assert message in err


def test_generate_says_which_checkpoint_answers(config, run_dir, capsys):
    assert "there is no such folder" in lowmem(capsys, "generate", "/nope", "hello")[2]
    lowmem(capsys, "train", config, "model.config.max_position_embeddings=64")
    (run_dir / "checkpoint-6" / "model.safetensors").write_bytes(b"")
    code, _, err = lowmem(capsys, "generate", run_dir, "hello", "--max-new-tokens", 100)
    assert code == 0
    assert "skipped a damaged checkpoint" in err and f"answering with {run_dir}/checkpoint-4" in err
    assert "the answer ends after" in err
    code, _, err = lowmem(capsys, "generate", run_dir, "hello " * 100)
    assert code == 2
    assert "tokens; the model takes from 1 to 63" in err


EXAMPLES = {
    "": "lowmem train configs/quickstart.yaml optimizer.lr=2e-3",
    "train": "lowmem train configs/quickstart.yaml optimizer.lr=2e-3 run_dir=runs/first",
    "plan": "lowmem plan configs/llama3_8b_chat_24gb.yaml --memory 24GiB",
}


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_example_of_a_command_is_on_a_line_of_its_own(command, capsys, monkeypatch):
    """It can be copied, whatever the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = lowmem(capsys, *command.split(), "--help")
    assert code == 0
    assert out.splitlines()[-2:] == ["example:", f"  {EXAMPLES[command]}"]


def test_a_run_writes_activations_to_a_file(config, run_dir, capsys, monkeypatch):
    """Its optimizer is made before the trainer enables activation checkpointing."""
    files, write = [], activations._File._write
    monkeypatch.setattr(activations._File, "_write", lambda file, tensor: files.append(file) or write(file, tensor))
    monkeypatch.setattr(activations, "_LEAST", 1)
    options = ["trainer.activation_checkpointing=true", "layers.activation_offload=disk", "trainer.max_steps=2"]
    code, out, err = lowmem(capsys, "train", config, *options, "trainer.eval_strategy=no")
    assert (code, err) == (0, "")
    assert "activations recomputed in backward, in a file\n" in out
    assert len(files) >= 2
    assert len({id(file) for file in files}) == 1


def test_a_defect_is_one_line_and_keeps_its_traceback(config, run_dir, capsys, monkeypatch):
    def fail(*_, **__):
        raise KeyError("a [bold] bug")

    monkeypatch.setattr(report.RunReport, "on_step_end", fail)
    code, _, err = lowmem(capsys, "train", config)
    assert code == 3
    assert err == "error: unexpected KeyError: 'a [bold] bug'. --debug shows the traceback\n"
    assert "in fail" in (run_dir / "traceback.txt").read_text()
    with pytest.raises(KeyError):
        cli.main(["train", str(config), f"run_dir={run_dir}-2", "--debug"])


def test_out_of_memory_is_advised_with_the_plan(config, run_dir, capsys, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")

    monkeypatch.setattr(report.RunReport, "on_step_end", fail)
    code, _, err = lowmem(capsys, "train", config)
    assert code == 2
    assert "out of memory: Tried to allocate 20.00 MiB. By the plan a step needs " in err
    assert "trainer.per_device_train_batch_size=2" in err and f"lowmem train {run_dir}/config.yaml --resume" in err
