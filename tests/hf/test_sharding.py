"""TRL trainers that load a model by path and shard it on two ranks have the losses and weights of two plain ranks."""

import os
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from support.products import FULL
from support.ranks import RankError, Ranks
from support.trainers import SHARDED, build, joined, losses, quiet, require, require_sharding, saved
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from lowmem import FusedConfig, LayersConfig, placements
from lowmem.errors import LowmemError, UnsupportedError
from lowmem.hf.arguments import Inputs
from lowmem.hf.sharding import FSDP2Sharding, Zero3Sharding
from lowmem.tiles.quantized import has_quantized_weights
from lowmem.trainer import FusedTrainer


@pytest.fixture(scope="module", params=["fsdp2", "zero3"])
def sharded_ranks(request):
    """Returns ranks for one kind of sharding, since transformers remembers DeepSpeed configurations in a process."""
    require_sharding(request.param)
    ranks = Ranks(2)
    yield request.param, ranks
    ranks.stop()


def trained(rank, row, path, folder, sharding, dtype, lora):
    """Sharded ranks use the default head. Replicated ranks use TRL's, whose products round differently in 16 bits."""
    keywords = {"model": path, **({"ref_model": None} if row in ("DPO", "KTO") else {})}
    if sharding != "replicated" and dtype != "bfloat16":
        keywords["layers"] = LayersConfig()
    if lora:
        trained_too = {"modules_to_save": ["lm_head"]} if lora == "and the head" else {}
        targets = ["q_proj", "v_proj"]
        keywords["peft_config"] = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **trained_too)
    with joined(rank):
        options = {"model_init_kwargs": {"dtype": dtype}, "max_steps": 2, "use_cpu": True, **SHARDED[sharding]}
        trainer = build(row, folder, True, keywords, **options)
        trainer.train()
        left = "ACCELERATE_USE_FSDP" in os.environ  # a later trainer would use it as its configuration
        state = {name: placements.full_tensor(t).detach().clone() for name, t in trainer.model.named_parameters()}
    return losses(trainer), state, trainer.optimizer.placement, left


CASES = [("SFT", "auto", "and the head"), ("DPO", "float32", False), ("GRPO", "float32", False)]
if FULL:
    CASES += [("SFT", "bfloat16", False), ("DPO", "float32", True), ("KTO", "float32", False)]


@pytest.mark.parametrize(("row", "dtype", "lora"), CASES)
def test_a_model_by_its_path_is_sharded_and_trains_as_on_whole_ranks(sharded_ranks, two, row, dtype, lora, tmp_path):
    require(row)
    sharding, ranks = sharded_ranks
    if sharding == "zero3" and row in ("GRPO", "RLOO"):
        with pytest.raises(RankError, match="UnsupportedError: deepspeed: this trainer generates text"):
            ranks.run(trained, row, saved().name, str(tmp_path), sharding, dtype, lora)
        return
    path = saved().name
    try:
        (expected, weights, placement, _), _ = two.run(trained, row, path, str(tmp_path), "replicated", dtype, lora)
        (actual, sharded, chosen, left), _ = ranks.run(trained, row, path, str(tmp_path), sharding, dtype, lora)
    except RankError as error:
        reference, issued = "not compatible with `create_reference_model()`", "no attribute 'warnings_issued'"
        for words in (reference, issued, "no attribute 'ds_grads_remaining'"):  # from TRL, TRL, and PEFT with DeepSpeed
            if words in str(error):
                pytest.skip(f"these versions fail by themselves: {words}")
        raise
    assert (placement, chosen, left) == ("replicated", sharding, False)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    # in the losses of GRPO and RLOO, terms of magnitude 1 cancel
    assert actual == pytest.approx(expected, rel=tolerance, abs=1e-6)
    torch.testing.assert_close(sharded, weights, rtol=1e-3, atol=tolerance)


def rows_of_a_loop(rank, path, folder, sharding):
    """Returns this rank's rows in a custom loop whose loader is prepared with the model."""
    with joined(rank):
        trainer = build("SFT", folder, True, {"model": path}, use_cpu=True, **SHARDED[sharding])
        loader = torch.utils.data.DataLoader(range(8), batch_size=2)
        _, _, loader = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer(), loader)
        return torch.cat([*loader]).tolist()


def test_a_loop_that_prepares_all_at_once_gives_each_rank_its_rows(sharded_ranks, tmp_path):
    sharding, ranks = sharded_ranks
    rows = ranks.run(rows_of_a_loop, saved().name, str(tmp_path), sharding)
    assert sorted(rows[0] + rows[1]) == [*range(8)]


# -- quantized weights -------------------------------------------------------------------------------------------------


def quantized(rank, options, folder, resume=None):
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(32 * 16).view(32, 16) * 7 % 97]
    with joined(rank):
        saving = {"save_strategy": "steps", "save_steps": 2}
        args = TrainingArguments(**quiet(folder, max_steps=4, use_cpu=True, **saving, **options))
        fused = FusedConfig(rule="adamw", state_storage="8bit", weight_format="int12")
        trainer = FusedTrainer(model=model.bfloat16().train(), args=args, train_dataset=rows, fused=fused)
        trainer.train(resume_from_checkpoint=resume)
        assert has_quantized_weights(trainer.model)
    return losses(trainer), {name: placements.full_tensor(param) for name, param in trainer.model.named_parameters()}


def test_quantized_weights_are_sharded_only_by_fsdp2(sharded_ranks, two, tmp_path):
    sharding, ranks = sharded_ranks
    options, folder = dict(SHARDED[sharding]), str(tmp_path / "sharded")
    if sharding == "zero3":
        with pytest.raises(RankError, match="ZeRO-3 cannot shard quantized weights"):
            ranks.run(quantized, options, folder)
        return
    broadcast = {**options, "fsdp_config": {**options["fsdp_config"], "cpu_ram_efficient_loading": True}}
    with pytest.raises(RankError, match="cpu_ram_efficient_loading can only broadcast ordinary weights"):
        ranks.run(quantized, broadcast, folder)
    (logged, weights), (_, of_other) = ranks.run(quantized, options, folder)
    (whole, _), _ = two.run(quantized, {}, str(tmp_path / "whole"))
    assert logged == pytest.approx(whole, rel=1e-3)
    resumed, ended = two.run(quantized, {}, str(tmp_path / "resumed"), f"{folder}/checkpoint-2")[0]
    assert resumed == pytest.approx(logged, rel=1e-3)
    for name, weight in weights.items():
        assert torch.equal(weight, of_other[name])
        assert (ended[name] != weight).float().mean() < 0.1, name


# -- configurations that shard nothing ---------------------------------------------------------------------------------


def test_other_zero_stages_raise():
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    try:
        with pytest.raises(UnsupportedError):
            Zero3Sharding(SimpleNamespace(hf_deepspeed_config=config))
    finally:
        unset_hf_deepspeed_config()


def test_fsdp1_raises():
    with pytest.raises(UnsupportedError):
        FSDP2Sharding(SimpleNamespace(fsdp_plugin_args={"fsdp_version": 1}))


@pytest.mark.parametrize(
    ("config", "variables", "message"),
    [
        ({"state_dict_type": "SHARDED_STATE_DICT"}, {}, "Set fsdp_config.state_dict_type to FULL_STATE_DICT"),
        ({"use_orig_params": True}, {}, "fsdp_config.use_orig_params has no effect with FSDP2"),
        ({"cpu_ofload": True}, {}, "Did you mean 'cpu_offload'"),
        ({}, {"VERSION": "1"}, "FSDP_VERSION of accelerate launch is 1, but fsdp_config.version is 2"),
        ({}, {"STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, "fsdp_config.state_dict_type is FULL_STATE_DICT"),
        ({}, {"OFFLOAD_PARAMS": "true"}, "fsdp_config.cpu_offload is False"),
        ({}, {"ACTIVATION_CHECKPOINTING": "true"}, "fsdp_config.activation_checkpointing is False"),
        ({}, {"RESHARD_AFTER_FORWARD": "false"}, "fsdp_config.reshard_after_forward is True"),
        ({}, {"TRANSFORMER_CLS_TO_WRAP": "Block"}, "fsdp_config.transformer_layer_cls_to_wrap is not set"),
        ({}, {"IGNORED_MODULES": "head"}, "--fsdp_ignored_modules is not supported"),
    ],
)
def test_settings_of_fsdp_that_would_have_no_effect_raise(config, variables, message, tmp_path, monkeypatch):
    """The trainer raises before it loads the model, which does not exist."""
    require_sharding("fsdp2")
    for name, value in variables.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    args = TrainingArguments(**quiet(tmp_path, use_cpu=True, fsdp=True, fsdp_config={"version": 2, **config}))
    with pytest.raises(LowmemError, match=message):
        FusedTrainer("not a model", args, fused=FusedConfig(rule="adalomo"))


def test_the_variables_that_accelerate_launch_always_sets_agree_with_fsdp2(monkeypatch, tmp_path):
    require_sharding("fsdp2")
    words = "--use_fsdp --fsdp_version 2 --num_machines 1 --num_processes 2 --mixed_precision no --dynamo_backend no"
    for name, value in prepare_multi_gpu_env(launch_command_parser().parse_args([*words.split(), "script.py"])).items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    args = TrainingArguments(**quiet(tmp_path, use_cpu=True, fsdp=True, fsdp_config={"version": 2}))
    assert isinstance(Inputs(None, args, None, None).sharding, FSDP2Sharding)


def test_settings_of_fsdp_without_fsdp_raise(tmp_path):
    require_sharding("fsdp2")
    args = TrainingArguments(**quiet(tmp_path, use_cpu=True, fsdp_config={"reshard_after_forward": False}))
    with pytest.raises(LowmemError, match="Set fsdp: true"):
        _ = Inputs(None, args, None, None).sharding  # raises


def test_one_process_shards_nothing():
    sharding = FSDP2Sharding(SimpleNamespace(fsdp_plugin_args={"fsdp_version": 2}, fsdp_config={}))
    with pytest.raises(LowmemError):
        sharding.prepare(torch.float32)
