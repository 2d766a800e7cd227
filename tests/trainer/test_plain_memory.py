"""With default options, a trainer with the mixin needs no more memory in any phase than the trainer without it.

The model is large enough that weights, gradients and optimizer states take most of the memory.
"""

import weakref

import pytest
import torch
import transformers as hf
from support import trainers as builders
from support.products import FULL
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
PHASES = {"evaluate": "evaluation", "_save_checkpoint": "saving"}
SLACK = 1 << 16  # counters, norms and other small tensors


class Peaks(TorchDispatchMode):
    """Measures peak bytes per phase, over tensors returned by operations and those passed to `count`."""

    def __init__(self):
        super().__init__()
        self.live, self.phase, self.most = 0, "training", {}
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def count(self, tensors):
        for storage in (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta):
            if storage not in self._storages:
                self._storages[storage] = storage.nbytes()
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes()).atexit = False

    def during(self, phase, call):
        """Wraps a function so that it runs as a separate phase."""

        def run(*args, **keywords):
            before, self.phase = self.phase, phase
            self._change(0)
            try:
                return call(*args, **keywords)
            finally:
                self.phase = before

        return run

    def _change(self, nbytes):
        self.live += nbytes
        self.most[self.phase] = max(self.most.get(self.phase, 0), self.live)


def model(row):
    torch.manual_seed(0)
    head = hf.LlamaForSequenceClassification if row == "Reward" else hf.LlamaForCausalLM
    return head(hf.LlamaConfig(**SIZES, vocab_size=2048, num_labels=1, **builders.special())).bfloat16()


def peaks(row, mixin, folder):
    """Runs two steps with the trainer's defaults, each with an evaluation and a checkpoint, and returns the peaks."""
    builders.require(row)
    cls, config, options, keywords = builders.ROWS[row]()
    keywords |= {"model": model(row), "eval_dataset": keywords["train_dataset"].select(range(4))}
    if "ref_model" in keywords:
        keywords["ref_model"] = model(row)
    elif row in ("GRPO", "RLOO"):  # the trainer loads the reference model from here
        keywords["model"].save_pretrained(folder / "model")
        keywords["model"].config._name_or_path = str(folder / "model")
    often = {
        f"{what}_{key}": value for what in ("eval", "save") for key, value in (("strategy", "steps"), ("steps", 1))
    }
    args = config(**builders.quiet(folder, max_steps=2, **often) | options)
    trainer = (builders.fused(cls) if mixin else cls)(args=args, **keywords)
    counted = Peaks()
    for each in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        counted.count((*each.parameters(), *each.buffers()))
    for name, phase in PHASES.items():
        setattr(trainer, name, counted.during(phase, getattr(trainer, name)))
    with counted:
        trainer.train()
    return counted.most


@pytest.mark.cpu_only("offloaded gradients are counted too")
@pytest.mark.parametrize("row", ["GRPO", *(["SFT", "DPO", "KTO", "Reward", "RLOO"] if FULL else [])])
def test_defaults_take_at_most_the_memory_of_the_plain_trainer(row, tmp_path, monkeypatch):
    builders.tokenizer()  # trains the tokenizer on short sentences
    monkeypatch.setattr(builders, "SENTENCES", [" ".join([sentence] * 5) for sentence in builders.SENTENCES])
    plain, fused = (peaks(row, mixin, tmp_path / str(mixin)) for mixin in (False, True))
    assert fused.keys() == plain.keys() == {"training", *PHASES.values()}
    for phase, nbytes in plain.items():
        assert fused[phase] <= nbytes + SLACK, phase
