"""Direct preference optimization with TRL's trainer. The lines marked as new, and the class of the trainer, use lowmem.

python examples/dpo.py MODEL pairs.jsonl --output_dir runs/dpo
"""

import argparse

import torch
import trl
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem.trainer import FusedTrainerMixin  # new


class FusedDPOTrainer(FusedTrainerMixin, trl.DPOTrainer): ...  # new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a model directory, or a name on the Hub")
    parser.add_argument("data", help='JSON lines such as {"prompt": [...], "chosen": [...], "rejected": [...]}')
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--learning_rate", type=float, default=1e-6)  # TRL's default, for AdamW
    args = parser.parse_args()

    trainer = FusedDPOTrainer(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16),
        args=trl.DPOConfig(
            output_dir=args.output_dir,
            learning_rate=args.learning_rate,
            per_device_train_batch_size=2,
            precompute_ref_log_probs=True,  # otherwise the reference model stays in memory
            max_grad_norm=0,
            bf16=False,  # no autocast: the weights are bfloat16 already
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
