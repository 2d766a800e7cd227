"""PEFT adapters in fused trainers train as in the plain trainer and resume bitwise from complete checkpoints."""

from contextlib import nullcontext

import peft
import pytest
import torch
import torch.distributed as dist
from support.nets import assert_same
from support.products import FULL
from support.ranks import Ranks
from support.trainers import SHARDED, both, joined, losses, quiet, require_sharding
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.peft import MIN_PEFT_VERSION

import lowmem
from lowmem import placements
from lowmem.errors import CheckpointError, UnsupportedError
from lowmem.hf import adapters, weights
from lowmem.trainer import FusedTrainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CAUSAL = {"task_type": "CAUSAL_LM"}
PROMPT = {"num_virtual_tokens": 3, **CAUSAL}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, **CAUSAL}
CONFIGS = {
    "LoRA": lambda: peft.LoraConfig(**LORA),
    "DoRA": lambda: peft.LoraConfig(use_dora=True, **LORA),
    "modules to save": lambda: peft.LoraConfig(modules_to_save=["lm_head", "norm"], **LORA),
    "embedding": lambda: peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "embed_tokens"]}),
    "tokens": lambda: peft.LoraConfig(trainable_token_indices=[1, 5], **LORA),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"], **CAUSAL),
    "prompt tuning": lambda: peft.PromptTuningConfig(**PROMPT),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**PROMPT),
}
KINDS = [*CONFIGS] if FULL else ["LoRA", "modules to save", "embedding", "prompt tuning"]
CONFIGS["p-tuning"] = lambda: peft.PromptEncoderConfig(encoder_hidden_size=8, **PROMPT)


@pytest.fixture
def make(tiny_llama, tmp_path):
    """Returns a factory of trainers of a small Llama with adapters. Keyword arguments are training arguments."""
    samples = [{"input_ids": row, "labels": row} for row in torch.randint(97, (24, 12))]

    def factory(config="LoRA", mixin=True, change=None, model=None, seed=0, **arguments):
        model = model or tiny_llama(attention_dropout=0.1)
        torch.manual_seed(seed)
        if config is not None:
            model = peft.get_peft_model(model, CONFIGS[config]())
        if change is not None:
            change(model)
        folder, optim = (tmp_path / "run", "adamw_torch_fused") if mixin else (tmp_path / "ordinary", "adamw_torch")
        usual = quiet(folder, optim=optim, per_device_train_batch_size=4, learning_rate=3e-2, max_grad_norm=0.0)
        options = {"fused": lowmem.FusedConfig(rule="torch.optim.AdamW", foreach=False)} if mixin else {}
        args = TrainingArguments(**usual | {"weight_decay": 0.1} | arguments)
        cls = FusedTrainer if mixin else Trainer
        return cls(model, args, train_dataset=samples, eval_dataset=samples[:8], **options)

    return factory


SAVES = {"save_strategy": "steps", "save_steps": 2}


def state(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def assert_trained_and_resumed_alike(make, folder):
    """Compares the trainers that `make(mixin)` creates, and returns the resumed one."""
    ordinary, fused = both(make)
    assert losses(fused) == losses(ordinary)
    assert_same(state(fused), state(ordinary))
    resumed = make(True, seed=1)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    assert losses(resumed)[-1] == losses(ordinary)[-1]
    assert_same(state(resumed), state(ordinary))
    return resumed


@pytest.mark.parametrize("config", KINDS)
def test_adapters_train_as_in_the_ordinary_trainer_and_resume_to_the_last_bit(config, make, tmp_path):
    assert_trained_and_resumed_alike(lambda mixin, seed=0: make(config, mixin, seed=seed, **SAVES), tmp_path)


@pytest.mark.cpu_only("its loss falls with the random numbers of a CPU")
def test_the_best_checkpoint_is_loaded_at_the_end(make, tmp_path):
    """With greater_is_better=True and a falling loss, the best checkpoint is not the last one."""
    trainer = make(
        "modules to save", load_best_model_at_end=True, greater_is_better=True, save_total_limit=1,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, learning_rate=0.3, max_steps=3,
    )  # fmt: skip
    states = {}

    class Keep(TrainerCallback):
        def on_evaluate(self, args, progress, control, **_):
            states[progress.global_step] = state(trainer)

    trainer.add_callback(Keep())
    trainer.train()
    scores = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = max(scores, key=scores.get)
    assert best < 3
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / f"checkpoint-{best}")
    assert_same(state(trainer), states[best])
    assert trainer.evaluate()["eval_loss"] == scores[best]


def unfreeze(model):
    """Unfreezes parameters that PEFT does not save: a norm and an untied head."""
    for name, param in model.named_parameters():
        if name.endswith(("model.norm.weight", "lm_head.weight")):
            param.requires_grad_(True)


def test_parameters_that_peft_does_not_save_are_refused_where_they_would_be_saved(make):
    with pytest.raises(UnsupportedError, match=r"2 of .* such as 'base_model.*norm.weight.*modules_to_save"):
        make(change=unfreeze, **SAVES).train()
    make(change=unfreeze).train()


def test_p_tuning_trains_as_in_the_ordinary_trainer_but_is_not_resumed(make):
    """P-tuning computes the prompts with an encoder, whose weights PEFT does not save."""
    ordinary, fused = both(lambda mixin: make("p-tuning", mixin))
    assert losses(fused) == losses(ordinary)
    assert_same(state(fused), state(ordinary))
    with pytest.raises(UnsupportedError, match=r"such as 'prompt_encoder\.default\..*set save_strategy to 'no'"):
        make("p-tuning", **SAVES).train()


def second_adapter(model):
    """Adds a second trained adapter and a frozen one."""
    for name, trained in (("second", True), ("frozen", False)):
        model.add_adapter(name, peft.LoraConfig(**{**LORA, "target_modules": ["up_proj", "q_proj"]}))
        for key, param in model.named_parameters():
            if name in key:
                torch.nn.init.normal_(param, std=0.02)
                param.requires_grad_(trained)
    model.base_model.set_adapter(["default", "second"])


def test_several_adapters_of_one_model(make, tmp_path):
    assert_trained_and_resumed_alike(
        lambda mixin, seed=0: make(mixin=mixin, change=second_adapter, seed=seed, **SAVES), tmp_path
    )
    folder = tmp_path / "run" / "checkpoint-2"
    assert {path.parent.name for path in folder.rglob("adapter_model.safetensors")} == {folder.name, "second", "frozen"}


def test_saved_adapters_load_in_peft_and_merge(make, tmp_path, tiny_llama):
    """The run directory must load too, although its checkpoints are directories with adapters."""
    trainer = make("modules to save", **SAVES)
    trainer.train()
    trainer.save_model()
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "run")
    assert_same(dict(loaded.state_dict()), state(trainer))
    again = make("modules to save", seed=1).model
    weights.load_weights(again, tmp_path / "run")
    assert_same(dict(again.state_dict()), state(trainer))
    ids = torch.randint(97, (2, 8))
    merged = trainer.model.merge_and_unload().cpu().eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, loaded.eval()(ids).logits)


def rename_adapter(folder):
    (folder / "other").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).rename(folder / "other" / name)


MISFITS = {
    "another type": ("IA3", lambda folder: None, "the model has no weight .*lora_A"),
    "another name": ("LoRA", rename_adapter, "saved/adapter_model.safetensors is missing"),
}


@pytest.mark.parametrize(("config", "change_files", "message"), MISFITS.values(), ids=MISFITS)
def test_resuming_with_different_adapters_raises(config, change_files, message, make, tmp_path):
    make().save_model(tmp_path / "saved")
    change_files(tmp_path / "saved")
    other = make(config, seed=1).model
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        weights.load_weights(other, tmp_path / "saved")
    assert_same(dict(other.state_dict()), before)


def test_full_weights_and_adapters_are_distinguished(make, tmp_path, tiny_llama):
    make().save_model(tmp_path / "adapters")
    tiny_llama().save_pretrained(tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"contains PEFT adapters, but the model has none.*get_peft_model"):
        weights.load_weights(tiny_llama(), tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="contains no PEFT adapters, but the model has"):
        weights.load_weights(make().model, tmp_path / "full")


def test_adapters_that_transformers_adds_are_refused_where_they_would_be_saved(make):
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)  # `add_adapter` requires it

    def add(model):
        model.add_adapter(peft.LoraConfig(**LORA))

    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM\.add_adapter.*get_peft_model\(model, config\)"):
        make(None, change=add, **SAVES).train()
    make(None, change=add).train()


def test_prefix_tuning_with_activation_checkpointing_raises(make):
    with pytest.raises(UnsupportedError, match=r"PREFIX_TUNING: .*Set gradient_checkpointing=False"):
        make("prefix tuning", gradient_checkpointing=True).train()


# --- Quantized and sharded base models ----------------------------------------------------------------------------


@pytest.mark.cpu_only("bitsandbytes needs the libraries of CUDA")
@pytest.mark.parametrize("bits", [4, 8] if FULL else [4])
def test_adapters_of_a_quantized_model_train_as_in_the_ordinary_trainer(bits, make, tmp_path):
    pytest.importorskip("bitsandbytes")
    make(None).model.save_pretrained(tmp_path / "base")
    quantization = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})

    def quantized(mixin, seed=0):
        model = LlamaForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=quantization, dtype=torch.float32, device_map={"": "cpu"}
        )
        model = peft.prepare_model_for_kbit_training(model, False)
        return make("modules to save", mixin, model=model, seed=seed, **SAVES)

    assert_trained_and_resumed_alike(quantized, tmp_path)


@pytest.fixture(scope="module")
def two():
    """Returns separate ranks for these tests, because trainers change the environment of ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def train_on_ranks(rank, llama, config, folder, sharding, resume_from=None):
    """Returns the full state and the losses of a run on ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_grad_norm": 0.0}
    saved = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4 // world, "use_cpu": True}
    source = torch.Generator().manual_seed(3)
    samples = [{"input_ids": row, "labels": row} for row in torch.randint(97, (24, 12), generator=source)]
    with joined(rank) if world > 1 else nullcontext():
        args = TrainingArguments(**quiet(folder, **evaluated, **saved, **SHARDED[sharding]))
        torch.manual_seed(0)
        base = LlamaForCausalLM(llama)
        torch.manual_seed(int(resume_from is not None))
        model = peft.get_peft_model(base, CONFIGS[config]())
        trainer = FusedTrainer(model, args, train_dataset=samples, eval_dataset=samples[:8])
        trainer.train(resume_from)
        trainer.save_model(str(folder / "saved"))
        full = model.state_dict(keep_vars=True).items()
        return {name: placements.full_tensor(tensor).detach().clone() for name, tensor in full}, losses(trainer)


@pytest.mark.parametrize("sharding", SHARDED if FULL else ["fsdp2"])
def test_adapters_on_ranks_train_and_resume_as_on_one_device(sharding, two, tmp_path, tiny_llama):
    require_sharding(sharding)
    llama = tiny_llama().config
    expected, expected_losses = train_on_ranks(0, llama, "IA3", tmp_path / "one", "replicated")
    (actual, actual_losses), _ = two.run(train_on_ranks, llama, "IA3", tmp_path / "two", sharding)
    assert actual_losses == pytest.approx(expected_losses, rel=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    (resumed, _), _ = two.run(
        train_on_ranks, llama, "IA3", tmp_path / "two", sharding, str(tmp_path / "two" / "checkpoint-1")
    )
    assert_same(resumed, actual)
    loaded = peft.get_peft_model(LlamaForCausalLM(llama), CONFIGS["IA3"]())
    weights.load_weights(loaded, tmp_path / "two" / "saved")
    for name, tensor in loaded.named_parameters():
        if tensor.requires_grad:
            assert torch.equal(tensor, actual[name]), name


def test_8_bit_weights_under_fsdp_raise(make):
    trainer = make()
    trainer.model.get_base_model().is_loaded_in_8bit = True
    trainer.args.fsdp = True
    with pytest.raises(UnsupportedError, match=r"load_in_8bit: .*Use load_in_4bit, or deepspeed"):
        trainer.train()


def test_prompt_tuning_of_a_sharded_model_raises(make):
    trainer = make("prompt tuning")
    with pytest.raises(UnsupportedError, match="PROMPT_TUNING: PEFT computes the prompts that it saves"):
        adapters.check(trainer.model, trainer.args, sharded=True, saves=False)
