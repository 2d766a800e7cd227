"""A plain training loop with a model sharded by DeepSpeed ZeRO-3.

deepspeed --num_gpus 2 examples/zero3.py MODEL text.txt --output_dir runs/zero3
DS_ACCELERATOR=cpu deepspeed --num_gpus 2 examples/zero3.py ...     # two processes on a CPU
"""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

import lowmem
from lowmem.hf.weights import save_weights

CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a model directory, or a name on the Hub")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row (1024)")
    parser.add_argument("--local_rank", type=int, default=0)  # from DeepSpeed's launcher
    args = parser.parse_args()

    deepspeed.init_distributed()
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(args.local_rank)
    config = HfDeepSpeedConfig(CONFIG)  # while it exists, from_pretrained shards each weight as it is loaded
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = deepspeed.initialize(model=model, config=CONFIG)[0].module  # an engine without an optimizer
    model.train()
    del config

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer(args.text.read_text())["input_ids"])
    rows = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    loader = DataLoader(rows, batch_size=1, sampler=DistributedSampler(rows))

    opt = lowmem.FusedOptimizer(model.named_parameters(), model=model, rule="adalomo", lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(loader))
    for step, batch in enumerate(loader, start=1):
        batch = batch.to(model.device)
        loss = model(batch, labels=batch).loss
        opt.backward(loss)  # reduces each gradient and updates this rank's shard of the weight
        scheduler.step()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == len(loader)):
            print(f"step {step}/{len(loader)}  loss {loss.item():.3f}  norm {opt.last_step.grad_norm:.2f}", flush=True)

    save_weights(model, args.output_dir)  # call it on every rank; tensors are gathered one at a time
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.output_dir)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
