"""Configurations of DeepSpeed and FSDP, in a file or in place: mutated values and damaged JSON."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

from mutations import damage, mutate
from runs import LONGEST, SMALL, samples, text_of

from lowmem.errors import LowmemError
from lowmem.hf import sharding
from lowmem.run import build
from lowmem.run.config import load

CONFIGS = Path(__file__).parent.parent.parent / "configs"
ZERO3 = [json.loads((CONFIGS / name).read_text()) for name in ("zero3.json", "zero3_offload.json")]
ZERO3 += [{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}]
FSDP = [{"reshard_after_forward": True, "cpu_ram_efficient_loading": True}, {"version": 2, "min_num_params": 10}]
FSDP += [{"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}]
KNOWN: dict[tuple[Any, ...], list[str]] = {
    (): ["fp16", "bf16", "optimizer", "scheduler", "amp", "gradient_clipping", "steps_per_print", "aio", "data_types",
         "wall_clock_breakdown", "prescale_gradients", "activation_checkpointing", "zero_allow_untested_optimizer",
         "flops_profiler", "tensor_parallel", "checkpoint", "elasticity", "communication_data_type", "nope"],
    ("zero_optimization",): ["stage", "offload_optimizer", "offload_param", "sub_group_size", "zero_hpz_partition_size",
                             "mics_shard_size", "stage3_max_live_parameters", "round_robin_gradients", "nope"],
    ("fp16",): ["enabled", "loss_scale", "initial_scale_power", "hysteresis", "min_loss_scale", "loss_scale_window"],
}  # fmt: skip
KNOWN_FSDP: dict[tuple[Any, ...], list[str]] = {
    (): ["version", "cpu_offload", "xla", "state_dict_type", "activation_checkpointing", "fsdp_version", "nope"]
}


def run(seed: int, folder: Path) -> str:
    rng = random.Random(seed)
    name = rng.choice(("deepspeed", "deepspeed", "fsdp_config"))
    value = rng.choice(ZERO3 if name == "deepspeed" else FSDP)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = mutate(rng, value, KNOWN if name == "deepspeed" else KNOWN_FSDP) if value else value
    written = {**SMALL[0], "trainer": {**SMALL[0]["trainer"], name: value}}
    if name == "fsdp_config":
        written["trainer"]["fsdp"] = True
    if rng.random() < 0.5:
        written["trainer"][name] = "engine.json"
        text = json.dumps(value).encode()
        (folder / "engine.json").write_bytes(damage(rng, text) if rng.random() < 0.5 else text)
    path = folder / "run.yaml"
    path.write_text(text_of(written), encoding="utf-8")
    try:
        with contextlib.chdir(folder):
            args = build.arguments(load(path), samples(held_out=False))
            sharded = sharding.of(args)
            if sharded is not None:
                sharded.loss_scale()
    except LowmemError as error:
        message = str(error)
        assert 0 < len(message) <= LONGEST, f"{len(message)} characters: {message[:LONGEST]}"
        return type(error).__name__
    return "accepted"
