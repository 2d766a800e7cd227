"""Adapters of PEFT in fused trainers: the same training, and checkpoints that are complete and resume bit for bit."""

import shutil

import peft
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import lowmem
from lowmem.errors import CheckpointError, UnsupportedError
from lowmem.hf import checkpoint, weights
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
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], save_projection=False, **CAUSAL),
    "SHiRA": lambda: peft.ShiraConfig(r=2, target_modules=["q_proj"], **CAUSAL),
    "layer norms": lambda: peft.LNTuningConfig(**CAUSAL),
    "prompt tuning": lambda: peft.PromptTuningConfig(**PROMPT),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**PROMPT),
    "projected prefix": lambda: peft.PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=8, **PROMPT),
    "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=8, **PROMPT),
    "p-tuning, LSTM": lambda: peft.PromptEncoderConfig(
        encoder_reparameterization_type="LSTM", encoder_hidden_size=8, encoder_dropout=0.2, **PROMPT
    ),
}  # fmt: skip


@pytest.fixture
def make(tiny_llama, tmp_path):
    """A factory of trainers of a small Llama with adapters; keyword arguments are training arguments."""
    samples = [{"input_ids": row, "labels": row} for row in torch.randint(97, (24, 12))]

    def factory(config="LoRA", cls=FusedTrainer, change=None, run="run", seed=0, **arguments):
        model = tiny_llama(attention_dropout=0.1)
        torch.manual_seed(seed)
        if config is not None:
            model = peft.get_peft_model(model, CONFIGS[config]())
        if change is not None:
            change(model)
        defaults = {
            "output_dir": str(tmp_path / run), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-2,
            "logging_steps": 1, "save_strategy": "no", "max_grad_norm": 0.0, "report_to": "none", "disable_tqdm": True,
            "optim": "adamw_torch" if cls is Trainer else "adamw_torch_fused", "dataloader_pin_memory": False,
            "weight_decay": 0.1,
        }  # fmt: skip
        options = {} if cls is Trainer else {"fused": lowmem.FusedConfig(rule="torch.optim.AdamW", hyper=SINGLE)}
        arguments = TrainingArguments(**{**defaults, **arguments})
        return cls(model, arguments, train_dataset=samples, eval_dataset=samples[:8], **options)

    return factory


SINGLE = {"foreach": False}
SAVES = {"save_strategy": "steps", "save_steps": 2}


def state(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("config", CONFIGS)
def test_adapters_train_as_in_the_ordinary_trainer_and_resume_to_the_last_bit(config, make, tmp_path):
    ordinary = make(config, Trainer, run="ordinary", **SAVES)
    ordinary.train()
    fused = make(config, **SAVES)
    fused.train()
    assert losses(fused) == losses(ordinary)
    assert_same(state(fused), state(ordinary))
    resumed = make(config, seed=1, **SAVES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert losses(resumed)[-2:] == losses(ordinary)[-2:]
    assert_same(state(resumed), state(ordinary))


@pytest.mark.parametrize("config", ["LoRA", "modules to save", "prompt tuning", "p-tuning"])
def test_the_best_checkpoint_is_loaded_at_the_end(config, make, tmp_path):
    """The best of a metric that falls, so that it is not the last."""
    trainer = make(
        config, load_best_model_at_end=True, greater_is_better=True, save_total_limit=1, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=1, learning_rate=0.3, max_steps=3,
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
    """Parameters that PEFT does not save: a norm, and a head that is tied to nothing."""
    for name, param in model.named_parameters():
        if name.endswith(("model.norm.weight", "lm_head.weight")):
            param.requires_grad_(True)


def test_trained_parameters_of_the_base_are_saved_beside_the_adapters(make, tmp_path, caplog, tiny_llama):
    ordinary = make(cls=Trainer, change=unfreeze, run="ordinary")
    ordinary.train()
    make(change=unfreeze, **SAVES).train()
    assert "PEFT does not save 2 trained parameters, such as 'base_model.model.model.norm.weight'" in caplog.text
    resumed = make(change=unfreeze, seed=1, **SAVES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same(state(resumed), state(ordinary))
    folder = tmp_path / "run" / "checkpoint-4"
    loaded = peft.PeftModel.from_pretrained(tiny_llama(attention_dropout=0.1), folder, is_trainable=True)
    unfreeze(loaded)
    weights.load_weights(loaded, folder)
    assert_same(dict(loaded.state_dict()), state(resumed))


def second_adapter(model):
    """Another adapter that is trained too, and one that is not."""
    for name, trained in (("second", True), ("frozen", False)):
        model.add_adapter(name, peft.LoraConfig(**{**LORA, "target_modules": ["up_proj", "q_proj"]}))
        for key, param in model.named_parameters():
            if name in key:
                torch.nn.init.normal_(param, std=0.02)
                param.requires_grad_(trained)
    model.base_model.set_adapter(["default", "second"])


def test_several_adapters_of_one_model(make, tmp_path):
    ordinary = make(cls=Trainer, change=second_adapter, run="ordinary")
    ordinary.train()
    make(change=second_adapter, **SAVES).train()
    folder = tmp_path / "run" / "checkpoint-2"
    assert {path.parent.name for path in folder.rglob("adapter_model.safetensors")} == {folder.name, "second", "frozen"}
    resumed = make(change=second_adapter, seed=1, **SAVES)
    resumed.train(resume_from_checkpoint=str(folder))
    assert_same(state(resumed), state(ordinary))


def test_what_is_saved_is_loaded_by_peft_and_merges(make, tmp_path, tiny_llama):
    trainer = make("modules to save")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "saved")
    assert_same(dict(loaded.state_dict()), state(trainer))
    ids = torch.randint(97, (2, 8))
    merged = trainer.model.merge_and_unload().eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, loaded.eval()(ids).logits)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


DAMAGE = {
    "adapter cut short": (lambda f: truncate(f / "adapter_model.safetensors"), "model.safetensors is cut short"),
    "adapter missing": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
    "configuration missing": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    "configuration half": (lambda f: truncate(f / "adapter_config.json"), "adapter_config.json is damaged"),
    "norms cut short": (lambda f: truncate(f / "trained.safetensors"), "trained.safetensors is cut short"),
    "states missing": (lambda f: (f / "optimizer.safetensors").unlink(), "has no optimizer.safetensors"),
}  # fmt: skip


def test_damaged_checkpoints_are_skipped(make, tmp_path, caplog):
    trainer = make(change=unfreeze, save_strategy="steps", save_steps=1, max_steps=3)
    trainer.train()
    run = tmp_path / "run"
    for damage, message in DAMAGE.values():
        shutil.copytree(run / "checkpoint-3", tmp_path / "copy")
        damage(run / "checkpoint-3")
        last, (reason,) = checkpoint.find_last(run)
        assert last == run / "checkpoint-2"
        assert message in reason
        shutil.rmtree(run / "checkpoint-3")
        shutil.move(tmp_path / "copy", run / "checkpoint-3")
    assert checkpoint.find_last(run) == (run / "checkpoint-3", [])


def rename_adapter(folder):
    (folder / "other").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).rename(folder / "other" / name)


MISFITS = {
    "no norms": (
        "LoRA",
        lambda f: (f / "trained.safetensors").unlink(),
        unfreeze,
        r"trained\.safetensors is missing, which has .*norm",
    ),
    "norms not trained": (
        "LoRA",
        lambda f: None,
        None,
        r"trained\.safetensors has parameters beside the adapters that are frozen",
    ),
    "another type": ("IA3", lambda f: None, unfreeze, "4 weights are missing, such as .*ia3_l"),
    "another rank": ("DoRA", lambda f: None, unfreeze, "weights are missing, such as .*lora_magnitude_vector"),
    "another name": ("LoRA", rename_adapter, unfreeze, "adapter_model.safetensors is missing, which has .*lora_A"),
}


@pytest.mark.parametrize(("config", "change_files", "change_model", "message"), MISFITS.values(), ids=MISFITS)
def test_a_checkpoint_of_other_adapters_is_refused(config, change_files, change_model, message, make, tmp_path):
    trainer = make(change=unfreeze)
    trainer.save_model(tmp_path / "saved")
    change_files(tmp_path / "saved")
    other = make(config, change=change_model, seed=1).model
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        weights.load_weights(other, tmp_path / "saved")
    assert_same(dict(other.state_dict()), before)


def test_full_weights_and_adapters_are_told_apart(make, tmp_path, tiny_llama):
    make().save_model(tmp_path / "adapters")
    tiny_llama().save_pretrained(tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"has PEFT adapters, and the model has none.*get_peft_model"):
        weights.load_weights(tiny_llama(), tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="has no PEFT adapters, and the model has"):
        weights.load_weights(make().model, tmp_path / "full")


def test_adapters_that_transformers_adds_are_refused_where_they_would_be_saved(make):
    def add(model):
        model.add_adapter(peft.LoraConfig(**LORA))

    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM\.add_adapter.*get_peft_model\(model, config\)"):
        make(None, change=add, **SAVES).train()
    make(None, change=add).train()
