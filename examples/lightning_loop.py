"""Lightning with manual and with automatic optimization.

python examples/lightning_loop.py
"""

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import lowmem


class Manual(lightning.LightningModule):
    """Manual optimization: calls backward and step() itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return lowmem.FusedOptimizer(self.named_parameters(), model=self, rule="adamw", lr=0.05, weight_decay=0.01)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        scheduler = LambdaLR(optimizer, lambda step: 0.99**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))  # updates the weights
        optimizer.step()
        self.lr_schedulers().step()


class Automatic(Manual):
    """Automatic optimization: Lightning calls both. Supports `Trainer(accumulate_grad_batches=...)`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.optimizers().accumulate():  # the step() that Lightning calls completes the step
            loss.backward(*args, **kwargs)


def make_loader() -> DataLoader:
    inputs = torch.randn(112, 4)
    return DataLoader(TensorDataset(inputs, inputs.square().sum(1, keepdim=True)), batch_size=16)


def make_trainer(**options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", devices=1, **quiet, **{"enable_checkpointing": False, **options})


if __name__ == "__main__":
    lightning.seed_everything(0)
    loader = make_loader()
    for module, options in ((Manual(), {}), (Automatic(), {"accumulate_grad_batches": 2})):
        make_trainer(max_epochs=40, **options).fit(module, loader)
        print(type(module).__name__, "loss", module.loss(next(iter(loader))).item())
