"""Training with streamed weights bitwise equals local training. At most two units are on the device."""

import copy
import mmap
import os
import shutil

import pytest
import torch
from support.products import FULL, in_turn, pairwise
from torch import nn

import lowmem
from lowmem import placements
from lowmem.errors import ConfigError, StepError, UnsupportedError
from lowmem.placements import homes
from lowmem.placements.streamed import find_units
from lowmem.step.updates import SMALL
from lowmem.tiles.storage import roundings, state_storages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 4
SIZES = {
    "hidden_size": 144, "intermediate_size": 288, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip


def stream(model, **options):
    return lowmem.stream(model, DEVICE, **options)


def placed(model, streams, **options):
    """Moves a model to the device, or prepares it for streaming to the device."""
    stream(model, **options) if streams else model.to(DEVICE)
    return model


@pytest.fixture
def make(tiny_llama):
    """Returns a factory of models, on the device or to be streamed to it."""

    def make(streams, dtype=torch.float32, checkpointing=True, options=None, **config):
        return placed(tiny_llama(dtype, checkpointing, **{**SIZES, **config}), streams, **(options or {}))

    return make


@pytest.fixture
def batches(token_batches):
    return [{name: ids.to(DEVICE) for name, ids in batch.items()} for batch in token_batches(4, (2, 6))]


def optimizer(model, streams, rule="adalomo", **options):
    opt = lowmem.FusedOptimizer(model.named_parameters(), rule, model=model, **{"lr": 1e-2, **options})
    assert opt.placement == ("streamed" if streams else "local")
    return opt


def train(model, opt, batches):
    return [opt.backward(model(**batch).loss).item() for batch in batches]


def weights(model):
    return {name: placements.full_tensor(param).cpu().clone() for name, param in model.named_parameters()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def both(make, batches, steps=train, model=None, **options):
    """Trains local and streamed weights in the same way and compares them. Returns the streaming."""
    results = []
    for streams in (False, True):
        trained = make(streams, **(model or {}))
        opt = optimizer(trained, streams, **options)
        results.append((steps(trained, opt, batches), weights(trained)))
    (losses, local), (streamed_losses, ours) = results
    assert losses == streamed_losses
    assert_equal(local, ours)
    return stream(trained)


@pytest.mark.parametrize(
    ("rule", "policy", "dtype", "checkpointing"),
    pairwise(
        ["adalomo", "adamw", "lomo"], ["immediate", "two_pass", "deferred"],
        [torch.float32, torch.bfloat16], [True, False],
    ),
    ids=str,
)  # fmt: skip
def test_same_bits_as_local_training(make, batches, rule, policy, dtype, checkpointing):
    model = {"dtype": dtype, "checkpointing": checkpointing}
    streaming = both(make, batches, rule=rule, policy=policy, model=model)
    assert streaming.peak == 2 * streaming.units[0].nbytes
    tensors = 3 if rule == "adamw" else 1
    assert streaming.written == len(batches) * LAYERS * tensors * streaming.units[0].nbytes


@pytest.mark.parametrize(
    ("rounding", "state_storage"), in_turn(sorted(roundings()), sorted(state_storages()))[:: 1 if FULL else 2]
)
def test_storages(make, batches, rounding, state_storage):
    model = {"dtype": torch.bfloat16, **IN_GROUPS}
    both(make, batches, rule="adamw", rounding=rounding, state_storage=state_storage, model=model)


RULES = [("adalomo", "int12"), ("adamw", "int10"), ("scaled_adam", None), (torch.optim.RMSprop, None)]
RULES += [(rule.name, None) for rule in lowmem.rules.table() if FULL or rule.name == "adafactor"]
IN_GROUPS = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 3}


@pytest.mark.parametrize(("rule", "weight_format"), RULES, ids=str)
def test_every_rule(make, batches, rule, weight_format, tmp_path):
    """Weights are stored in files, training is resumed, and an evaluation comes in between."""

    def build(streams):
        model = make(False, **IN_GROUPS)
        if weight_format:
            lowmem.quantize_(model, weight_format)
        return placed(model, streams, home=tmp_path)

    def steps(model, opt, batches):
        losses = train(model, opt, batches[:2])
        with torch.no_grad():
            losses.append(model(**batches[0]).loss.item())
        saved = copy.deepcopy(opt.state_dict())
        opt.remove()
        resumed = optimizer(model, opt.placement == "streamed", rule)
        resumed.load_state_dict(saved)
        return losses + train(model, resumed, batches[2:])

    both(build, batches, steps, rule=rule, policy="two_pass" if weight_format else "auto")


def test_tied_weights_and_reentrant_checkpointing(make, batches):
    def steps(model, opt, batches):
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        return train(model, opt, batches)

    both(make, batches, steps, model={"tie_word_embeddings": True})


@pytest.mark.parametrize(("weight_format", "home"), [(None, "files"), ("int12", "host")])
def test_transposed_weights(make, batches, weight_format, home, tmp_path):
    def transposed(streams):
        model = make(False, **IN_GROUPS)
        for layer in model.model.layers:
            weight = layer.mlp.up_proj.weight
            weight.data = weight.data.t().contiguous().t()
        if weight_format:
            lowmem.quantize_(model, weight_format)
        return placed(model, streams, home="host" if home == "host" else tmp_path)

    both(transposed, batches)


def language_model(kind, **options):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(kind, vocab_size=97, use_cache=False, **options)
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    return auto.from_config(config)


MIXTURE = {**SIZES, "intermediate_size": 160, "num_local_experts": 4, "output_router_logits": True}
MODELS = {
    "mixture of experts": lambda: language_model("mixtral", **MIXTURE),
    "dropout": lambda: language_model("gpt2", n_embd=144, n_layer=LAYERS, n_head=4),
    "encoder and decoder": lambda: language_model(
        "t5", d_model=144, d_kv=36, d_ff=288, num_layers=3, num_heads=4, decoder_start_token_id=0
    ),
}


@pytest.mark.parametrize(("name", "checkpointing"), in_turn(MODELS, [True, False]))
def test_models(name, batches, checkpointing):
    def build(streams):
        torch.manual_seed(0)
        model = MODELS[name]().train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return placed(model, streams)

    def steps(model, opt, batches):
        torch.manual_seed(5)
        return train(model, opt, batches)

    streaming = both(build, batches, steps, rule="adamw", policy="immediate")
    assert streaming.peak <= 2 * max(unit.nbytes for unit in streaming.units)


def freeze_layers(model):
    """Frozen layers are fetched for the gradient of their inputs but never written back."""
    model.model.layers[0].requires_grad_(False)
    model.model.layers[2].requires_grad_(False)


def freeze_parts_of_layers(model):
    """The backward still reads frozen weights of a layer after its last trained weight was updated."""
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)


def freeze_all_but_one(model):
    """The backward ends in a layer that is neither the first one nor trained as a whole."""
    model.requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(True)


@pytest.mark.parametrize("freeze", [freeze_layers, freeze_parts_of_layers, freeze_all_but_one])
def test_frozen_weights(make, batches, freeze):
    def frozen(streams):
        model = make(streams)
        freeze(model)
        return model

    streaming = both(frozen, batches, policy="immediate")
    if freeze is freeze_layers:
        assert streaming.written == len(batches) * (LAYERS - 2) * streaming.units[0].nbytes


def test_evaluation_and_generation_between_steps(make, batches):
    def steps(model, opt, batches):
        losses = []
        for batch in batches:
            losses += train(model, opt, [batch])
            model.eval()
            with torch.no_grad():
                losses += [model(**evaluated).loss.item() for evaluated in batches[:2]]
                new = model.generate(batch["input_ids"][:, :3], max_new_tokens=3, do_sample=False)
            losses += new.flatten().tolist()
            model.train()
        return losses

    streaming = both(make, batches, steps)
    assert streaming.peak == 2 * streaming.units[0].nbytes


def test_layers_that_are_left_out(make, batches):
    """The order of layers changes from step to step, so the wrong units are prefetched."""

    def steps(model, opt, batches):
        layers, losses = list(model.model.layers), []
        for order in ([0, 1, 2, 3], [0, 3], [2, 1, 0], [1, 1, 3]):
            model.model.layers = nn.ModuleList(layers[n] for n in order)
            model.config.num_hidden_layers = model.model.config.num_hidden_layers = len(order)
            losses += train(model, opt, batches[:2])
        model.model.layers = nn.ModuleList(layers)
        return losses

    both(make, batches, steps, policy="deferred")


def test_failed_backward(make, batches):
    """A failed forward, a paused backward, or a backward that fails before the first update changes nothing. A plain
    backward can sum and clip micro-batches afterwards."""

    def steps(model, opt, batches):
        losses = train(model, opt, batches[:1])
        for recomputed in (False, True):
            loss = model(**batches[1]).loss if recomputed else None
            failing = model.model.layers[1 if recomputed else 2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                opt.backward(loss if recomputed else model(**batches[1]).loss)
            failing.remove()
        with opt.paused():
            model(**batches[1]).loss.backward()
        with opt.accumulate():
            losses += train(model, opt, batches[2:3])
        model(**batches[3]).loss.backward()
        return losses

    both(make, batches, steps, policy="deferred", clip_norm=0.1)


def test_resume_in_a_new_model(make, batches):
    model = make(True)
    opt = optimizer(model, True, "adamw", policy="immediate")
    train(model, opt, batches[:2])
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = opt.state_dict()
    states["state"] = {n: {name: t.clone() for name, t in state.items()} for n, state in states["state"].items()}
    losses, ours = train(model, opt, batches[2:]), weights(model)
    opt.remove()
    model = make(True)
    opt = optimizer(model, True, "adamw", policy="immediate")
    model.load_state_dict(saved)
    opt.load_state_dict(states)
    assert train(model, opt, batches[2:]) == losses
    assert_equal(weights(model), ours)


def test_weights_are_filled_and_read(make, batches):
    model, other = make(True), make(False)
    train(other, optimizer(other, False), batches)
    train(model, optimizer(model, True), batches[:1])
    for name, param in model.named_parameters():
        placements.fill(param, other.get_parameter(name).detach())
    assert_equal(weights(model), weights(other))
    assert model(**batches[0]).loss.item() == other(**batches[0]).loss.item()


@pytest.mark.parametrize("rule", ["adamw", torch.optim.SGD])
def test_homes_in_files(make, batches, rule, tmp_path):
    streaming = both(make, batches, rule=rule, policy="two_pass", model={"options": {"home": tmp_path}})
    sizes = {
        kind: sum(os.fstat(getattr(unit, kind)._file.fileno()).st_size for unit in streaming.units)
        for kind in ("home", "states")
    }
    assert not [*tmp_path.iterdir()]  # files disappear even if the process is killed
    weights = LAYERS * streaming.units[0].nbytes
    assert weights <= sizes["home"] < weights + LAYERS * 7 * mmap.PAGESIZE
    assert sizes["states"] >= (2 * weights if rule == "adamw" else 0)


def test_traffic_of_a_step(make, batches):
    """Each unit is fetched for forward and for backward, except for the two that are still on the device."""
    model = make(True)
    opt = optimizer(model, True, policy="immediate")
    train(model, opt, batches[:1])
    streaming, unit = stream(model), stream(model).units[0].nbytes
    for _ in range(2):
        fetched, written = streaming.fetched, streaming.written
        train(model, opt, batches[:1])
        assert streaming.fetched - fetched == 2 * (LAYERS - 2) * unit
        assert streaming.written - written == LAYERS * unit


def test_parameters_leave_the_device(make, batches):
    model = make(True)
    opt = optimizer(model, True)
    params = list(model.parameters())
    train(model, opt, batches)
    streaming = stream(model)
    assert [id(param) for param in params] == [id(param) for param in model.parameters()]
    assert all(param.device.type == DEVICE for param in params)
    present = [unit.index for unit in streaming.units if unit.present]
    assert present == [0, 1]
    for unit in streaming.units:
        for param, home in unit.homes.items():
            assert param.untyped_storage().nbytes() == (home.nbytes if unit.present or DEVICE == "cpu" else 0)
            assert home.is_pinned() == (DEVICE != "cpu")


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU does not count what is allocated")
@pytest.mark.parametrize("policy", ["immediate", "two_pass"])
def test_peak_of_a_step(make, batches, policy):
    """The peak is lower than in local training by the size of all units but two."""
    peaks = []
    for streams in (False, True):
        before = torch.cuda.memory_allocated()
        model = make(streams, num_hidden_layers=6)
        opt = optimizer(model, streams, policy=policy)
        train(model, opt, batches[:1])
        torch.cuda.reset_peak_memory_stats()
        train(model, opt, batches[1:3])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        unit = sum(param.nbytes for param in model.model.layers[0].parameters() if param.numel() > SMALL)
        largest = max(param.nbytes for param in model.parameters())
        opt.remove()
        del model, opt
    local, ours = peaks
    assert ours <= local - (6 - 2) * unit + largest


def test_units():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.bias = nn.Linear(130, 130), nn.Parameter(torch.zeros(3))

    class Listed(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self):
            super().__init__()
            self.embedding, self.first, self.second = nn.Embedding(9, 130), Block(), Block()

    listed = find_units(Listed())
    assert [[tuple(param.shape) for param in unit.homes] for unit in listed] == [[(130, 130)]] * 2
    model = nn.Sequential(nn.Linear(300, 300), nn.ModuleList([nn.Linear(200, 200) for _ in range(3)]))
    assert [unit.module for unit in find_units(model)] == list(model[1])
    with pytest.raises(UnsupportedError, match="no repeated layers"):
        find_units(nn.Linear(300, 300))


@pytest.mark.troubleshooting("lowmem.stream finds no repeated layers")
def test_refusals(make, tmp_path):
    model = make(False).cpu()
    with pytest.raises(ConfigError, match=r"Call lowmem\.stream"):
        lowmem.FusedOptimizer(model.named_parameters(), placement="streamed")
    with pytest.raises(UnsupportedError, match="no repeated layers"):
        stream(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))))
    with pytest.raises(ConfigError, match=r"The largest layer is layer 0 \(LlamaDecoderLayer\) with 829,440"):
        stream(model, device_memory=1_000_000)
    monkeypatched = shutil.disk_usage(tmp_path)._replace(free=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: monkeypatched)
        with pytest.raises(ConfigError, match=r"has 1,000 bytes left, but the weights of the layers need 3,317,760"):
            stream(model, home=tmp_path / "full")
    assert all(type(param) is nn.Parameter for param in model.parameters())
    with pytest.raises(UnsupportedError, match="several streamed models"):
        lowmem.FusedOptimizer([param for other in (make(True), make(True)) for param in other.parameters()])


@pytest.mark.parametrize("layers", [2, 4])
def test_layers_stay_within_device_memory(make, batches, layers):
    local = make(False, num_hidden_layers=6)
    unit = find_units(local)[0].nbytes
    total = sum(param.nbytes for param in local.parameters()) + sum(buffer.nbytes for buffer in local.buffers())
    model = {"options": {"device_memory": total - (4 - layers) * unit}, "num_hidden_layers": 6}
    streaming = both(make, batches, rule="adamw", model=model)
    assert len(streaming.units) == (0 if layers == 4 else 6 - layers)


@pytest.mark.parametrize("layer", [0, 3], ids=["on the device", "not on the device"])
def test_a_parameter_is_used_outside_of_its_layer(make, batches, layer):
    model = make(True)
    train(model, optimizer(model, True), batches[:1])
    weight = model.model.layers[layer].mlp.up_proj.weight
    named = rf"'mlp.up_proj.weight' of layer {layer} \(LlamaDecoderLayer\)"
    uses = (weight.clone, weight.norm, lambda: weight + 1, lambda: print(weight), weight.zero_, lambda: weight.data)
    for use in (*uses, lambda: copy.deepcopy(weight)):
        with torch.no_grad(), pytest.raises(StepError, match=named):
            use()
    with pytest.raises(StepError, match="to uses parameter"):
        model.model.layers.to(torch.float64)
    model.to(DEVICE)
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (288, 144)
    assert weight.dtype == torch.float32
    model.model.layers[1].mlp.register_forward_hook(lambda *_: weight.sum())
    with pytest.raises(StepError, match="sum uses parameter"):
        model(**batches[0])


def test_weights_that_two_layers_share_stay(make, batches):
    def tied(streams):
        model = make(False)  # created on the device, then copied to the host
        layers = model.model.layers
        layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
        return placed(model, streams)

    streaming = both(tied, batches)
    homes = [len(unit.homes) for unit in streaming.units]
    assert homes == [6, 7, 6, 7]


def test_small_parameters_stay(make):
    assert homes.RESIDENT >= SMALL  # stacked updates would come after their unit has left the device
    model = make(True)
    stay = {name for name, param in model.named_parameters() if param.numel() <= SMALL}
    assert stay == {name for name, param in model.named_parameters() if param not in stream(model).owners}
