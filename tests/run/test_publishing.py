"""Tests uploads to the Hub, which is replaced by a function that records the files of each upload."""

from types import SimpleNamespace

import pytest
import transformers.trainer
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import filter_repo_objects
from support.runs import lowmem, write

pytestmark = pytest.mark.usefixtures("sketched_pictures")

MODEL = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def uploads(monkeypatch):
    """Returns the contents of uploaded files by name, for each commit message."""
    contents = {}

    def upload_folder(self, *, repo_id, folder_path, commit_message, **options):
        patterns = {name: options.get(name) for name in ("allow_patterns", "ignore_patterns")}
        names = (path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file())
        contents[commit_message] = {n: (folder_path / n).read_bytes() for n in filter_repo_objects(names, **patterns)}

    repositories = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    if hasattr(transformers.trainer, "hf_api"):
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: repositories)
    else:
        monkeypatch.setattr(transformers.trainer, "create_repo", repositories.create_repo)
    return contents


def test_only_what_a_model_needs_is_published(uploads, tmp_path, run_dir):
    save = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    ended = lowmem("sft", "--config", write(tmp_path, push_to_hub=True, **save))
    assert ended.status == 0, ended.err
    last = uploads.pop("End of training")
    assert MODEL <= last.keys() <= MODEL | {"chat_template.jinja", "README.md", "training.yaml", "loss.png"}
    assert last["model.safetensors"] == (run_dir / "model.safetensors").read_bytes()
    assert str(tmp_path).encode() not in b"".join(last.values())
    assert b"data_files: chats.jsonl" in last["training.yaml"] and b'model="me/run"' in last["README.md"]
    assert b"| optimizer | adalomo, lr 0.001" in last["README.md"] and b"None" not in last["README.md"]
    assert uploads == {}


def test_checkpoints_are_not_uploaded(tmp_path):
    ended = lowmem("sft", "--config", write(tmp_path, push_to_hub=True, hub_strategy="every_save"))
    assert ended.status == 2 and "hub_strategy: only the final model is uploaded. Omit it" in ended.err


def test_an_upload_that_fails_names_the_complete_model(uploads, tmp_path, run_dir, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(HfApi, "upload_folder", fail)
    ended = lowmem("sft", "--config", write(tmp_path, push_to_hub=True))
    assert ended.status == 2 and (run_dir / "model.safetensors").exists()
    assert f"push_to_hub: {run_dir} has the complete model, but its upload failed: no route" in ended.err
