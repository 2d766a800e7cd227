"""Tests plans of runs: reported memory, whether a run fits, options that reduce memory, and unsupported runs."""

import copy
import functools
import json

import pytest
import torch
from support import runs
from support.products import FULL, in_turn
from torch import Tensor, nn
from transformers import AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig

from benchmarks import families
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.options import parse_bytes
from lowmem.rules.adalomo import AdaLomo
from lowmem.run import build, fake, plan, reductions
from lowmem.run.memory import KINDS, TEMPORARIES, step_memory
from lowmem.run.recipe import parse
from lowmem.step import program

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
PARAMETERS = 2 * 4096 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a YAML file for `plan` and returns its path."""

    def write_config(command="sft", vocab_size=4096, **changes):
        LlamaConfig(**SIZES, vocab_size=vocab_size).save_pretrained(tmp_path / "model")
        usual = {"max_length": 64, "dtype": "bfloat16", "bf16": False, "gradient_checkpointing": True, "datasets": None}
        return str(runs.write(tmp_path, command, model_name_or_path=str(tmp_path / "model"), **{**usual, **changes}))

    return write_config


def planned(path, *words, device="gpu", command="sft", ranks=1):
    return plan.plan(parse(command, ["--config", path, *words], device=device), ranks).step


def test_weights_and_states(write):
    step = planned(write(fused={"rule": "adamw"}))
    assert step.items["weights"] == 2 * PARAMETERS
    assert step.items["optimizer states"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert step.largest_gradient == 2 * 4096 * 64
    assert step.rest + step.largest_gradient < step.peak


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dtype_of_the_files_is_planned(write, dtype, tmp_path):
    path = write(dtype="auto")
    LlamaConfig(**SIZES, vocab_size=4096, dtype=dtype).save_pretrained(tmp_path / "model")
    assert planned(path).items["weights"] == getattr(torch, dtype).itemsize * PARAMETERS


EIGHT_BITS = {"rule": "adamw", "state_storage": "8bit", "rounding": "compensated8"}
REAL = [
    ("sft", None, 1, None),
    ("sft", EIGHT_BITS, 2, 5.125),
    ("sft", {"rule": "adalomo", "weight_format": "int10"}, 2, 1.25 + 2 / 64),
    ("sft", {"rule": "torch.optim.NAdam"}, 2, None),  # divides by one minus a number in its state
    ("dpo", None, 2, None),
]


@pytest.mark.parametrize(("case", "computed"), in_turn(REAL, ["auto", False]))
def test_a_plan_is_the_memory_of_a_real_step(write, case, computed, tmp_path):
    """The plan must use the same model, attention and batch as a run on the CPU."""
    command, fused, rows, bytes_per_parameter = case
    path = write(
        command,
        per_device_train_batch_size=rows,
        layers={"computed_gradients": computed},
        **({"fused": fused, "learning_rate": 3e-5} if fused else {}),
    )
    arguments = parse(command, ["--config", path], device="cpu")
    expected = plan.plan(arguments).step
    arguments.training.output_dir = str(tmp_path / "run")
    data, names = fake._rows(command, 64), ["ref_model"] if command == "dpo" else []
    config = LlamaConfig(**SIZES, vocab_size=4096)
    model, *others = (AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16) for _ in range(1 + len(names)))
    others_by_name = dict(zip(names, others, strict=True))
    trainer = build.trainer(arguments, data, None, model, processing_class=fake._tokenizer(), **others_by_name)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = dict(trainer.data_collator([trainer.train_dataset[n] for n in range(rows)]))

    def loss():
        return trainer.compute_loss(model, copy.copy(batch))

    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    real = step_memory(model.train(), trainer.create_optimizer, [loss], tensors, others)
    assert expected.peak == pytest.approx(real.peak, rel=0.02)
    for kind in set(KINDS) - {TEMPORARIES}:
        assert expected.items[kind] == pytest.approx(real.items[kind], rel=0.02, abs=4096)
    if bytes_per_parameter:
        planned_bytes = expected.items["weights"] + (expected.items["optimizer states"] if fused is EIGHT_BITS else 0)
        assert planned_bytes == pytest.approx(bytes_per_parameter * PARAMETERS, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "rows", "changes"),
    [
        ("gemma2", 2, {}),  # transformers computes this one and the next without sdpa
        ("gpt_oss", 2, {}),  # experts are computed as grouped products in float32
        *([("deepseek_v3", 2, {})] if FULL else []),  # values and keys have different head sizes
        ("mistral", 1, {"sliding_window": 32}),  # the window is shorter than a row
    ],
)
def test_a_plan_computes_attention_and_experts_as_the_run(kind, rows, changes, tmp_path):
    """The run loads the model by name and so chooses the implementations itself."""
    AutoModelForCausalLM.from_config(families.config(kind, **changes)).save_pretrained(tmp_path)
    words = "--max_length 128 --bf16 false --max_grad_norm 0 --gradient_checkpointing false --fused.compile false"
    words += f" --model_name_or_path {tmp_path} --output_dir {tmp_path}/run --per_device_train_batch_size {rows}"
    gpu, cpu = (parse("sft", words.split(), device=device) for device in ("gpu", "cpu"))
    on_gpu, expected = plan.plan(gpu).step.peak, plan.plan(cpu).step.peak
    if kind in ("gemma2", "mistral"):
        assert on_gpu == pytest.approx(expected, abs=8)  # a scalar may stay on the host
    else:
        assert on_gpu < 1.01 * expected
    trainer = build.trainer(cpu, fake._rows("sft", 128), None, processing_class=fake._tokenizer())
    batch = dict(trainer.data_collator([trainer.train_dataset[n] for n in range(rows)]))
    loss = functools.partial(trainer.compute_loss, trainer.model, batch)
    real = step_memory(trainer.model.train(), trainer.create_optimizer, [loss], [*batch.values()])
    assert expected == pytest.approx(real.peak, rel=0.01)


def test_options_of_layers_change_the_memory(write):
    """The options are a tiled MLP, and offloading of the inputs of the two checkpointed layers."""
    long = {"max_length": 1024, "per_device_train_batch_size": 1, "vocab_size": 128}
    path = write(**long, fused={"rule": "adalomo", "rounding": "nearest"})  # needs almost no temporaries
    plain = planned(path)
    tiled = planned(path, "--layers.mlp_tile", "64")
    assert tiled.items["temporaries"] < plain.items["temporaries"]
    one_input = 2 * 1024 * 64
    on_host = planned(path, "--activation_checkpointing_kwargs", '{"offload": true}')
    assert plain.peak - on_host.peak >= one_input
    assert plain.host_peak <= 192  # scalars of the rule and of the step's result
    assert on_host.host_peak == pytest.approx(2 * one_input, abs=192)


def test_the_verdict_compares_the_peak_with_the_budget(write, tmp_path, monkeypatch):
    """The exit status is 0 or 1, and the JSON file contains the same numbers."""
    file, path = tmp_path / "plan.json", write()
    ended = runs.lowmem("plan", "sft", "--config", path, "--memory", "2GiB", "--json", file)
    assert (ended.status, ended.err) == (0, "") and "fits in 2.00 GiB" in ended.out
    assert "weights in bfloat16 (rounding stochastic)" in ended.out
    figures = json.loads(file.read_text())
    assert figures["peak"] == planned(path).peak == sum(figures["items"].values())
    assert not (tmp_path / "run").exists()
    of_rule = reductions.Reduction({"fused.rule": "adalomo", "learning_rate": 0.001}, "no momentum")
    of_rows = reductions.Reduction({"max_length": 32}, "longer rows are truncated")
    monkeypatch.setattr(reductions, "reductions", lambda *_: [of_rule, of_rows])
    words = ("--fused.rule", "adamw", "--learning_rate", "2e-5")
    needed = planned(path, *words).peak / 1.2 + plan.RESERVE["gpu"]
    words += ("--memory", f"{needed / 1e6:.3f}MB", "--device", "gpu")
    ended = runs.lowmem("plan", "sft", "--config", path, *words, "--json", file)
    assert ended.status == 1 and "exceeds" in ended.out
    assert "  --fused.rule adalomo --learning_rate 0.001  " in ended.out and ", fits" in ended.out
    assert json.loads(file.read_text())["reductions"]["--max_length 32"] > 0


def test_amounts_of_memory():
    assert parse_bytes("24GiB", "--memory") == 24 * 2**30
    assert parse_bytes("1.5 GB", "--memory") == 1_500_000_000
    for text in ("24 bananas", "GiB", "-3GiB", "0GiB", ""):
        with pytest.raises(ConfigError, match="24GiB"):
            parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("--fsdp", "--ranks N"),
        ("--dtype float32 --bf16 true", "--device cpu"),
        ("--torch_compile true", "Omit it"),
        ("--use_peft --load_in_4bit", "a bfloat16 base model"),
        ("--model_name_or_path nobody/nothing", r"hf download nobody/nothing config\.json"),
    ],
)
def test_commands_that_cannot_be_planned_raise(write, words, instead):
    with pytest.raises((ConfigError, UnsupportedError), match=instead):
        planned(write(), *words.split())


def test_precomputed_references_need_no_reference_model(write):
    path = write("dpo")
    both, one = (planned(path, "--precompute_ref_log_probs", value, command="dpo") for value in ("false", "true"))
    assert both.items["weights"] == 2 * one.items["weights"] == 2 * 2 * PARAMETERS


def test_patches_are_undone(write):
    """A plan patches PyTorch, transformers and TRL only while it runs."""
    before = torch.is_autocast_enabled, nn.functional.scaled_dot_product_attention, AttentionMaskInterface()["sdpa"]
    planned(write())
    after = torch.is_autocast_enabled, nn.functional.scaled_dot_product_attention, AttentionMaskInterface()["sdpa"]
    assert after == before


@pytest.mark.parametrize(
    ("fused", "advised"),
    [
        ({"rule": "adamw", "rounding": "nearest"}, False),
        ({"rule": "lans", "rounding": "master"}, True),
    ],
)
def test_suggestions_to_save_memory_are_valid_configurations(write, fused, advised, caplog):
    words = ["--config", write(dtype="float32", learning_rate=3e-5, fused=fused)]
    suggestions = [reduction.words for reduction in reductions.reductions(parse("sft", words, device="gpu"))]
    assert ("--dtype bfloat16" in suggestions) == advised
    small = "--fused.placement streamed"  # this model's layers are too small for it
    for way in (way for way in suggestions if way.startswith(("--dtype", "--fused")) and not way.startswith(small)):
        program._warn_of_lost_updates.cache_clear()
        changed = parse("sft", [*words, *way.split()], device="gpu")
        plan.plan(changed)
        rule = changed.fused.rule if changed.fused else None
        assert rule != "adalomo" or changed.training.learning_rate == AdaLomo.usual_lr[0]
    assert not [record for record in caplog.records if record.name.startswith("lowmem")]


BY_NAME = {"rule": "adafactor", "factor_map": [["embed|head|proj|norm", "HEURISTIC"]]}
KWARGS = {"use_reentrant": False, "every_n_layers": 2}


@pytest.mark.parametrize(
    ("changes", "absent", "present"),
    [
        ({"optim": "adagrad", "fused": None}, "--fused.rule", "--max_length 32"),
        ({}, "--deepspeed", "--fused.weight_format int12"),
        ({"fsdp": True}, "--fused.weight_format", "--per_device_train_batch_size 1"),
        ({"use_peft": True}, "--fused.weight_format", "--per_device_train_batch_size 1"),
        ({"fused": {"rule": "adamw", "betas": [0.9, 0.99]}}, "--fused.rule", "--fused.state_storage 8bit"),
        ({"fused": BY_NAME}, "--fused.state_storage", "--max_length 32"),
        ({"gradient_checkpointing_kwargs": KWARGS}, "--fused.state_storage", json.dumps(KWARGS | {"offload": True})),
        (
            {"gradient_checkpointing": False, "fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
            "checkpointing",
            "--max_length 32",
        ),
    ],
)
def test_suggestions_respect_the_other_arguments(write, changes, absent, present):
    recipe = parse("sft", ["--config", write(**changes)], device="gpu")
    suggestions = [reduction.words for reduction in reductions.reductions(recipe)]
    assert not any(absent in way for way in suggestions) and any(present in way for way in suggestions), suggestions


def test_a_combination_with_another_rule_has_only_its_hyperparameters(write):
    recipe = parse("sft", ["--config", write()], device="gpu")
    *_, (everything, changed, _) = reductions.planned(recipe, ranks=1, memory=0)
    assert changed.fused.rule == "adalomo" and changed.fused.weight_format == "int12", everything.words


PLANNED = {name: row for name, row in runs.listed_configs().items() if row["planned GiB per GPU"]}
SAMPLE = ("qwen3_4b_chat_16gb.yaml", "qwen3_8b_dpo_24gb.yaml", "llama3_70b_streamed_24gb.yaml")


@pytest.mark.parametrize("name", PLANNED if FULL else SAMPLE)
def test_shipped_configurations_are_planned(name, monkeypatch):
    """Each plan equals the table in configs/README.md, and fits on the card."""
    monkeypatch.chdir(runs.CONFIGS[0].parents[1])
    row = PLANNED[name]
    model = row["model"].partition(",")[0].lower().removesuffix("-instruct").removesuffix("-base")
    words = ["--config", f"configs/{name}", "--model_name_or_path", f"configs/models/{model}"]
    result = plan.plan(parse(row["task"].lower(), words, device="gpu"), 8 if row["GPUs"].startswith("8 ×") else 1)
    assert row["planned GiB per GPU"] == f"{result.needed / 2**30:.1f}"
    assert 0.4 < result.needed / 2**30 / int(row["GPUs"].split()[-2]) < 0.9


@pytest.mark.parametrize("device", ["gpu", "cpu"] if FULL else ["gpu"])
def test_ranks_share_the_weights(write, device):
    """Replicated ranks have all weights. With FSDP2 and ZeRO-3 each rank has a shard of the weights and states."""
    whole = planned(write(), device=device)
    options = {"replicated": [], "fsdp2": ["--fsdp"], "zero3": ["--deepspeed", "configs/zero3.json"]}
    ways = {name: planned(write(), *words, device=device, ranks=4) for name, words in options.items()}
    assert ways["replicated"].items["weights"] == whole.items["weights"] == 2 * PARAMETERS
    for name in ("fsdp2", "zero3"):
        assert ways[name].items["weights"] == pytest.approx(2 * PARAMETERS / 4, rel=0.01)
    for step in ways.values():  # gathered layers are freed
        assert step.peak < whole.peak + 4 * 2 * 4096 * 64
    again = planned(write(), "--fsdp", device=device, ranks=2)
    assert again.items["weights"] == pytest.approx(2 * PARAMETERS / 2, rel=0.01)


@pytest.mark.filterwarnings("error:OMP_NUM_THREADS")
def test_ranks_do_not_cause_warnings(write, monkeypatch, capfd):
    """The output is only the plan, if the user has not set `OMP_NUM_THREADS`."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    planned(write(), "--fsdp", ranks=2)
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.parametrize("where", ["cpu", "nvme"] if FULL else ["nvme"])
def test_offloaded_weights_are_on_the_host_or_on_the_disk(write, where, tmp_path):
    config = json.loads((runs.CONFIGS[0].parent / "zero3_offload.json").read_text())
    config["zero_optimization"]["offload_param"] |= {"device": where, "nvme_path": "/nowhere", "buffer_size": 10**6}
    words = ["--deepspeed", json.dumps(config), "--save_strategy", "steps"]
    recipe = parse("sft", ["--config", write(), *words], device="gpu")
    result = plan.plan(recipe, 2)
    shard, buffers = result.step.on_host["weights"], 5 * 10**6 * 2
    assert result.step.items["weights"] == 0 and shard == pytest.approx(PARAMETERS, rel=0.01)
    assert result.phases["step"].host >= (buffers if where == "nvme" else shard)
    saved = result.phases["save"].disk - (2 * shard if where == "nvme" else 0)
    assert saved == pytest.approx(2 * 2 * PARAMETERS, rel=0.1)  # the old and the new checkpoint; states are small


BROADCAST = ["--fsdp", "--fsdp_config", '{"cpu_ram_efficient_loading": true}']


@pytest.mark.parametrize(
    ("files", "fused", "words", "ranks", "on_host"),
    [
        ("float32", None, ["--fsdp"], 2, 2),  # converted before sharding
        ("float32", None, BROADCAST, 2, 2),
        (None, {"rule": "adalomo", "weight_format": "int12"}, ["--fsdp"], 2, 1.5 + 2 / 64),
        ("float32", None, [], 1, 2 * 4096 * 64 / PARAMETERS),  # one weight is being copied to the GPU
        ("float32", {"rule": "adalomo", "weight_format": "int12"}, [], 1, 2),
        ("float32", None, ["--deepspeed", "configs/zero3.json"], 2, 0),
    ][: None if FULL else 5],
)
def test_weights_that_are_changed_when_they_are_loaded(write, tmp_path, files, fused, words, ranks, on_host):
    path = write(save_strategy="steps", **({"fused": fused} if fused else {}))
    if files:
        LlamaConfig(**SIZES, vocab_size=4096, dtype=files).save_pretrained(tmp_path / "model")
    phases = plan.plan(parse("sft", ["--config", path, *words], device="gpu"), ranks).phases
    assert phases["load"].host == pytest.approx(on_host * PARAMETERS, rel=0.01)
    assert phases["resume"].device >= phases["load"].device and phases["resume"].host >= phases["load"].host


def test_phases_of_a_run(write):
    path = write(
        save_strategy="steps",
        save_total_limit=2,
        fused={"rule": "adamw", "state_storage": "float32"},
        learning_rate=2e-5,
    )
    result = plan.plan(parse("sft", ["--config", path], device="gpu"))
    phases = result.phases
    assert list(phases) == ["load", "step", "save", "resume", "end"]
    assert result.needed == phases["step"].device + plan.RESERVE["gpu"]
    checkpoint = (2 + 8) * PARAMETERS
    assert phases["save"].disk == pytest.approx(3 * checkpoint, rel=0.01)
    assert phases["end"].disk == pytest.approx(2 * checkpoint + 2 * PARAMETERS, rel=0.01)
    assert phases["load"].device == pytest.approx(2 * PARAMETERS, rel=0.01)
    words = ["--config", path, "--save_total_limit", "-1", "--max_steps", "10", "--save_steps", "2"]
    unlimited = plan.plan(parse("sft", words, device="gpu")).phases
    assert unlimited["save"].disk == pytest.approx(6 * checkpoint, rel=0.01)


def test_quantized_weights_are_saved_with_the_states_and_as_a_model(write):
    path = write(save_strategy="steps", save_total_limit=1, fused={"rule": "adalomo", "weight_format": "int12"})
    phases = plan.plan(parse("sft", ["--config", path, "--learning_rate", "1e-3"], device="gpu")).phases
    assert phases["resume"].disk == pytest.approx((2 + 1.5 + 2 / 64) * PARAMETERS, rel=0.02)


LAYERS, WIDE = 5, {"hidden_size": 144, "intermediate_size": 288, "num_hidden_layers": 5, "num_attention_heads": 4}
LAYER = 2 * (4 * 144 * 144 + 3 * 144 * 288)  # bytes of a layer's matrices


@pytest.fixture
def streamed(write, tmp_path):
    """Returns a function that plans a model whose layers are large enough to be streamed."""

    def plan_streamed(command="sft", *words, device="gpu", ranks=1, **fused):
        path = write(command, learning_rate=1e-3 if fused["rule"] == "adalomo" else 2e-5)
        LlamaConfig(**WIDE, vocab_size=4096).save_pretrained(tmp_path / "model")
        words = [*words, *(f"--fused.{name}={value}" for name, value in fused.items())]
        return plan.plan(parse(command, ["--config", path, *words], device=device), ranks)

    return plan_streamed


STREAMS = {"placement": "streamed"}


def test_layers_that_are_streamed_are_on_the_host_or_in_files(streamed, tmp_path):
    """Two layers are on the device at a time. A plan with weights in files has the same peaks and creates no files."""
    local = streamed("sft", "--save_strategy", "steps", rule="adamw")
    ours = streamed("sft", "--save_strategy", "steps", rule="adamw", **STREAMS)
    layers, states = LAYERS * LAYER, 2 * LAYERS * LAYER
    assert ours.step.peak == local.step.peak - layers - states + 2 * LAYER
    assert ours.step.items["weights"] == local.step.items["weights"] - layers + 2 * LAYER
    assert ours.step.items["activations"] == local.step.items["activations"]
    assert ours.step.on_host["weights"] == layers and ours.step.on_host["optimizer states"] == states
    assert ours.phases["load"].host == layers
    assert ours.phases["step"].host == local.phases["step"].host + layers + states
    home = tmp_path / "home"
    on_disk = streamed("sft", "--save_strategy", "steps", rule="adamw", home=home, **STREAMS)
    assert not home.exists()
    for name, phase in ours.phases.items():
        moved = layers if name == "load" else layers + states
        assert on_disk.phases[name] == plan.Phase(phase.device, phase.host - moved, phase.disk + moved)
    with pytest.raises(UnsupportedError, match="weights in files cannot be planned for a CPU"):
        streamed(rule="adamw", home=home, device="cpu", **STREAMS)


def test_copies_of_a_step(streamed):
    """A layer is read twice unless it is still on the device. Its states are read once. Both are written once."""
    alone = streamed(rule="adamw", **STREAMS)
    assert alone.step.copied[:2] == ((2 * (LAYERS - 2) + 2 * LAYERS) * LAYER, 3 * LAYERS * LAYER)
    many = streamed("sft", "--gradient_accumulation_steps=3000", rule="adalomo", **STREAMS)
    fetched, written, again = many.step.copied  # for three micro-batches, then all layers for their updates
    assert (fetched, written, again) == (3 * again + LAYERS * LAYER, LAYERS * LAYER, 2 * (LAYERS - 2) * LAYER)
    in_gb = f"{(fetched + 2997 * again) / 1e9:.2f} GB to the device and 0.00 GB back in a step"
    assert many.summary["copies"].startswith(in_gb)
    assert "hidden if a forward pass has 3,846 tokens for each 100 TFLOP/s" in alone.summary["copies"]
    assert "copies" not in streamed(rule="adalomo", device="cpu", **STREAMS).summary  # a CPU needs no copies


def test_a_reference_model_is_streamed(streamed):
    """A step reads it once. Two of its layers are on the device, one of which the next step needs."""
    local, ours = streamed("dpo", rule="adalomo"), streamed("dpo", rule="adalomo", **STREAMS)
    assert ours.step.peak == local.step.peak - 2 * (LAYERS - 2) * LAYER
    assert ours.step.items["weights"] == local.step.items["weights"] - 2 * (LAYERS - 2) * LAYER
    assert ours.step.on_host["weights"] == 2 * LAYERS * LAYER
    assert ours.step.copied[:2] == ((2 * (LAYERS - 2) + LAYERS) * LAYER, LAYERS * LAYER)
