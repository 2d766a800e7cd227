"""Trainers load models onto one device, in the format in which the weights are trained."""

from weakref import ref

import accelerate
import pytest
import torch
import transformers as hf
from support import trainers as builders
from support.trainers import build

from lowmem import FusedConfig
from lowmem.errors import UnsupportedError
from lowmem.options import LayersConfig
from lowmem.tiles.quantized import QuantizedWeight, has_quantized_weights, tensors_of

GPUS = torch.cuda.device_count()
ONE_DEVICE = pytest.mark.skipif(GPUS > 1, reason="one process trains on one GPU")
NEEDS_A_GPU = pytest.mark.skipif(GPUS < 1, reason="needs a GPU, which may be a simulated one (LOWMEM_SIMGPU=1)")
NEEDS_TWO = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs, which may be simulated ones (LOWMEM_SIMGPU=2)")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Creates a folder with a model, two thirds of whose weights can be quantized."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES, vocab_size=len(builders.tokenizer()), **builders.special())
    hf.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    builders.tokenizer().save_pretrained(folder)
    return folder


def offloaded(folder, way, tmp_path):
    """Returns a model that Accelerate moves to its device one part at a time."""
    if way == "cpu_offload":
        return accelerate.cpu_offload(hf.AutoModelForCausalLM.from_pretrained(folder))
    places = {"model": "cpu", "lm_head": "disk"}
    return hf.AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "disk")


@pytest.mark.parametrize(("way", "words"), [("device_map", "cpu"), ("cpu_offload", "cpu_offload")])
def test_an_offloaded_model_raises(make, folder, way, words, tmp_path):
    with pytest.raises(UnsupportedError, match=rf"split or offloaded \(.*{words}.*device_map=None"):
        make(model=offloaded(folder, way, tmp_path))


@ONE_DEVICE
@pytest.mark.parametrize("row", ["SFT", "Reward"])
def test_a_model_offloaded_by_trl_arguments_raises(row, folder, tmp_path):
    head = "score" if row == "Reward" else "lm_head"
    options = {"device_map": {"model": "cpu", head: "disk"}, "offload_folder": str(tmp_path / "disk")}
    with pytest.raises(UnsupportedError, match=r"model_init_kwargs=\{'device_map': None\}"):
        try:
            build(row, tmp_path, True, {"model": str(folder)}, model_init_kwargs=options)
        except AttributeError as error:
            if "functools.partial" not in str(error):
                raise
            pytest.skip("this version of TRL itself fails with a model that Accelerate has offloaded")


@NEEDS_A_GPU
@ONE_DEVICE
@pytest.mark.parametrize("row", ["SFT", "DPO"])
def test_weights_are_quantized_before_they_get_to_the_gpu(row, folder, tmp_path, monkeypatch):
    """Weights are quantized one at a time, so neither the GPU nor the host stores all of them in two formats."""
    on_host = []

    def quantized(weight, quantize=QuantizedWeight.of, **options):
        new = quantize(weight, **options)
        on_host.append(ref(new.parts[0]))
        assert sum(reference() is not None and reference().device.type == "cpu" for reference in on_host) == 1
        return new

    monkeypatch.setattr(QuantizedWeight, "of", quantized)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused = FusedConfig(rule="lomo", weight_format="int8")
    keywords = {"model": str(folder), "fused": fused, "layers": LayersConfig()}
    options = {"optim": "adamw_torch_fused", "weight_decay": 0.0, "model_init_kwargs": {"dtype": "bfloat16"}}
    trainer = build(row, tmp_path, True, keywords, **options)
    assert has_quantized_weights(trainer.model)
    parts = [part for param in trainer.model.parameters() for part in tensors_of(param)]
    assert {part.device.type for part in parts} == {"cuda"}
    others = [trainer.ref_model] if row == "DPO" else []
    expected = sum(part.nbytes for part in [*parts, *(param for other in others for param in other.parameters())])
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * expected


@NEEDS_A_GPU
@ONE_DEVICE
@pytest.mark.parametrize("row", ["SFT", "DPO"])
def test_weights_in_another_dtype_are_converted_on_the_gpu(row, folder, tmp_path, monkeypatch):
    """The host never stores all of them in the new dtype."""
    loaded = []

    def move(trainer, model, device):
        loaded.append({(param.device.type, param.dtype) for param in model.parameters()})

    monkeypatch.setattr(hf.Trainer, "_move_model_to_device", move)
    trainer = build(row, tmp_path, True, {"model": str(folder)}, model_init_kwargs={"dtype": "float32"})
    others = [trainer.ref_model] if row == "DPO" else []
    loaded += [{(param.device.type, param.dtype) for param in other.parameters()} for other in others]
    assert loaded == [{("cuda", torch.float32)}] * (1 + len(others))


@NEEDS_TWO
@pytest.mark.parametrize("row", ["SFT", "GRPO"])
def test_a_process_with_two_gpus_raises_and_suggests_one(row, folder, tmp_path):
    with pytest.raises(UnsupportedError, match=r"sees 2 GPUs.*CUDA_VISIBLE_DEVICES=0"):
        build(row, tmp_path, True, {"model": str(folder)})
