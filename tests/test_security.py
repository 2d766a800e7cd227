"""What others have made is data: no file of a model, data set or run folder is executed, and none leads out of it.

Each attack would leave a marker. `SECURITY.md` says what is promised.
"""

import ast
import functools
import json
import os
import pickle
import re
import shutil
import socketserver
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from runs import samples
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig

import lowmem
from lowmem import cli
from lowmem.errors import ConfigError
from lowmem.hf import checkpoint
from lowmem.run import build, config, environment, pretrained, secrets
from lowmem.run import folder as run_folders
from lowmem.run.config import load
from lowmem.run.tokenizers import train_tokenizer

PACKAGE = Path(lowmem.__file__).parent
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
COMMANDS = ["train", "inspect", "plan", "generate"]


# --- The code ---------------------------------------------------------------------------------------------------------


@functools.cache
def calls():
    """Every call in the package: its place, what is called, and its keyword arguments."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                options = {word.arg: ast.unparse(word.value) for word in node.keywords}
                found.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", ast.unparse(node.func), options))
    return found


FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "marshal.loads", "shelve.open", "joblib.load", "np.load",
    "numpy.load", "torch.jit.load", "torch.hub.load",
}  # fmt: skip


def test_no_code_of_the_package_runs_data():
    for place, name, options in calls():
        assert name not in FORBIDDEN, f"{place} calls {name}"
        assert options.get("shell", "False") == "False", f"{place} uses a shell"
        assert options.get("trust_remote_code", "False") == "False", f"{place} trusts code"
        if name == "torch.load":
            assert options.get("weights_only") == "True", f"{place}: torch.load without weights_only=True"
        if name == "YAML":
            assert options == {"typ": "'safe'", "pure": "True"}, f"{place}: an unsafe YAML loader"


def test_models_of_others_are_loaded_in_one_place():
    places = [place.partition(":")[0] for place, name, _ in calls() if name.endswith(".from_pretrained")]
    assert set(places) == {"run/pretrained.py"}


def test_only_import_paths_of_rules_are_imported():
    """A configuration names a class, which is code that the user chooses."""
    places = [place.partition(":")[0] for place, name, _ in calls() if name.endswith("import_module")]
    assert places == ["rules/foreign.py"]


# --- What comes with a model ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with a small model, chats, and a configuration that trains the model `model`."""
    home = tmp_path_factory.mktemp("security")
    tokenizer = train_tokenizer(["hello there, how are you"], 270, None)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(home / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    llama = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    LlamaForCausalLM(llama).save_pretrained(home / "model")
    chats = [[{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": f"b {n}"}] for n in range(8)]
    (home / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    usual = {"max_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True}
    settings = {
        "run_dir": "run",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"path": "chats.jsonl", "max_length": 32, "answer_only": False},
        "optimizer": {"rule": "lomo", "lr": 1e-3},
        "trainer": {**usual, "dataloader_pin_memory": False},
    }
    (home / "run.yaml").write_text(json.dumps(settings))
    return home


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    return tmp_path


class Bomb:
    """Makes the directory `marker` where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("marker",)


CODE = "import os\nos.mkdir('marker')\n"


def attempt(capsys, command):
    """Runs a command on the model of `home`: exit status, and what it says."""
    arguments = ["model", "hello", "--max-new-tokens", "2"] if command == "generate" else ["run.yaml"]
    with pytest.raises(SystemExit) as done:
        cli.main([command, *arguments])
    said = capsys.readouterr()
    assert not Path("marker").exists(), f"{command} has executed a file of the model"
    assert done.value.code in (0, 2), said.err
    assert len(said.err) < 1000
    return done.value.code, said.err


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_bomb_explodes_where_pickle_loads_it(home):
    pickle.loads(pickle.dumps(Bomb()))
    assert (home / "marker").exists()


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_pickled_weights_are_not_executed(home, save, capsys):
    (home / "model" / "model.safetensors").unlink()
    save({"weight": Bomb()}, home / "model" / "pytorch_model.bin")
    status, said = attempt(capsys, "train")
    assert status == 2 and "safetensors" in said and "weights_only" not in said
    assert not (home / "run").exists()
    assert [attempt(capsys, command)[0] for command in COMMANDS[1:]] == [0, 0, 2]


def test_adapters_are_not_executed(home, capsys):
    """PEFT imports the `parent_library` of an adapter's configuration in some of its classes."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "model", "r": 2, "target_modules": ["q_proj"]}
    adapter["auto_mapping"] = {"base_model_class": "Evil", "parent_library": "evil"}
    (home / "model" / "adapter_config.json").write_text(json.dumps(adapter))
    (home / "evil.py").write_text(CODE)
    torch.save({"weight": Bomb()}, home / "model" / "adapter_model.bin")
    for command in ("train", "generate"):
        status, said = attempt(capsys, command)
        assert status == 2 and "adapter" in said


def test_what_a_known_kind_of_model_does_not_need_is_neither_read_nor_run(home, capsys):
    model = home / "model"
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
        "adapter_model.bin",
    ):
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


@pytest.mark.parametrize(
    ("file", "values", "commands"),
    [
        ("config.json", UNKNOWN, ["train", "plan", "generate"]),
        ("config.json", OTHER, ["train", "plan", "generate"]),
        ("tokenizer_config.json", TOKENIZER, ["train", "inspect", "generate"]),
    ],
    ids=["unknown kind", "kind without a language model", "tokenizer"],
)
def test_a_model_that_needs_its_own_code_is_refused_and_nothing_is_asked(home, file, values, commands, capsys):
    edit(home / "model" / file, **values)
    (home / "model" / "evil.py").write_text(CODE)
    for command in commands:
        status, said = attempt(capsys, command)
        assert status == 2 and "which lowmem never runs" in said and "Use a model" in said
    assert not (home / "run").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_model_does_not_choose_kernels_to_download(home, key):
    """transformers takes `organization/name` for compiled code on the Hub."""
    edit(home / "model" / "config.json", **{key: "evil/kernels"})
    assert pretrained.load_model("model", dtype="auto").config._attn_implementation == "sdpa"
    assert pretrained.load_model("model", dtype="auto", attention="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("settings", [{"penalty_alpha": 0.5, "top_k": 4}, {"num_beams": 2}, {"eos_token_id": "x"}])
def test_settings_of_generation_that_need_code_or_make_no_sense_are_refused(home, settings, capsys):
    """transformers has moved some ways to generate to code on the Hub."""
    (home / "model" / "generation_config.json").write_text(json.dumps(settings))
    status, said = attempt(capsys, "generate")
    assert status == 2 and "Correct or delete generation_config.json" in said


TEMPLATES = {
    "globals": "{{ cycler.__init__.__globals__.os.mkdir('marker') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "files": "{{ open('run.yaml').read() }}",
    "include": "{% include 'run.yaml' %}",
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "a huge text": "{{ 'a' * 10**15 }}",
    "no end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "no Jinja": "{% for",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_reaches_nothing_and_is_refused(home, template, capsys):
    (home / "model" / "chat_template.jinja").write_text(template)
    for command in ("train", "inspect", "generate"):
        status, said = attempt(capsys, command)
        assert status == 2 and "chat template refuses" in said
    assert not (home / "run").exists()


def test_a_folder_of_data_with_a_script_is_read_without_it(home, capsys):
    (home / "data").mkdir()
    (home / "chats.jsonl").rename(home / "data" / "chats.jsonl")
    (home / "data" / "data.py").write_text(CODE)
    edit(home / "run.yaml", data={"path": "data", "max_length": 32, "answer_only": False})
    assert attempt(capsys, "inspect")[0] == 0


def test_a_configuration_cannot_ask_to_run_code_of_a_model(home):
    with pytest.raises(ConfigError, match=r"trainer\.trust_remote_code.*never run"):
        load("run.yaml", ["trainer.trust_remote_code=true"])


# --- Paths ------------------------------------------------------------------------------------------------------------


def checkpoints(run_dir, *steps):
    for step in steps:
        (run_dir / f"checkpoint-{step}").mkdir(parents=True)
        (run_dir / f"checkpoint-{step}" / "weights").write_text("of this run")


@pytest.fixture
def outside(tmp_path):
    """A directory beside the run folder, in which nothing may change."""
    folder = tmp_path / "outside"
    checkpoints(folder, 1, 2, 3)
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    yield folder
    assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before


def test_rotation_removes_links_and_not_where_they_lead(tmp_path, outside):
    run_dir = tmp_path / "run"
    checkpoints(run_dir, 2, 3)
    (run_dir / "checkpoint-1").symlink_to(outside / "checkpoint-1")
    (run_dir / ".removed").symlink_to(outside)
    checkpoint.rotate(run_dir, 3, 1, None)
    assert [path.name for path in run_dir.iterdir()] == ["checkpoint-3"]


@pytest.mark.parametrize("target", ["checkpoint-1", "gone"])
def test_a_checkpoint_replaces_a_link_and_not_where_it_leads(tmp_path, outside, target):
    run_dir = tmp_path / "run"
    checkpoints(run_dir / ".saving", 1)
    (run_dir / "checkpoint-1").symlink_to(outside / target)
    (run_dir / ".replaced").symlink_to(outside)
    checkpoint.publish(run_dir / ".saving" / "checkpoint-1", run_dir / "checkpoint-1")
    assert not (run_dir / "checkpoint-1").is_symlink()
    assert (run_dir / "checkpoint-1" / "weights").read_text() == "of this run"
    assert not (run_dir / ".replaced").exists()


def test_what_a_killed_run_has_left_is_removed_and_not_where_it_leads(tmp_path, outside):
    for name in (".saving", ".removed"):
        (tmp_path / name).symlink_to(outside)
    checkpoint.tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


@pytest.mark.parametrize("name", [".lock", ".config.yaml.tmp", "metrics.jsonl", "traceback.txt"])
def test_a_run_folder_with_links_to_files_is_not_written_to(tmp_path, name):
    precious, run_dir = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    checkpoints(run_dir, 1)
    (run_dir / name).symlink_to(precious)
    with pytest.raises(ConfigError, match="is a symbolic link"), run_folders.run_folder(run_dir, resume=True):
        pass
    assert precious.read_text() == "precious"


def test_a_run_folder_and_its_checkpoints_can_be_links(tmp_path):
    checkpoints(tmp_path / "disk", 1)
    checkpoints(tmp_path / "other", 2)
    (tmp_path / "disk" / "checkpoint-2").symlink_to(tmp_path / "other" / "checkpoint-2")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with run_folders.run_folder(tmp_path / "run", resume=True) as run_dir:
        assert [path.name for path in checkpoint.candidates(run_dir)] == ["checkpoint-2", "checkpoint-1"]


def test_the_best_checkpoint_is_one_of_the_run(make, tmp_path):
    """transformers removes every other checkpoint than the best when a run with save_total_limit=1 ends."""
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
    assert [path.name for path in checkpoint.by_number(tmp_path / "run")] == ["checkpoint-4"]


# --- Secrets and the network ------------------------------------------------------------------------------------------

SECRETS = {"HF_TOKEN": "hf_markermarkermarker", "WANDB_API_KEY": "markerofwandb", "MY_SECRET": "marker with spaces"}


def assert_no_secret(text, where):
    assert not [name for name, value in SECRETS.items() if value in text], where


def written(run_dir):
    return {path: path.read_bytes().decode(errors="replace") for path in run_dir.rglob("*") if path.is_file()}


@pytest.fixture
def visits():
    """The address of a server and what has connected to it."""
    found = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            found.append(self.request.recv(200))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", found
        server.shutdown()


def test_a_run_writes_no_secret_contacts_nobody_and_stays_in_its_folder(home, visits):
    """With a network and all that a shell may have set; whatever leaves would go through the proxy."""
    address, found = visits
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), address)
    unset = ("CI", "HF_HUB_OFFLINE", "NO_PROXY", "no_proxy", "HF_HOME", "XDG_CACHE_HOME")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    places = {"HOME": str(home / "user"), "TMPDIR": str(home / "temporary"), "HF_ENDPOINT": address}
    for place in ("user", "temporary"):
        (home / place).mkdir()
    before = set(written(home))
    command = [
        sys.executable,
        "-m",
        "lowmem",
        "train",
        "run.yaml",
        "trainer.save_strategy=steps",
        "trainer.save_steps=1",
    ]
    environment = {**inherited, **SECRETS, **proxies, **places}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (home / "run" / "checkpoint-1" / "training_args.bin").exists()
    for path, text in {**written(home), "output": done.stdout + done.stderr}.items():
        assert_no_secret(text, path)
    assert found == []
    outside = {
        path.relative_to(home).parts[:2] for path in written(home).keys() - before - written(home / "run").keys()
    }
    assert outside <= {("user", ".cache")}


FAILING = """
import os, torch
class Failing(torch.optim.SGD):
    def step(self, closure=None):
        if torch._C._current_graph_task_id() != -1:  # not while it is tried
            raise RuntimeError(f"login failed: {dict(os.environ)}")
        super().step(closure)
"""


def test_a_run_that_fails_writes_and_prints_no_secret(home, monkeypatch, capsys):
    (home / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(home)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as done:
        cli.main(["train", "run.yaml", "optimizer={rule: failing.Failing, lr: 0.1}"])
    out, err = capsys.readouterr()
    assert done.value.code == 3 and "login failed" in err
    assert "login failed" in (home / "run" / "traceback.txt").read_text()
    for path, text in {**written(home / "run"), "output": out + err}.items():
        assert_no_secret(text, path)


def test_the_command_is_recorded_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "markerofwandb")
    monkeypatch.setattr(sys, "argv", ["lowmem", "train", "a.yaml", "hub_token=abc", "trainer.run_name=markerofwandb"])
    environment.write_environment(tmp_path)
    command = json.loads((tmp_path / "environment.json").read_text())["command"]
    assert "abc" not in command and "markerofwandb" not in command and "train a.yaml" in command


def test_a_configuration_with_the_value_of_a_secret_variable_is_refused(home, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "markerofwandb")
    assert secrets.redacted("a markerofwandb b") == "a *** b"
    with pytest.raises(ConfigError, match=r"trainer\.run_name.*password or token"):
        load("run.yaml", ["trainer.run_name=markerofwandb"])


def test_a_credential_in_a_file_that_a_configuration_includes_is_refused(home):
    (home / "ds.json").write_text(json.dumps({"wandb": {"enabled": True, "api_key": "abc"}}))
    with pytest.raises(ConfigError, match=r"ds\.json.*password or token"):
        load("run.yaml", ["trainer.deepspeed=ds.json"])


# Fields of the trainer whose names say that something is sent, or written or read elsewhere.
ELSEWHERE = re.compile("hub|push|token|report|trackio|project|run_name|dir|path|url|script|code|callback|upload")
SENT = {
    "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "push_to_hub", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
}  # fmt: skip
HARMLESS = {
    "include_num_input_tokens_seen", "average_tokens_across_devices", "eos_token", "pad_token",
    "restore_callback_states_from_checkpoint",
}  # fmt: skip


def test_nothing_is_sent_unless_the_configuration_asks(home):
    names = {field.name for field in fields(SFTConfig) if ELSEWHERE.search(field.name)}
    refused = {name for name in names if f"trainer.{name}" in config.ELSEWHERE}
    assert names - refused - HARMLESS == SENT, "SECURITY.md lists what a configuration can send"
    args = build.arguments(load("run.yaml"), samples(held_out=False))
    assert (args.report_to, args.push_to_hub, args.hub_token) == ([], False, None)
