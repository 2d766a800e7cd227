"""What reaches the Hub: an API in its place notes the files of each upload."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import transformers.trainer
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import filter_repo_objects
from support.products import FULL
from support.runs import lowmem, write

pytestmark = pytest.mark.usefixtures("sketched_pictures")

MODEL = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def uploads(monkeypatch):
    """The files and their contents of each upload, by its commit message."""
    found = {}

    def upload_folder(self, *, repo_id, folder_path, commit_message, path_in_repo=None, run_as_future=False, **options):
        patterns = {name: options.get(name) for name in ("allow_patterns", "ignore_patterns")}
        names = (path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file())
        found[commit_message] = {n: (folder_path / n).read_bytes() for n in filter_repo_objects(names, **patterns)}
        done = Future()
        done.set_result(None)
        return done if run_as_future else None

    made = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    if hasattr(transformers.trainer, "hf_api"):
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: made)
    else:
        monkeypatch.setattr(transformers.trainer, "create_repo", made.create_repo)
    return found


@pytest.mark.parametrize(
    "strategy", ["end", "every_save", "checkpoint", "all_checkpoints"] if FULL else ["end", "checkpoint"]
)
def test_only_what_a_model_needs_is_published(strategy, uploads, tmp_path, run_dir):
    save = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    ended = lowmem("sft", "--config", write(tmp_path, push_to_hub=True, hub_strategy=strategy, **save))
    assert ended.status == 0, ended.err
    last = uploads.pop("End of training")
    assert MODEL <= last.keys() <= MODEL | {"chat_template.jinja", "README.md", "training.yaml", "loss.png"}
    assert last["model.safetensors"] == (run_dir / "model.safetensors").read_bytes()
    assert str(tmp_path).encode() not in b"".join(last.values())
    assert b"data_files: chats.jsonl" in last["training.yaml"] and b'model="me/run"' in last["README.md"]
    assert b"| optimizer | adalomo, lr 0.001" in last["README.md"] and b"None" not in last["README.md"]
    saved = [uploads.pop(f"Training in progress, step {step}") for step in (1, 2)] if strategy != "end" else []
    assert all(MODEL <= names.keys() <= MODEL | {"chat_template.jinja"} for names in saved)
    for step in (1, 2) if "checkpoint" in strategy else ():
        assert "optimizer.safetensors" in (names := uploads.pop(f"Training in progress, step {step}, checkpoint"))
        assert "training_args.bin" not in names
    assert uploads == {}


@pytest.mark.parametrize("always", [False, True])
def test_a_checkpoint_that_is_uploaded_is_not_removed(always, uploads, tmp_path, run_dir, monkeypatch):
    """The first upload takes until the run ends. With `hub_always_push`, others begin before."""
    note, first = HfApi.upload_folder, Future()

    def slow(self, *, run_as_future=False, **options):
        done = note(self, run_as_future=run_as_future, **options)
        return first if run_as_future and len(uploads) == 1 else done

    monkeypatch.setattr(HfApi, "upload_folder", slow)
    monkeypatch.setattr(
        transformers.Trainer, "_finish_current_push", lambda self: first.done() or first.set_result(None)
    )
    save = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}
    path = write(tmp_path, push_to_hub=True, hub_strategy="every_save", hub_always_push=always, **save)
    assert lowmem("sft", "--config", path).status == 0
    there = sorted(folder.name for folder in run_dir.glob("checkpoint-*"))
    assert there == (["checkpoint-1", "checkpoint-2", "checkpoint-3"] if always else ["checkpoint-1", "checkpoint-3"])
    assert len(uploads) == (4 if always else 2)


def test_an_upload_that_fails_names_the_complete_model(uploads, tmp_path, run_dir, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(HfApi, "upload_folder", fail)
    ended = lowmem("sft", "--config", write(tmp_path, push_to_hub=True, hub_strategy="end"))
    assert ended.status == 2 and (run_dir / "model.safetensors").exists()
    assert f"push_to_hub: {run_dir} has the complete model, but its upload failed: no route" in ended.err
