"""A plain training loop: fine-tunes all weights of a language model on a text file.

python examples/loop.py MODEL text.txt --output_dir runs/loop
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import lowmem
from lowmem.layers.head import linear_cross_entropy


def blocks(path: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Tokenizes a file and returns rows of `length` tokens."""
    ids = torch.tensor(tokenizer(path.read_text())["input_ids"])
    return ids[: len(ids) // length * length].view(-1, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a model directory, or a name on the Hub")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row (1024)")
    args = parser.parse_args()

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    opt = lowmem.FusedOptimizer(model.named_parameters(), model=model, rule="adalomo", lr=args.learning_rate)
    loader = DataLoader(blocks(args.text, tokenizer, args.length), batch_size=1, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(loader))

    for step, ids in enumerate(loader, start=1):
        ids = ids.to(device)
        hidden = model.get_decoder()(ids).last_hidden_state
        # Computes the loss from tiles of logits. Labels are not shifted automatically, hence the slices. Models that
        # scale or cap their logits (Granite, Gemma 2) need logit_scale or softcap here.
        loss = linear_cross_entropy(hidden[:, :-1], model.get_output_embeddings().weight, ids[:, 1:])
        opt.backward(loss)  # updates the weights
        scheduler.step()
        if step % 10 == 0 or step == len(loader):
            print(f"step {step}/{len(loader)}  loss {loss.item():.3f}  norm {opt.last_step.grad_norm:.2f}")

    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
