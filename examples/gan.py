"""A GAN with two optimizers and two backwards, each of which updates one network.

python examples/gan.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import lowmem

NOISE = 4


def make_networks() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.GELU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 1))
    return generator, discriminator


def points_on_a_circle(count: int) -> Tensor:
    angle = 2 * torch.pi * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def train(generator: nn.Module, discriminator: nn.Module, steps: int) -> None:
    options = {"rule": "adamw", "lr": 1e-3, "weight_decay": 0.0}
    opt_g = lowmem.FusedOptimizer(generator.named_parameters(), model=generator, **options)
    opt_d = lowmem.FusedOptimizer(discriminator.named_parameters(), model=discriminator, **options)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for step in range(1, steps + 1):
        fake = generator(torch.randn(64, NOISE))
        real = discriminator(points_on_a_circle(64))
        loss_d = cross_entropy(real, ones) + cross_entropy(discriminator(fake.detach()), zeros)
        opt_d.backward(loss_d)  # detach() prevents an update of the generator

        loss_g = cross_entropy(discriminator(fake), ones)
        with opt_d.paused():  # the discriminator is used but not updated
            opt_g.backward(loss_g)
        if step % 200 == 0:
            print(f"step {step}: discriminator {loss_d.item():.3f}, generator {loss_g.item():.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(*make_networks(), steps=1000)
