"""Weights that are saved one parameter at a time give the files of `save_pretrained` and load bitwise."""

import filecmp
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.nets import assert_same
from support.ranks import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from lowmem import files, placements
from lowmem.errors import CheckpointError
from lowmem.hf import weights

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MODELS = {
    "tied llama": {"model_type": "llama", "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 12, **EXPERTS},
    # some layers are dense and some have experts; a buffer is among the weights
    "deepseek_v3": {
        "model_type": "deepseek_v3", "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        **EXPERTS, "num_key_value_heads": 4,
    },
    # three weights are combined into one tensor in files
    "nomic_bert": {"model_type": "nomic_bert"},
    # rows are interleaved in files, and since transformers 5.24 the head has more rows there
    "inkling2": {
        "model_type": "inkling2_text", "n_routed_experts": 4, "swa_num_attention_heads": 4, "swa_head_dim": 8,
        "swa_num_key_value_heads": 2, "d_rel": 4, "unpadded_vocab_size": 60, **EXPERTS,
    },
}  # fmt: skip
MODELS = {kind: model for kind, model in MODELS.items() if model["model_type"] in CONFIG_MAPPING}  # of this version
FEW = MODELS.keys() & {"tied llama", "mixtral", "inkling2"}


def new(kind, seed=0, dtype=torch.bfloat16, **changed):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**SIZES, **MODELS[kind], **changed})
    auto = AutoModel if kind == "nomic_bert" else AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 0.1)
    return model


class FakePlacement:
    """Replaces `lowmem.placements`. Stores the values of parameters, which are empty, and counts full tensors."""

    def __init__(self, model):
        self._values = {param: param.detach().clone() for param in model.parameters()}
        self._alive = []
        self.shapes = []
        self.most_alive = 0
        for param in model.parameters():
            param.data = torch.empty(0, dtype=param.dtype)

    def shape_of(self, tensor):
        return tuple(self._values.get(tensor, tensor).shape)

    def full_tensor(self, tensor):
        return self._count(tensor, self._values.get(tensor, tensor).clone())

    def fill(self, tensor, full):
        assert tuple(full.shape) == self.shape_of(tensor)
        self._values.get(tensor, tensor).copy_(self._count(tensor, full))

    def _count(self, tensor, full):
        self.shapes.append(self.shape_of(tensor))
        self._alive = [storage for storage in self._alive if not storage.expired()]
        self._alive.append(StorageWeakRef(full.untyped_storage()))
        self.most_alive = max(self.most_alive, len(self._alive))
        return full

    def restore(self, model):
        for param in model.parameters():
            param.data = self._values[param]


@pytest.fixture
def shard(monkeypatch):
    """Empties a model's parameters. `save` and `load` find the values in the returned `FakePlacement`."""

    def replace(model):
        placement = FakePlacement(model)
        monkeypatch.setattr(weights, "placements", placement)
        return placement

    return replace


save, load = weights.save_weights, weights.load_weights


def assert_same_files(folder, other):
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(folder, other, names, shallow=False)[0] == names


@pytest.mark.parametrize("kind", MODELS)
def test_save_weights_writes_the_files_of_save_pretrained(kind, tmp_path):
    """The models have several files each. The test of sharded models covers single files."""
    model = new(kind)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list(tmp_path.glob("theirs/*.safetensors"))) > 1
    save(model, tmp_path / "ours", max_shard_size="20KB")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_loaded_by_transformers_is_the_same(kind, tmp_path):
    model = new(kind, dtype=torch.float32)
    save(model, tmp_path / "first", max_shard_size="40KB")
    again = type(model).from_pretrained(tmp_path / "first").eval()
    loaded = new(kind, seed=1, dtype=torch.float32)
    load(loaded, tmp_path / "first")
    for other in (again, loaded):
        assert_same(model.state_dict(), other.state_dict())
    ids = torch.randint(3, 64, (2, 8))
    assert torch.equal(model(input_ids=ids)[0], again(input_ids=ids)[0])
    again.save_pretrained(tmp_path / "theirs")
    save(again, tmp_path / "ours")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")


def test_padding_in_files_belongs_to_no_weight(tmp_path, monkeypatch):
    """In transformers 5.24, the heads of some models have more rows in files."""

    def padded(model, tensors):
        return {name: torch.cat([tensor, torch.zeros_like(tensor[:1])]) for name, tensor in tensors.items()}

    monkeypatch.setattr(weights, "revert_weight_conversion", padded)
    model, loaded = new("tied llama"), new("tied llama", seed=1)
    save(model, tmp_path)
    load(loaded, tmp_path)
    assert_same(model.state_dict(), loaded.state_dict())


@pytest.mark.parametrize("kind", MODELS)
def test_sharded_models_are_saved_and_loaded_with_one_full_weight_at_a_time(kind, tmp_path, shard):
    model = new(kind)
    model.save_pretrained(tmp_path / "theirs")
    saved = shard(model)
    save(model, tmp_path / "ours")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")

    other = new(kind, seed=1)
    loaded = shard(other)
    load(other, tmp_path / "ours")
    saved.restore(model)
    loaded.restore(other)
    assert_same(model.state_dict(), other.state_dict())
    assert saved.most_alive == loaded.most_alive == (3 if kind == "nomic_bert" else 1)


def test_experts_in_files_are_views_of_the_full_weight():
    pytest.importorskip("transformers.core_model_loading", reason="this transformers converts nothing")
    layout = weights._FileLayout(new("qwen3_moe"))
    converted = [group for group in layout.groups if group.converted]
    assert converted
    for group in converted:
        (experts,) = (torch.empty(weight.shape) for weight in group.weights.values())
        for name, expert in layout.convert(group, [experts]).items():
            assert expert.shape == layout.tensors[name].shape
            assert expert.untyped_storage().data_ptr() == experts.data_ptr()


def test_conversions_that_read_shapes_of_the_model_get_logical_ones(tmp_path, shard):
    pytest.importorskip("transformers.core_model_loading", reason="this transformers converts nothing")
    text = {**SIZES, **EXPERTS, "num_experts": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path / "theirs")
    shard(model)
    save(model, tmp_path / "ours")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")


def test_a_rank_that_does_not_write_gathers_in_the_same_order(tmp_path, shard):
    shapes = []
    for write in (True, False):
        model = new("mixtral")
        placement = shard(model)
        folder = tmp_path / str(write)
        save(model, folder, write=write)
        assert folder.exists() == write
        assert placement.most_alive == 1
        shapes.append(placement.shapes)
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == len(list(model.parameters()))


def test_rows_are_written_in_chunks_whatever_their_strides(tmp_path, monkeypatch):
    model = new("mixtral")
    model.save_pretrained(tmp_path / "theirs")
    monkeypatch.setattr(files, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(
        weights.placements, "full_tensor", lambda t: t.detach().mT.contiguous().mT if t.ndim > 1 else t.detach()
    )
    save(model, tmp_path / "ours")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")


class Plain(nn.Module):
    """A module with buffers, a scalar, an empty weight, several dtypes, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.first = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.second = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.second.weight = self.first.weight
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("flags", torch.rand(3) > 0.5)
        self.norm.running_mean.normal_()
        self.norm.num_batches_tracked.fill_(3)


def test_other_modules_are_saved_as_weights_only(tmp_path):
    module, other = Plain(), Plain()
    save(module, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    (tmp_path / "theirs").mkdir()
    once = {name: tensor for name, tensor in module.state_dict().items() if name != "second.weight"}
    save_file(once, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    assert filecmp.cmp(tmp_path / "model.safetensors", tmp_path / "theirs" / "model.safetensors", shallow=False)
    load(other, tmp_path)
    assert_same(module.state_dict(), other.state_dict())


def mapped():
    """Returns the resident bytes of mapped files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_pages_of_a_file_do_not_stay_resident(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK_BYTES", 16 << 20)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))  # 16 MiB each
    save(model, tmp_path)
    before, most = mapped(), []
    load(model, tmp_path)  # so that later calls do not import anything
    monkeypatch.setattr(weights.placements, "fill", lambda *_, fill=placements.fill: (fill(*_), most.append(mapped())))
    load(model, tmp_path)
    assert len(most) == 8
    assert max(most) - before <= (3 * 16 + 8) << 20  # the tensor, two tensors of the mapping, and a margin


def rewritten(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


EXPERT = "model.layers.1.mlp.experts.2.gate_proj.weight"


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def without(name):
    return lambda folder: rewritten(folder, lambda tensors: tensors.pop(name))


def with_ones(name, *shape):
    return lambda folder: rewritten(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))


FILE, NORM = "model.safetensors", "model.norm.weight"


def without_a_shard(folder):
    new("qwen3_moe").save_pretrained(folder, max_shard_size="20KB")
    (folder / FILE).unlink()
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


DAMAGE = {
    "a shard missing": (without_a_shard, r"model-00002-of-\d+\.safetensors is missing"),
    "no files": (lambda folder: [path.unlink() for path in folder.iterdir()], r"model\.safetensors is missing"),
    "cut short": (cut_short, r"model\.safetensors is damaged or truncated"),
    "an expert missing": (without(EXPERT), f"1 weights are missing, such as '{EXPERT}'"),
    "one unknown": (with_ones("head.bias", 3), "no weight 'head.bias'. The checkpoint belongs to another model"),
    "an expert of another shape": (with_ones(EXPERT, 16, 31), rf"{EXPERT}' has shape \[16, 31\] in the checkpoint"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_mismatched_weights_raise_and_are_not_copied(damage, message, tmp_path):
    new("qwen3_moe").save_pretrained(tmp_path)
    damage(tmp_path)
    other = new("qwen3_moe", seed=1)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(other, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert_same(new("qwen3_moe", seed=1).state_dict(), other.state_dict())


def test_a_conversion_that_loading_did_not_use_is_not_undone(tmp_path):
    """Under ZeRO-3, transformers keeps all conversions that might apply, such as old names of BERT's weights."""
    mapping = pytest.importorskip("transformers.conversion_mapping", reason="this transformers converts nothing")
    config = AutoConfig.for_model("bert", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "theirs")
    model._weight_conversions = mapping.get_model_conversion_mapping(model)
    save(model, tmp_path / "ours")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")


def fully_sharded(kind, seed):
    model = new(kind, seed)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def save_and_load(rank, kind, folder):
    model = fully_sharded(kind, seed=0)
    save(model, folder, write=rank == 0)
    dist.barrier()
    other = fully_sharded(kind, seed=1)
    load(other, folder)
    return {name: placements.full_tensor(tensor) for name, tensor in other.state_dict().items()}


def test_ranks_with_shards_write_the_files_of_one_device(tmp_path):
    ranks = Ranks(2)
    try:
        for kind in FEW:
            model = new(kind)
            model.save_pretrained(tmp_path / kind / "theirs")
            for loaded in ranks.run(save_and_load, kind, tmp_path / kind / "ours"):
                assert_same(model.state_dict(), loaded)
            assert_same_files(tmp_path / kind / "theirs", tmp_path / kind / "ours")
    finally:
        ranks.stop()
