"""Third-party files are data: files of models, data sets and run folders cannot execute code or redirect writes.

A successful attack would leave a marker. `SECURITY.md` documents the guarantees.
"""

import json
import os
import pickle
import shutil
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support import runs

import lowmem
from lowmem import cli
from lowmem.errors import ConfigError
from lowmem.hf import checkpoint
from lowmem.run import build, data, secrets
from lowmem.run.folder import RunFolder
from lowmem.run.recipe import parse

PACKAGE = Path(lowmem.__file__).parent
COMMANDS = ["sft", "inspect", "plan", "generate"]


# --- Files of a model -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Creates the working directory with a small model in `model`, chats, and a configuration that trains the model."""
    shutil.copytree(runs.assets() / "model", tmp_path / "model")
    shutil.copy(runs.assets() / "chats.jsonl", tmp_path)
    places = {"output_dir": "run", "model_name_or_path": "model"}
    data = [{"path": "json", "data_files": "chats.jsonl"}]
    config = runs.write(
        tmp_path, **places, datasets=data, fused={"rule": "lomo"}, max_length=32, max_steps=1, bf16=False
    )
    config.rename(tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    return tmp_path


class Bomb:
    """Creates the directory `marker` when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("marker",)


CODE = "import os\nos.mkdir('marker')\n"


def attempt(capsys, command, *arguments):
    """Runs a command on the model of `home` and returns its exit status and output."""
    training = ["sft", "--config", "run.yaml", *arguments]
    words = ["generate", "model", "hello", "--max-new-tokens", "2"] if command == "generate" else [command, *training]
    with pytest.raises(SystemExit) as done:
        cli.main(training if command == "sft" else words)
    output = capsys.readouterr()
    assert not Path("marker").exists(), f"{command} has executed a file of the model"
    assert done.value.code in (0, 2), output.err
    assert len(output.err) < 2000
    return done.value.code, output.err


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_pickle_executes_the_test_payload(home):
    pickle.loads(pickle.dumps(Bomb()))
    assert (home / "marker").exists()


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_pickled_weights_are_not_executed(home, save, capsys):
    (home / "model" / "model.safetensors").unlink()
    save({"weight": Bomb()}, home / "model" / "pytorch_model.bin")
    status, error = attempt(capsys, "sft")
    assert status == 2 and "safetensors" in error and "weights_only" not in error
    assert not (home / "run").exists()
    assert [attempt(capsys, command)[0] for command in COMMANDS[1:]] == [0, 0, 2]


def test_adapters_are_not_executed(home, capsys):
    """For some of its classes, PEFT imports the `parent_library` of an adapter's configuration."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "model", "r": 2, "target_modules": ["q_proj"]}
    adapter["auto_mapping"] = {"base_model_class": "Evil", "parent_library": "evil"}
    (home / "model" / "adapter_config.json").write_text(json.dumps(adapter))
    (home / "evil.py").write_text(CODE)
    torch.save({"weight": Bomb()}, home / "model" / "adapter_model.bin")
    for command in ("sft", "generate"):
        status, error = attempt(capsys, command)
        assert status == 2 and "adapter" in error


def test_unneeded_files_of_a_known_model_are_not_read_or_run(home, capsys):
    model = home / "model"
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.bin"):
        torch.save(Bomb(), model / name)
    torch.save({"weight": Bomb()}, model / "pytorch_model.bin")
    edit(model / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]})
    (model / "evil.py").write_text(CODE)
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(CODE)
    assert {attempt(capsys, command)[0] for command in COMMANDS} == {0}


UNKNOWN = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
OTHER = {"model_type": "siglip_vision_model", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
TOKENIZER = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
NEED_CODE = {
    "unknown kind": ("config.json", UNKNOWN, ["sft", "plan", "generate"]),
    "kind without a language model": ("config.json", {**OTHER, "architectures": ["evil.Model"]}, ["plan", "generate"]),
    "tokenizer": ("tokenizer_config.json", TOKENIZER, ["sft", "inspect", "generate"]),
}


@pytest.mark.parametrize(("file", "values", "commands"), NEED_CODE.values(), ids=NEED_CODE)
def test_a_model_that_needs_remote_code_raises_without_a_prompt(home, file, values, commands, capsys):
    edit(home / "model" / file, **values)
    (home / "model" / "evil.py").write_text(CODE)
    assert [attempt(capsys, command)[0] for command in commands] == [2] * len(commands)
    assert not (home / "run").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_model_does_not_choose_kernels_to_download(home, key):
    """transformers interprets `organization/name` as compiled code on the Hub."""
    edit(home / "model" / "config.json", **{key: "evil/kernels"})
    for words, expected in (([], "sdpa"), (["--attn_implementation", "eager"], "eager")):
        arguments = parse("sft", ["--config", "run.yaml", *words])
        trainer = build.trainer(arguments, data.load(arguments)[0], None)
        assert trainer.model.config._attn_implementation == expected


@pytest.mark.parametrize("settings", [{"penalty_alpha": 0.5, "top_k": 4}, {"num_beams": 2}, {"eos_token_id": "x"}])
def test_invalid_generation_settings_raise(home, settings, capsys):
    """transformers has moved some generation methods to code on the Hub."""
    (home / "model" / "generation_config.json").write_text(json.dumps(settings))
    status, error = attempt(capsys, "generate")
    assert status == 2 and "Correct or delete generation_config.json" in error


TEMPLATES = {
    "globals": "{{ cycler.__init__.__globals__.os.mkdir('marker') }}",
    "files": "{{ open('run.yaml').read() }}",
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "no end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "no Jinja": "{% for",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_that_reaches_python_raises(home, template, capsys):
    (home / "model" / "chat_template.jinja").write_text(template)
    assert [attempt(capsys, command)[0] for command in ("sft", "generate")] == [2, 2]
    assert not (home / "run").exists()


def test_a_script_of_a_folder_of_data_is_not_run(home, capsys):
    (home / "data").mkdir()
    (home / "chats.jsonl").rename(home / "data" / "chats.jsonl")
    (home / "data" / "data.py").write_text(CODE)
    config = (home / "run.yaml").read_text()
    (home / "run.yaml").write_text(config.replace("data_files: chats.jsonl", "split: train").replace("json", "data"))
    status, error = attempt(capsys, "inspect")
    assert status == 2 and "Dataset scripts are no longer supported" in error


# --- Paths ------------------------------------------------------------------------------------------------------------


def checkpoints(run_dir, *steps):
    for step in steps:
        (run_dir / f"checkpoint-{step}").mkdir(parents=True)
        (run_dir / f"checkpoint-{step}" / "weights").write_text("of this run")


@pytest.fixture
def outside(tmp_path):
    """Creates a directory outside the run folder that must not change."""
    folder = tmp_path / "outside"
    checkpoints(folder, 1, 2, 3)
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    yield folder
    assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before


def test_a_link_is_removed_and_not_its_target(tmp_path, outside):
    (tmp_path / ".saving").symlink_to(outside)
    checkpoint.remove(tmp_path / ".saving")
    assert not (tmp_path / ".saving").is_symlink()


def staged(run_dir, *names):
    """Returns the run's files that are about to be published."""
    for name in names:
        path = run_dir / ".saving" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of this run")
    return run_dir / ".saving"


@pytest.mark.parametrize("target", ["checkpoint-1", "gone"])
def test_a_checkpoint_replaces_a_link_and_not_its_target(tmp_path, outside, target):
    run_dir = tmp_path / "run"
    saving = staged(run_dir, "checkpoint-1/weights")
    (run_dir / "checkpoint-1").symlink_to(outside / target)
    (run_dir / ".replaced").symlink_to(outside)
    checkpoint.publish(saving / "checkpoint-1", run_dir / "checkpoint-1")
    assert not (run_dir / "checkpoint-1").is_symlink() and not (run_dir / ".replaced").exists()
    assert (run_dir / "checkpoint-1" / "weights").read_text() == "of this run"


def test_a_final_model_replaces_links_and_not_their_targets(tmp_path, outside):
    run_dir = tmp_path / "run"
    saving = staged(run_dir, "model/config.json", "model/weights", "model/adapter/config.json")
    for name in ("config.json", "weights"):
        (run_dir / name).symlink_to(outside / "checkpoint-1" / "weights")
    (run_dir / "adapter").symlink_to(outside)
    (run_dir / "model.safetensors").touch()  # of an earlier model, whose weights are replaced by files of other names
    checkpoint.publish_model(saving / "model", run_dir)
    assert not any(path.is_symlink() for path in run_dir.iterdir()) and not (run_dir / "model.safetensors").exists()


def resumed(run_dir):
    return RunFolder(run_dir, "last").opened()


@pytest.mark.parametrize("name", [".lock", ".config.yaml.tmp", "metrics.jsonl", "traceback.txt"])
def test_a_run_folder_with_links_to_files_is_not_written_to(tmp_path, name):
    precious, run_dir = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    checkpoints(run_dir, 1)
    (run_dir / name).symlink_to(precious)
    with pytest.raises(ConfigError, match="is a symbolic link"), resumed(run_dir):
        pass
    assert precious.read_text() == "precious"


def test_the_best_checkpoint_is_one_of_the_run(make, tmp_path):
    """When a run with save_total_limit=1 ends, transformers removes every checkpoint except the best."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    make(max_steps=2, **saving).train()
    make(run="other", max_steps=2, **saving).train()
    state = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    edit(state, best_model_checkpoint=str(tmp_path / "other" / "checkpoint-2"), best_global_step=1)
    sums = state.with_name("checksums.txt")
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if state.name not in line))
    trainer = make(max_steps=4, save_total_limit=1, **saving)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint is None
    assert [folder.name for folder in checkpoint.candidates(tmp_path / "run")] == ["checkpoint-4"]


# --- Secrets and the network ------------------------------------------------------------------------------------------

SECRETS = {"HF_TOKEN": "hf_markermarkermarker", "WANDB_API_KEY": "markerofwandb", "MY_SECRET": "marker with spaces"}


def assert_no_secret(text, where):
    assert not [value for value in (*SECRETS.values(), "marker of env") if value in text], where


def written(run_dir):
    return {path: path.read_bytes().decode(errors="replace") for path in run_dir.rglob("*") if path.is_file()}


@pytest.fixture
def visits():
    """Starts a server and records the connections to it."""
    requests = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            requests.append(self.request.recv(200))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()


def test_a_run_writes_no_secrets_uses_no_network_and_writes_only_to_its_folder(home, visits):
    """The environment contains secrets and a proxy, which would record every request."""
    address, requests = visits
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), address)
    unset = ("CI", "HF_HUB_OFFLINE", "NO_PROXY", "no_proxy", "HF_HOME", "XDG_CACHE_HOME")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    places = {"HOME": str(home / "user"), "TMPDIR": str(home / "temporary"), "HF_ENDPOINT": address}
    (home / "temporary").mkdir()
    before = set(written(home))
    words = ["sft", "--config", "run.yaml", "--save_strategy", "steps", "--save_steps", "1"]
    command = [sys.executable, "-m", "lowmem", *words]
    environment = {**inherited, **SECRETS, **proxies, **places}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (home / "run" / "checkpoint-1" / "training_args.bin").exists()
    assert (home / "run" / "training_args.bin").exists()
    for path, text in {**written(home), "output": done.stdout + done.stderr}.items():
        assert_no_secret(text, path)
    assert requests == []
    outside = {
        path.relative_to(home).parts[:2] for path in written(home).keys() - before - written(home / "run").keys()
    }
    assert outside <= {("user", ".cache")}


FAILING = """
import os, torch
class Failing(torch.optim.SGD):
    updates = 0
    def step(self, closure=None):
        Failing.updates += torch._C._current_graph_task_id() != -1  # not while it is tried
        if Failing.updates > 30:  # after the first step
            raise RuntimeError(f"login failed: {dict(os.environ)}")
        super().step(closure)
"""


def test_a_failed_run_writes_and_prints_no_secrets(home, monkeypatch, capsys):
    (home / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(home)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with (home / "run.yaml").open("a") as config:
        config.write("env: {PLACE: marker of env}\n")
    with pytest.raises(SystemExit) as done:
        cli.main(["sft", "--config", "run.yaml", "--fused.rule", "failing.Failing", "--max_steps", "40"])
    out, err = capsys.readouterr()
    assert done.value.code == 3 and "login failed" in err and os.environ.pop("PLACE") == "marker of env"
    assert "login failed" in (home / "run" / "traceback.txt").read_text()
    for path, text in {**written(home / "run"), "output": out + err}.items():
        assert_no_secret(text, path)


def test_a_configuration_with_the_value_of_a_secret_variable_raises(home, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["WANDB_API_KEY"])
    assert secrets.redacted("a markerofwandb b") == "a *** b"
    with pytest.raises(ConfigError, match="--run_name contains a password or token"):
        parse("sft", ["--config", "run.yaml", "--run_name", "markerofwandb"])


def test_nothing_is_sent_unless_the_configuration_asks(home):
    args = parse("sft", ["--config", "run.yaml"]).training
    assert (args.report_to, args.push_to_hub, args.hub_token, args.trust_remote_code) == ([], False, None, False)
