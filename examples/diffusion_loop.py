"""Trains a diffusion model like the training scripts of diffusers: with Accelerate, accumulation, clipping and an EMA.

python examples/diffusion_loop.py
accelerate launch --cpu --num_processes 2 examples/diffusion_loop.py
"""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

import lowmem


def make_model() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    # clip_norm replaces accelerator.clip_grad_norm_(model.parameters(), 1.0). accelerator.backward(loss) is a plain
    # backward, which "deferred" supports. "two_pass" would need opt.backward(loss).
    options = {"rule": "adamw", "lr": 1e-3, "weight_decay": 0.01, "clip_norm": 1.0, "policy": "deferred"}
    return lowmem.FusedOptimizer(model.named_parameters(), model=model, **options)


def train(
    model: UNet2DModel,
    loader: DataLoader,
    epochs: int,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = make_optimizer,
) -> EMAModel:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    noises = DDPMScheduler(num_train_timesteps=100)
    optimizer = make_optimizer(model)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, num_training_steps=epochs * len(loader))
    # Device and autocast without DistributedDataParallel: the optimizer averages gradients over processes.
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)
    ema = EMAModel(model.parameters(), decay=0.99)
    set_seed(0, device_specific=True)  # each process draws different noise
    for epoch in range(epochs):
        for images in loader:
            noise = torch.randn_like(images)
            timesteps = torch.randint(len(noises), (len(images),), device=images.device)
            with accelerator.accumulate(model):
                predicted = model(noises.add_noise(images, noise, timesteps), timesteps).sample
                loss = torch.nn.functional.mse_loss(predicted, noise)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
    return ema


if __name__ == "__main__":
    torch.manual_seed(0)
    train(make_model(), DataLoader(torch.randn(64, 1, 8, 8).sign(), batch_size=8), epochs=3)
