"""Trainers with streamed weights give bitwise the losses and weights of the same trainer without streaming."""

import hashlib
from itertools import product

import peft
import pytest
import torch
from support import trainers as builders
from support.products import FULL
from support.runs import assets, logged, write_rows
from support.runs import train as command
from support.trainers import build
from transformers import AutoModelForCausalLM, TrainingArguments

from lowmem import FusedConfig, LayersConfig, placements
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.step import changes
from lowmem.tiles.quantized import tensors_of
from scripts.make_model import make_model

LAYERS = 4
SIZES = {
    "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
CHECKPOINTS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
STREAMED = {"placement": "streamed"}
STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
LOGGED = ("loss", "eval_loss", "grad_norm", "changed_share", "clip_coef", "rewards/margins", "reward")


@pytest.fixture(autouse=True)
def every_step_is_measured(monkeypatch):
    """Makes resumed runs measure their first step."""
    monkeypatch.setattr(changes, "EVERY", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a model with layers that are large enough to be streamed."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, builders.tokenizer(), **SIZES)
    return folder


@pytest.fixture
def sft(folder, tmp_path):
    """Returns a factory of fused SFT trainers that load their model by path."""

    def factory(fused=(), row="SFT", run="run", keywords=(), dtype="float32", **arguments):
        reference = {"ref_model": None} if row in ("DPO", "KTO") else {}
        options = {"rule": "adalomo", **dict(fused)}
        keywords = {"model": str(folder), "fused": FusedConfig(**options), **reference, **dict(keywords)}
        checkpoints = {"max_grad_norm": 0.0, **CHECKPOINTS, "model_init_kwargs": {"dtype": dtype}}
        arguments = {"optim": "adamw_torch_fused", "weight_decay": 0.0, **checkpoints, **arguments}
        return build(row, tmp_path / run, True, keywords, **arguments)

    return factory


def weights(model):
    named = {name: placements.full_tensor(param) for name, param in model.named_parameters()}
    return {(name, n): part for name, full in named.items() for n, part in enumerate(tensors_of(full))}


def metrics(trainer):
    return [{name: entry[name] for name in LOGGED if name in entry} for entry in trainer.state.log_history]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name].cpu(), other[name].cpu())]


def assert_same(local, streamed):
    assert metrics(local) == metrics(streamed)
    assert_equal(weights(local.model), weights(streamed.model))
    assert local.optimizer.placement == "local"
    assert streamed.optimizer.placement == "streamed"
    streaming = placements.streaming_of(streamed.model)
    assert len(streaming.units) == LAYERS
    assert streaming.peak == 2 * streaming.units[0].nbytes


def both(make, fused=(), train=lambda trainer: trainer.train(), **arguments):
    """Trains with the model on the device and then streamed. Returns the streamed trainer."""
    trainers = []
    for run, placement in (("local", {}), ("streamed", STREAMED)):
        trainers.append(make({**dict(fused), **placement}, run=run, **arguments))
        train(trainers[-1])
    assert_same(*trainers)
    return trainers[1]


# -- the same bits -----------------------------------------------------------------------------------------------------

CASES = {
    "clipped in two passes": ({"policy": "two_pass"}, {"max_grad_norm": 0.1}),
    "accumulated": ({"policy": "deferred"}, {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}),
    "dropout in a model of another dtype": ({}, {"dtype": "bfloat16", "packing": True, "max_length": 16}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_without_streaming(sft, case):
    fused, arguments = CASES[case]
    both(sft, fused, **arguments)


@pytest.mark.parametrize(
    ("row", "lora"),
    product(["SFT", "DPO", "KTO", "GRPO"], [False, True]) if FULL else [("SFT", True), ("DPO", False), ("GRPO", False)],
)
def test_trainers_of_trl(sft, row, lora):
    """Reference models are streamed, too. GRPO generates text between steps."""
    adapters = {"peft_config": peft.LoraConfig(r=64, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")}
    beta = {"beta": 0.1} if row == "GRPO" else {}
    trainer = both(sft, {"rule": "adamw"}, row=row, keywords=adapters if lora else {}, learning_rate=1e-3, **beta)
    reference = getattr(trainer, "ref_model", None)
    assert (reference is None) == (lora or row == "SFT")
    if reference is not None:
        streaming = placements.streaming_of(reference)
        assert streaming.written == 0 < streaming.fetched
    if lora:
        streaming = placements.streaming_of(trainer.model)
        trained = sum(param.nbytes for param in streaming.owners if param.requires_grad)
        assert streaming.written == 3 * 3 * trained  # in each step, with two states


@pytest.mark.parametrize(("device_memory", "streams"), [("5MiB", 3), ("1GiB", 0)])
def test_layers_that_fit_stay_on_the_device(sft, device_memory, streams):
    local, streamed = sft(run="local"), sft({**STREAMED, "device_memory": device_memory})
    for trainer in (local, streamed):
        trainer.train()
    assert metrics(local) == metrics(streamed)
    assert_equal(weights(local.model), weights(streamed.model))
    assert len(placements.streaming_of(streamed.model).units) == streams
    with pytest.raises(ConfigError, match="device_memory is 1,048,576 bytes, but two layers"):
        sft({**STREAMED, "device_memory": "1MiB"})


# -- saved, resumed, evaluated -----------------------------------------------------------------------------------------


def test_evaluated_saved_and_resumed(sft, tmp_path):
    fused = {"rule": "adamw", "weight_format": "int12"}
    arguments = {"keywords": {"layers": LayersConfig()}, "dtype": "bfloat16", "learning_rate": 1e-3, **STEPS}
    rows = {"eval_dataset": builders.ROWS["SFT"]()[3]["train_dataset"]}
    arguments["keywords"] |= rows
    streamed = both(sft, fused, **arguments)
    expected = metrics(streamed)
    for placement, run in (({}, "streamed"), (STREAMED, "local")):  # each trainer resumes from the other's checkpoint
        resumed = sft({**fused, **placement}, run="resumed", **arguments)
        resumed.train(resume_from_checkpoint=str(tmp_path / run / "checkpoint-2"))
        assert metrics(resumed) == expected
        assert_equal(weights(resumed.model), weights(streamed.model))
    files = [tmp_path / run / "checkpoint-4" / "model.safetensors" for run in ("local", "streamed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert streamed.evaluate()["eval_loss"] == expected[-2]["eval_loss"]


# -- loading -----------------------------------------------------------------------------------------------------------


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_start_weights_do_not_change(sft, folder, tmp_path):
    before = digest(folder)
    for dtype, home in (("float32", "host"), ("bfloat16", str(tmp_path / "home"))):
        sft({**STREAMED, "home": home}, dtype=dtype).train()
        assert digest(folder) == before


# -- wrong input -------------------------------------------------------------------------------------------------------

WRONG = {
    "no checkpointing": ({}, {"gradient_checkpointing": False}, ConfigError, "needs gradient_checkpointing=True"),
    "compiled": ({}, {"torch_compile": True}, UnsupportedError, "torch_compile=True is not supported"),
    "synchronized": ({"row": "DPO"}, {"sync_ref_model": True}, UnsupportedError, "sync_ref_model=True is not"),
    "half": ({}, {"fp16_full_eval": True}, UnsupportedError, "fp16_full_eval=True is not supported"),
    "fsdp": ({}, builders.SHARDED["fsdp2"], ConfigError, "fused.placement='streamed' contradicts fsdp"),
    "deepspeed": ({}, builders.SHARDED["zero3"], ConfigError, "fused.placement='streamed' contradicts deepspeed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_are_not_supported(sft, case, monkeypatch):
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND"):  # arguments set them in the process
        monkeypatch.setenv(variable, "no")
    options, arguments, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        sft(STREAMED, **options, **arguments)


def test_several_processes(sft, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(UnsupportedError, match="supports one process, but there are 2"):
        sft(STREAMED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"home": "disk"}, "home='disk' is not valid. Expected 'host', or a folder such as"),
        ({"home": None}, "home=None is not valid"),
        ({"device_memory": "20 cats"}, "device_memory='20 cats' is not an amount of memory"),
        ({"placement": "auto", "home": "/tmp"}, "apply only to placement 'streamed', not to 'auto'"),
        ({"placement": "local", "device_memory": "2GiB"}, "apply only to placement 'streamed', not to 'local'"),
    ],
)
def test_options(options, message):
    with pytest.raises(ConfigError, match=message):
        FusedConfig(**{**STREAMED, **options})


# -- the command line --------------------------------------------------------------------------------------------------


def test_command(folder, tmp_path):
    write_rows(rows := tmp_path / "rows.jsonl", [{"text": text} for text in builders.SENTENCES])
    config = tmp_path / "config.yaml"
    lines = [
        f"model_name_or_path: {folder}", f"datasets: [{{path: json, data_files: {rows}}}]", "output_dir: run",
        "max_steps: 3", "learning_rate: 1.0e-2", "max_grad_norm: 1.0", "save_steps: 3", "logging_steps: 1",
        "report_to: none",
        f"fused: {{rule: adalomo, placement: streamed, home: {tmp_path / 'home'}}}",
    ]  # fmt: skip
    config.write_text("\n".join(lines))
    assets()  # the dataset cache
    ended = command(tmp_path, "sft", "--config", str(config))
    assert (ended.status, ended.err) == (0, "")
    assert "placement  streamed: 4 layers of up to 1.4 MiB" in ended.out
    assert len(logged(tmp_path / "run", "loss")) == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert not torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(folder).lm_head.weight)
