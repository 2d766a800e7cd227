"""Reinforcement learning with a reward function: GRPO with TRL's trainer.

python examples/grpo.py MODEL questions.jsonl --output_dir runs/grpo
"""

import argparse
from typing import Any

import torch
import trl
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem import FusedConfig
from lowmem.trainer import FusedTrainerMixin


class FusedGRPOTrainer(FusedTrainerMixin, trl.GRPOTrainer): ...


def has_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Returns 1 for a completion that contains the `answer` of its row, minus up to 0.1 for its length."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(right in text) - min(len(text) / 10_000, 0.1) for text, right in zip(texts, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a model directory, or a name on the Hub")
    parser.add_argument("data", help='JSON lines such as {"prompt": [{"role": "user", ...}], "answer": "..."}')
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--max_completion_length", type=int, default=256)
    args = parser.parse_args()

    trainer = FusedGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16),
        reward_funcs=has_answer,
        args=trl.GRPOConfig(
            output_dir=args.output_dir,
            learning_rate=args.learning_rate,  # for AdaLomo; with AdamW it would be 1e-6
            max_steps=args.steps,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=args.max_completion_length,
            beta=0.0,  # no reference model
            max_grad_norm=0,
            bf16=False,  # no autocast: the weights are bfloat16 already
            report_to="none",
        ),
        fused=FusedConfig(rule="adalomo"),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
