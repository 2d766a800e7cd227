"""Publishes a model on the Hub: its files, tokenizer and card, the loss curve and the arguments. Other files of the run
folder are not uploaded, because they contain paths, the command line and the environment.
"""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from lowmem.files import write_file
from lowmem.hf.checkpoint import OPTIMIZER_FILE
from lowmem.run.recipe import Recipe

ARGUMENTS = "training.yaml"

_MODEL = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
    "*processor_config.json",
)  # fmt: skip
_UNPUBLISHED = (OPTIMIZER_FILE, "checkpoint-*", ".*", "runs/*")


def publish(trainer: Any, recipe: Recipe, folder: Path, topics: dict[str, str]) -> None:
    """Uploads the final model of a run folder. Rank 0 calls it. topics: the description of the run, for the card."""
    trainer._finish_current_push()
    trainer.create_model_card(trainer.hub_model_id.rpartition("/")[2], recipe.script.dataset_name)
    card = folder / "README.md"
    rows = "".join(f"| {topic} | {text} |\n" for topic, text in topics.items())
    training = f"\n## Training\n\n| | |\n| --- | --- |\n{rows}\n[All arguments]({ARGUMENTS})\n\n![loss](loss.png)\n"
    write_file(card, (card.read_text(encoding="utf-8") + training).encode())
    write_file(folder / ARGUMENTS, shared_arguments(recipe).encode())
    _upload(trainer, folder, "End of training", allow_patterns=[*_MODEL, card.name, ARGUMENTS, "loss.png"])


def publish_checkpoint(trainer: Any, folder: Path) -> None:
    """Starts to upload a checkpoint according to `hub_strategy`, unless an upload is in progress. Rank 0 calls it."""
    args, current = trainer.args, trainer.push_in_progress
    busy = current is not None and not current.is_done()
    if args.hub_strategy == HubStrategy.END or (busy and not args.hub_always_push):
        return
    message = f"Training in progress, step {trainer.state.global_step}"
    uploads = [_upload(trainer, folder, message, allow_patterns=[*_MODEL], run_as_future=True)]
    if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        name = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
        uploads.append(_upload(trainer, folder, f"{message}, checkpoint", path_in_repo=name, run_as_future=True))
    trainer.push_in_progress = PushInProgress([*(current.jobs if busy else ()), *uploads])
    trainer._run.published = *(trainer._run.published if busy else ()), folder


def _upload(trainer: Any, folder: Path, message: str, *, path_in_repo: str | None = None, **options: Any) -> Any:
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    unpublished = ["training_args.bin"] if path_in_repo else [*_UNPUBLISHED]
    options |= {"repo_id": trainer.hub_model_id, "revision": trainer.args.hub_revision, "path_in_repo": path_in_repo}
    options |= {"commit_message": message, "ignore_patterns": unpublished, "token": trainer.args.hub_token}
    return HfApi().upload_folder(folder_path=folder, **options)


def shared_arguments(recipe: Recipe) -> str:
    """Returns the arguments of a run as YAML. Paths of local files and directories are replaced by their names."""

    def shared(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shared(item) for name, item in value.items()}
        if isinstance(value, list):
            return [shared(item) for item in value]
        return Path(value).name if isinstance(value, str) and "/" in value and Path(value).exists() else value

    arguments = {name: value for name, value in yaml.safe_load(recipe.to_yaml()).items() if name != "output_dir"}
    return yaml.safe_dump(shared(arguments), sort_keys=False, allow_unicode=True)
