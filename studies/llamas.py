"""The docstrings task: a Llama pretrained on code of the standard library ("old") learns its docstrings ("new")."""

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.measurement import llama
from scripts.make_model import train_tokenizer
from studies import training
from studies.text import modules
from studies.training import Task, autocast, batches, schedule, with_bfloat16_states

# Name → number of layers, hidden size, number of updates in pretraining, and learning rate in pretraining
SIZES = {"1M": (4, 128, 1500, 4e-3), "5M": (6, 256, 800, 2e-3), "20M": (6, 512, 500, 1e-3)}
PRETRAINING_ROWS = 8  # per update


@functools.cache
def texts(length: int, vocab: int, held_out_rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns training rows and held-out rows: token ids [rows, length] of code ("old") and of docstrings ("new")."""
    pairs = list(modules())
    random.Random(0).shuffle(pairs)
    held_out = len(pairs) // 12
    tokenizer = train_tokenizer((text for pair in pairs[held_out:] for text in pair), vocab)

    def rows(texts: list[str]) -> Tensor:
        ids = torch.tensor([token for ids in tokenizer([text for text in texts if text])["input_ids"] for token in ids])
        rows = ids[: len(ids) // length * length].view(-1, length)
        return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]

    columns = dict(zip(("old", "new"), zip(*pairs, strict=True), strict=True))
    trained = {name: rows(texts[held_out:]) for name, texts in columns.items()}
    return trained, {name: rows(texts[:held_out])[:held_out_rows] for name, texts in columns.items()}


@dataclass(frozen=True)
class LlamaTask(Task):
    """Trains a pretrained Llama on docstrings.

    Attributes:
        size: a key of `SIZES`.
        held_out: number of held-out rows of each text.
    """

    size: str = "1M"
    length: int = 128
    vocab: int = 2048
    held_out: int = 64

    @property
    def texts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return texts(self.length, self.vocab, self.held_out)

    def untrained(self) -> Any:
        """Returns a Llama with random float32 weights and bfloat16 hidden states."""
        layers, hidden, *_ = SIZES[self.size]
        options = {
            "max_position_embeddings": self.length, "tie_word_embeddings": True, "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 64, "attn_implementation": "eager",  # faster than sdpa at these sizes
        }  # fmt: skip
        model = llama(layers, hidden, hidden * 3, self.vocab, "float32", checkpointing=False, **options)
        with_bfloat16_states(model.get_input_embeddings())
        return model

    def model(self) -> Any:
        model = self.untrained()
        model.load_state_dict(self.weights(), strict=False)  # the head is tied to the embedding
        return model

    def rows(self) -> Tensor:
        return self.texts[0]["new"]

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        return model(input_ids=batch, labels=batch).loss

    def scores(self, model: Any) -> dict[str, float]:
        """Returns `loss`: nats per token of held-out docstrings, and `old`: nats per token of held-out code."""
        losses = {
            name: sum(self.loss(model, part).item() * len(part) for part in rows.split(32)) / len(rows)
            for name, rows in self.texts[1].items()
        }
        return {"loss": losses["new"], "old": losses["old"]}

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights after pretraining, rounded to bfloat16 and cached in `WORK`."""
        path = training.WORK / f"{self.size}-{self.vocab}-{self.texts[0]['old'].sum()}.pt"
        return torch.load(training.once(path, lambda file: torch.save(self._pretrained(), file)))

    def _pretrained(self) -> dict[str, Tensor]:
        """Trains on code with torch's AdamW."""
        _, _, updates, lr = SIZES[self.size]
        model = self.untrained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
        rates = schedule(optimizer, updates)
        for _, rows in zip(range(updates), batches(self.texts[0]["old"], PRETRAINING_ROWS, 0), strict=False):
            with autocast():
                loss = self.loss(model, rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
        return {name: param.detach().bfloat16() for name, param in model.named_parameters()}
