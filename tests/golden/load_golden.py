"""Loads golden trajectories and measures the deviations of a replay (README.md describes the format)."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Case:
    """One recorded trajectory. Steps count from 1."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        self.entry = entry
        self.name: str = entry["name"]
        self.optimizer: str = entry["optimizer"]
        self.hyper: dict[str, Any] = entry["hyperparameters"]
        self.tolerance: dict[str, Any] = entry["tolerance"]
        self.steps: int = entry["steps"]
        self.recorded: list[int] = entry["recorded_steps"]
        self.param_names: list[str] = [param["name"] for param in entry["params"]]
        self.tensors = load_file(folder / entry["file"])

    def init(self) -> dict[str, Tensor]:
        """Returns the parameters before step 1."""
        return {name: self.tensors[f"init/{name}"].clone() for name in self.param_names}

    def grads(self, step: int) -> dict[str, Tensor | None]:
        """Returns the gradients of a step, or None for a parameter without a gradient."""
        values: dict[str, Tensor | None] = {}
        for name in self.param_names:
            present = self.tensors.get(f"grad_present/{name}")
            missing = present is not None and not present[step - 1]
            values[name] = None if missing else self.tensors[f"grad/{name}"][step - 1].clone()
        return values

    def lr(self, step: int) -> float | None:
        """Returns the learning rate of a step, or None if the case does not have a schedule."""
        return float(self.tensors["lr"][step - 1]) if "lr" in self.tensors else None

    def params_after(self, step: int) -> dict[str, Tensor]:
        """Returns the parameters after a recorded step."""
        index = self.recorded.index(step)
        return {name: self.tensors[f"param/{name}"][index] for name in self.param_names}

    def state_after(self, step: int) -> dict[str, Tensor]:
        """Returns `<param>/<state>` → tensor after the last step, or after another recorded step if traces exist."""
        if step == self.steps:
            return {key.removeprefix("state/"): t for key, t in self.tensors.items() if key.startswith("state/")}
        index, prefix = self.recorded.index(step), "state_trace/"
        return {key.removeprefix(prefix): t[index] for key, t in self.tensors.items() if key.startswith(prefix)}

    def compare(self, step: int, params: dict[str, Tensor]) -> dict[str, float]:
        """Returns the `deviation` of each parameter, relative to its largest recorded magnitude so far."""
        index = self.recorded.index(step)
        values = {}
        for name in self.param_names:
            history = self.tensors[f"param/{name}"][: index + 1]
            scale = torch.cat([self.tensors[f"init/{name}"].flatten(), history.flatten()])
            values[name] = deviation(params[name], history[index], scale)
        return values

    def compare_state(self, step: int, state: dict[str, Tensor]) -> dict[str, float]:
        """Returns the `deviation` of each state, relative to its largest magnitude in the last 5 recorded steps."""
        reference = self.state_after(step)
        values = {}
        for key, x in state.items():
            scale = reference[key]
            if f"state_trace/{key}" in self.tensors:
                index = self.recorded.index(step)
                scale = self.tensors[f"state_trace/{key}"][max(0, index - 4) : index + 1]
            values[key] = deviation(x, reference[key], scale)
        return values


def deviation(x: Tensor, reference: Tensor, scale: Tensor) -> float:
    """Returns the largest difference of finite elements, divided by the largest finite magnitude in `scale`. The result
    is inf if NaN or Inf are not in the same elements.
    """
    reference, scale = reference.double(), scale.double()
    x = x.detach().double().cpu().reshape(reference.shape)
    finite = reference.isfinite()
    if not torch.equal(reference.isnan(), x.isnan()) or not torch.equal(finite, x.isfinite()):
        return float("inf")
    difference = (reference[finite] - x[finite]).abs().max().item() if finite.any() else 0.0
    scale = scale[scale.isfinite()]
    size = scale.abs().max().item() if scale.numel() else 0.0
    return difference / size if size > 0 else difference


def manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a directory of trajectories."""
    return json.loads((folder / "manifest.json").read_text())


def load_case(folder: Path, name: str) -> Case:
    """Loads one case by name."""
    return Case(folder, next(entry for entry in manifest(folder)["cases"] if entry["name"] == name))
