"""Arguments of TRL and transformers at random: a run trains as TRL's own script does, or one message refuses it first.

Each input is a command with one to six arguments that are drawn from its dataclasses, sensible or not, on a tiny model
for two steps. Not drawn are those that reach other machines, processes, devices or the compiler.
"""

import contextlib
import importlib
import io
import logging
import math
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import transformers
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from support import runs

COMMANDS = ["sft", "sft", "sft", "dpo", "dpo", "kto", "reward", "reward", "grpo", "rloo"]

# Of the machine, the network, other processes and devices, the compiler; and what `runs.arguments` sets.
LEFT_OUT = re.compile(
    r"output_dir|model_name_or_path|model_revision|dataset(s|_name|_config|_streaming|_test_split|_train_split|_num_proc)"
    r"|.*hub.*|.*vllm.*|trackio.*|project|report_to|deepspeed|fsdp.*|parallelism_config|ddp_.*|local_rank|torch_compile.*"
    r"|resume_from_checkpoint|max_steps|num_train_epochs|streaming|test_split_size|dataloader_(num|multi|prefetch).*"
    r"|full_determinism|tf32|log_level.*|log_on_each_node|.*continuous_batching.*|use_transformers_paged|reward_funcs"
    r"|chat_template_path|disable_tqdm|environment_factory|rollout_func|log_completions|num_completions_to_print"
)
LOSSES = {
    "sft": ["nll", "dft", "chunked_nll", "none"],
    "dpo": [["hinge"], ["ipo"], ["robust"], ["sigmoid", "sft"], ["bco_pair"], ["apo_zero"], ["discopop"], ["no"]],
    "kto": ["kto", "apo_zero_unpaired", "none"],
    "grpo": ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "none"],
}
# Values of arguments whose type does not say which there are.
VALUES: dict[str, list[Any]] = {
    "accelerator_config": [{"split_batches": True}, {"even_batches": False}, {"foo": 1}],
    "activation_checkpointing_kwargs": [{"use_reentrant": True}, {"use_reentrant": False}, {"foo": 1}],
    "attn_implementation": ["eager", "sdpa", "flex", "none"],
    "dtype": ["bfloat16", "float16", "float32", "auto", "int4"],
    "dataset_kwargs": [{"skip_prepare_dataset": True}, {"add_special_tokens": False}],
    "dataset_text_field": ["text", "foo"],
    "debug": ["underflow_overflow", "foo"],
    "eos_token": ["<|user|>", "none", "the"],
    "f_divergence_type": ["forward_kl", "js_divergence", "alpha_divergence", "none"],
    "gradient_checkpointing_kwargs": [{"use_reentrant": True}, {"use_reentrant": False}, {"foo": 1}],
    "generation_kwargs": [{"num_beams": 1}, {"foo": 1}],
    "include_for_metrics": [["inputs"], ["loss"]],
    "include_num_input_tokens_seen": [True, False, "all", "non_padding", "foo"],
    "label_names": [["labels"], ["foo"]],
    "lora_target_modules": [["q_proj"], ["all-linear"], ["foo"]],
    "lora_modules_to_save": [["lm_head"], ["foo"]],
    "lora_task_type": ["CAUSAL_LM", "SEQ_CLS", "foo"],
    "lr_scheduler_kwargs": [{}, {"num_cycles": 2}, {"min_lr": 1e-4}, {"num_decay_steps": 1}, {"foo": 1}],
    "metric_for_best_model": ["loss", "eval_loss", "runtime", "accuracy"],
    "model_init_kwargs": [{"attention_dropout": 0.1}, {"foo": 1}, {"dtype": "float32"}],
    "optim_args": ["foo=1", "momentum=0.9"],
    "packing_strategy": ["bfd", "bfd_split", "wrapped", "none"],
    "pad_to_multiple_of": [1, 8, "auto", 0],
    "pad_token": ["<|user|>", "none"],
    "run_name": ["a", "2026-01-01", "x" * 300],
    "truncation_mode": ["keep_start", "keep_end", "none"],
    "train_sampling_strategy": ["random", "sequential", "group_by_length", "none"],
    "scale_rewards": ["group", "batch", "none", False],
    "importance_sampling_level": ["token", "sequence", "none"],
}
# Numbers, by the type of the argument.
NUMBERS = {
    int: [-1, 0, 1, 2, 3, 4, 7, 100],
    float: [-1.0, 0.0, 1e-8, 0.1, 0.5, 0.9, 1.0, 1.5, 10.0, math.nan, math.inf],
}


def draw(chance: random.Random, command: str) -> dict[str, Any]:
    """One to six arguments of a command that do not have their defaults."""
    kinds = importlib.import_module(f"trl.scripts.{command}").make_parser().dataclass_types
    hints = {
        option.name: (get_type_hints(kind)[option.name], option.default) for kind in kinds for option in fields(kind)
    }
    names = sorted(name for name in hints if not LEFT_OUT.fullmatch(name))
    drawn = {name: _value(chance, command, name, *hints[name]) for name in chance.sample(names, chance.randint(1, 6))}
    return {name: value for name, value in drawn.items() if value is not None}


def _value(chance: random.Random, command: str, name: str, hint: Any, default: Any) -> Any:
    if name == "loss_type":
        return chance.choice(LOSSES[command])
    if name in VALUES:
        return chance.choice(VALUES[name])
    if get_origin(hint) is Literal:
        return chance.choice([choice for choice in get_args(hint) if choice is not None])
    kinds = [hint, *(kind for kind in get_args(hint))]
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return chance.choice(list(kind)).value
    if bool in kinds:
        return not default
    for kind, numbers in NUMBERS.items():
        if kind in kinds:
            # half of them are near the default, where there is one, so that combinations are trained
            usual = default if isinstance(default, int | float) and chance.random() < 0.5 else None
            return chance.choice(numbers) if usual is None else kind(usual * chance.choice([0.5, 2]) or 1)
    return None


@contextlib.contextmanager
def _trained() -> Iterator[list[Any]]:
    """Collects the trainers that train."""
    trainers: list[Any] = []
    train = transformers.Trainer.train

    def collecting(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainers.append(self)
        return train(self, *args, **kwargs)

    transformers.Trainer.train = collecting
    try:
        yield trainers
    finally:
        transformers.Trainer.train = train
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def _losses(trainer: Any) -> list[float]:
    names = ("loss", "eval_loss", "train_loss")
    return [record[name] for record in trainer.state.log_history for name in names if name in record]


def _plain(command: str, config: dict[str, Any], folder: Path) -> Any:
    """The trainer of TRL's own script, after training."""
    path = folder / "plain.yaml"
    path.write_text(yaml.safe_dump(config))
    script = importlib.import_module(f"trl.scripts.{command}")
    with _trained() as trainers, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        parsed = script.make_parser().parse_args_and_config(["--config", str(path)])
        transformers.set_seed(parsed[1].seed)
        script.main(*parsed)
    return trainers[0]


def run(seed: int, folder: Path) -> str:
    """Trains with arguments at random, and as TRL does."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compared(seed, folder)
    finally:
        logging.disable(logging.NOTSET)


def _compared(seed: int, folder: Path) -> str:
    chance = random.Random(seed)
    command = chance.choice(COMMANDS)
    drawn = draw(chance, command)
    own_head = chance.random() < 0.5
    usual = {"fused": None, "max_grad_norm": None, "activation_checkpointing": None, "learning_rate": 1e-2,
             "test_split_size": 0.25, "optim": "adamw_torch"}  # fmt: skip
    config = runs.arguments(folder, command, **{**usual, **drawn})
    path = folder / f"{command}.yaml"
    path.write_text(yaml.safe_dump({**config, "layers": {"computed_gradients": "auto" if own_head else False}}))
    with _trained() as trainers:
        ended = runs.train(folder, command, "--config", path)  # which looks at the message and at what is left
    if ended.status == 2:
        return "LowmemError"
    ours = trainers[0]
    defaults = {"bf16": False, "dataloader_pin_memory": False, "logging_nan_inf_filter": False}
    try:
        plain = _plain(command, {**defaults, **config, "output_dir": str(folder / "plain")}, folder)
    except BaseException as error:
        raise AssertionError(
            f"{command} {drawn}: it is trained, and TRL raises {type(error).__name__}: {error}"
        ) from error
    losses, expected = _losses(ours), _losses(plain)
    exact = ours.model.dtype == torch.float32 and not ours.args.bf16
    tolerance = 1e-4 if exact else 2e-2
    close = len(losses) == len(expected) and torch.allclose(
        torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    if not close:
        raise AssertionError(f"{command} {drawn}: losses {losses} and, of TRL, {expected}")
    if exact and not own_head and (folder / "run" / "model.safetensors").exists():
        pair = (load_file(folder / name / "model.safetensors") for name in ("run", "plain"))
        ours_, theirs = pair
        for name, weight in theirs.items():
            if not torch.allclose(ours_[name], weight, rtol=1e-3, atol=1e-3, equal_nan=True):
                raise AssertionError(f"{command} {drawn}: {name} differs by {(ours_[name] - weight).abs().max()}")
    return "accepted"
