"""Plans of runs: their figures, whether a run fits, what would make it fit, and what cannot be planned."""

import json

import pytest
import torch
import yaml

from lowmem import cli
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.layers.config import parse_bytes
from lowmem.rules.adalomo import AdaLomo
from lowmem.run import plan
from lowmem.run.config import load
from lowmem.step import program

RUN = {
    "run_dir": "runs/planned",
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 4096,
        },
        "dtype": "bfloat16",
        "train_tokenizer": {"vocab_size": 512},
    },
    "data": {"path": "data/none.jsonl", "max_length": 64},
    "optimizer": {"rule": "adalomo", "lr": 1e-3},
    "trainer": {"per_device_train_batch_size": 2, "max_steps": 1},
}  # fmt: skip
PARAMETERS = 2 * 4096 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return str(path)


def planned(path, *overrides, device="gpu"):
    return plan.plan(load(path, overrides), device).step


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_weights_and_states(write, device):
    for computed, largest in ((False, 4096), (True, 128)):
        overrides = "optimizer.rule=adamw", f"layers.computed_gradients={json.dumps(computed)}"
        step = planned(write, *overrides, device=device)
        assert step.items["weights"] == 2 * PARAMETERS
        assert step.items["optimizer states"] == pytest.approx(8 * PARAMETERS, rel=0.01)
        assert step.largest_gradient == 2 * largest * 64
        assert step.floor < step.peak


def test_options_change_the_memory(write):
    """The batch size, checkpointing, offloaded gradients, and compensated rounding (2 bytes per weight)."""
    plain = planned(write)
    assert planned(write, "trainer.per_device_train_batch_size=8").peak > plain.peak
    stored = planned(write, "trainer.activation_checkpointing=false")
    assert stored.items["activations"] > plain.items["activations"]
    offloaded = planned(write, "trainer.gradient_accumulation_steps=4")
    assert 4 * PARAMETERS <= offloaded.host_peak < 4.1 * PARAMETERS  # summed in float32
    residual = planned(write, "optimizer.rounding=compensated")
    assert residual.items["optimizer states"] - plain.items["optimizer states"] == 2 * PARAMETERS


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_options_of_layers_change_the_memory(write, device):
    """A tiled MLP, inputs of the two checkpointed layers in a file, and on a GPU the same on the host."""
    long = ("data.max_length=1024", "trainer.per_device_train_batch_size=1", "layers.head_memory=1MiB")
    long += ("model.config.vocab_size=16384", "optimizer.rounding=nearest")  # whose update has next to no temporaries
    plain = planned(write, *long, device=device)
    tiled = planned(write, *long, "layers.mlp_tile=64", device=device)
    assert tiled.items["temporaries"] < plain.items["temporaries"]
    one_input = 2 * 1024 * 64
    in_file = planned(write, *long, "layers.activation_offload=disk", device=device)
    assert plain.peak - in_file.peak >= one_input and in_file.host_peak == plain.host_peak
    if device == "gpu":
        on_host = planned(write, *long, "trainer.activation_checkpointing_kwargs={offload: true}")
        assert on_host.peak == in_file.peak
        assert plain.host_peak < 128 and on_host.host_peak == plain.host_peak + 2 * one_input  # the numbers of the rule


def test_states_of_a_group_with_its_own_rule(write):
    """Float32 moments of the embedding and the output matrix, 8 bytes per parameter."""
    planned_groups = planned(write, "optimizer.groups=[{match: embed_tokens|lm_head, rule: adamw, lr: 1e-3}]")
    assert planned_groups.items["optimizer states"] == pytest.approx(8 * 2 * 4096 * 64, rel=0.05)


def test_whether_it_fits(write, tmp_path, capsys):
    """Exit status 0 or 1, the same figures in the file, and a picture."""
    file, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", write, "--memory", "1GiB", "--json", str(file), "--picture", str(picture)])
    assert ended.value.code == 0
    assert "fits in 1.00 GiB" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["peak"] == planned(write).peak
    assert sum(figures["items"].values()) == figures["peak"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_would_make_it_fit(write, capsys):
    needed = planned(write, "optimizer.rule=adamw").peak
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", write, "optimizer.rule=adamw", "--memory", f"{needed / 1.2 / 1e6:.3f}MB"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "rule: adalomo" in out and ", fits" in out


@pytest.mark.parametrize("text", ["24 bananas", "GiB", "-3GiB", "0GiB", ""])
def test_text_that_is_not_an_amount_of_memory_is_refused(text):
    with pytest.raises(ConfigError, match="24GiB"):
        parse_bytes(text, "--memory")


def test_amounts_of_memory():
    assert parse_bytes("24GiB", "--memory") == 24 * 2**30
    assert parse_bytes("1.5 GB", "--memory") == 1_500_000_000


@pytest.mark.parametrize(
    ("override", "instead"),
    [("trainer.fsdp=true", "trainer.fsdp=false"), ("trainer.bf16=true", "model.dtype")],
)
def test_what_cannot_be_planned_is_refused(write, override, instead):
    with pytest.raises(UnsupportedError, match=instead):
        planned(write, override)


def test_a_model_whose_configuration_cannot_be_read(write):
    overrides = ("model.config=null", "model.path=nobody/nothing", "model.train_tokenizer=null")
    with pytest.raises(ConfigError, match=r"config\.json"):
        planned(write, *overrides)


def test_patches_are_undone(write):
    """A plan patches PyTorch and TRL only while it runs."""
    before = torch.is_autocast_enabled
    planned(write)
    assert torch.is_autocast_enabled is before


@pytest.mark.parametrize(
    ("optimizer", "advised"),
    [
        ("{rule: adamw, lr: 2e-5}", True),
        ("{rule: adamw, lr: 2e-5, rounding: nearest}", False),
        ("{rule: torch.optim.SGD, lr: 2e-5}", False),
        ("{rule: lomo, lr: 0.1, groups: [{match: norm, rule: torch.optim.SGD, lr: 0.1}]}", False),
        ("{rule: lans, lr: 2e-5, multi_precision: true}", True),
    ],
)
def test_no_way_to_less_memory_is_warned_about_or_has_the_rate_of_another_rule(write, optimizer, advised, caplog):
    overrides = ["model.dtype=float32", f"optimizer={optimizer}"]
    ways = plan.ways(load(write, overrides), "gpu")
    assert ("model.dtype=bfloat16" in ways) == advised
    for way in ways:
        program._warn_of_lost_updates.cache_clear()
        changed = load(write, [*overrides, way])
        plan.plan(changed, "gpu")
        assert changed.optimizer.rule != "adalomo" or changed.optimizer.lr == AdaLomo.usual_lr[0]
    assert not caplog.messages
