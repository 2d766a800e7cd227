"""Small runs: valid configurations, their data, the command line in this process, and a folder that another uses."""

import contextlib
import copy
import io
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from processes import CONTEXT, PATIENCE
from trl import SFTConfig

from lowmem import cli
from lowmem.layers.config import LayersConfig
from lowmem.options import FusedConfig
from lowmem.run import build
from lowmem.run.data import DataConfig
from lowmem.run.folder import run_folder
from lowmem.run.tokenizers import SMALLEST_VOCABULARY, train_tokenizer

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
LONGEST = 2_000  # characters of a message


def small(model: dict[str, Any], path: str, optimizer: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    data = {"path": path, "max_length": 16}
    if "eval_strategy" in trainer:
        data["eval_fraction"] = 0.25
    usual = {"max_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True}
    return {
        "run_dir": "run",
        "seed": 1,
        "model": {"config": copy.deepcopy(model), "train_tokenizer": {"vocab_size": 270}, "dtype": "float32"},
        "data": data,
        "optimizer": optimizer,
        "layers": {},
        "trainer": {**usual, **trainer},
    }


SMALL = [
    small(LLAMA, "text.jsonl", {"rule": "adalomo", "lr": 1e-3}, warmup_steps=1, lr_scheduler_type="cosine"),
    small(GPT2, "pairs.jsonl", {"rule": "lomo", "lr": 1e-3, "clip_norm": 1.0}, gradient_accumulation_steps=2),
    small(
        QWEN,
        "text.jsonl",
        {"rule": "adamw", "lr": 1e-3, "groups": [{"match": "norm", "weight_decay": 0.0, "rounding": "nearest"}]},
        eval_strategy="steps",
        eval_steps=1,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
    ),
]
LAYERS = {"computed_gradients": True, "head_memory": "64MiB", "mlp_tile": 16, "activation_offload": "disk"}
SMALL[2]["layers"] = LAYERS
VALID = [*SMALL, *(yaml.safe_load(path.read_text()) for path in CONFIGS)]


class _Dumper(yaml.SafeDumper):
    """Quotes every string, since YAML 1.1 takes other words for numbers and booleans than YAML 1.2."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def text_of(config: Any) -> str:
    return yaml.dump(config, Dumper=_Dumper, width=1_000_000, allow_unicode=True, sort_keys=False)


def write_data(folder: Path) -> None:
    """The data files of `SMALL`."""
    rows = {
        "text.jsonl": [{"text": f"a line {n}"} for n in range(12)],
        "pairs.jsonl": [{"instruction": f"what is {n}", "output": f"it is {n + 1}"} for n in range(12)],
    }
    for name, records in rows.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def train(folder: Path, config: Path, *overrides: str) -> tuple[int, str]:
    """`lowmem train` in the current process and in `folder`: its exit status, and what it has printed on stderr.

    Raises what is no exit. A mistake of the user has to leave no file.
    """
    before, errors = set(folder.rglob("*")), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            cli.main(["train", str(config), *overrides])
        except SystemExit as end:
            status = end.code
    said = errors.getvalue()
    assert status in (0, 2), (status, said)
    if status == 2:
        assert said.startswith("error: ") or "\nerror: " in said, said
        assert len(said) <= LONGEST, (len(said), said[:LONGEST])
        assert not (left := set(folder.rglob("*")) - before), (said, left)
    return status, said


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[int]:
    """Another process uses a run folder and is killed in the end; its id."""
    ours, its = CONTEXT.Pipe()
    other = CONTEXT.Process(target=_use, args=(folder, its), daemon=True)
    other.start()
    its.close()
    try:
        yield ours.recv()
    finally:
        other.kill()
        other.join(PATIENCE)


def _use(folder: Path, end: Any) -> None:
    with run_folder(folder, resume=False):
        end.send(os.getpid())
        end.recv()


@cache
def samples(held_out: bool) -> build.Samples:
    """Data for `build.arguments`."""
    rows = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    return build.Samples(train_tokenizer(["a"], SMALLEST_VOCABULARY), rows, rows if held_out else None)


# Keys of a configuration by section.
KNOWN = {
    (): ["seed", "optimizer", "model", "lr", "batch_size", "epochs"],
    ("data",): [field.name for field in fields(DataConfig)],
    ("optimizer",): [field.name for field in fields(FusedConfig)] + ["betas", "eps", "weight_decay", "momentum"],
    ("trainer",): [field.name for field in fields(SFTConfig)],
    ("layers",): [field.name for field in fields(LayersConfig)],
    ("model",): ["path", "tokenizer", "dtype", "attention", "chat_template"],
    ("model", "config"): [
        "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_dropout", "head_dim",
        "vocab_size", "attention_bias", "tie_word_embeddings", "initializer_range", "num_key_value_heads",
        "pad_token_id", "mlp_bias", "sliding_window", "resid_pdrop", "layer_norm_epsilon", "layer_types", "n_inner",
    ],
}  # fmt: skip
