"""Supervised fine-tuning on chats with TRL's trainer.

python examples/sft.py MODEL chats.jsonl --output_dir runs/sft
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from lowmem import FusedConfig
from lowmem.trainer import FusedSFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a model directory, or a name on the Hub")
    parser.add_argument("data", help='JSON lines such as {"messages": [{"role": "user", "content": ...}, ...]}')
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=float, default=1)
    args = parser.parse_args()

    # Load bfloat16 weights, because TRL would load float32 ones.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    trainer = FusedSFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output_dir,
            learning_rate=args.learning_rate,  # for AdaLomo; with AdamW it would be 2e-5
            num_train_epochs=args.epochs,
            assistant_only_loss=True,  # by default, TRL also trains on the user messages
            max_length=1024,
            per_device_train_batch_size=1,
            lr_scheduler_type="cosine",
            max_grad_norm=0,  # no clipping: gradients are freed at once
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
