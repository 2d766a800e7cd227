"""Publishes a model on the Hub: its files, tokenizer and card, the loss curve and the arguments. Other files of the run
folder are not uploaded, because they contain paths, the command line and the environment.
"""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi

from lowmem.files import write_file
from lowmem.run.recipe import Recipe

ARGUMENTS = "training.yaml"

_MODEL = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
    "*processor_config.json",
)  # fmt: skip


def publish(trainer: Any, recipe: Recipe, folder: Path, topics: dict[str, str]) -> None:
    """Uploads the final model of a run folder. Rank 0 calls it. topics: the description of the run, for the card."""
    trainer.create_model_card(trainer.hub_model_id.rpartition("/")[2], recipe.script.dataset_name)
    card = folder / "README.md"
    rows = "".join(f"| {topic} | {text} |\n" for topic, text in topics.items())
    training = f"\n## Training\n\n| | |\n| --- | --- |\n{rows}\n[All arguments]({ARGUMENTS})\n\n![loss](loss.png)\n"
    write_file(card, (card.read_text(encoding="utf-8") + training).encode())
    write_file(folder / ARGUMENTS, shared_arguments(recipe).encode())
    HfApi().upload_folder(
        folder_path=folder,
        repo_id=trainer.hub_model_id,
        revision=trainer.args.hub_revision,
        token=trainer.args.hub_token,
        commit_message="End of training",
        allow_patterns=[*_MODEL, card.name, ARGUMENTS, "loss.png"],
        ignore_patterns=["checkpoint-*", "superseded-*", ".*"],
    )


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
