"""Tiled MLPs: an MLP processes some tokens at a time, so the activations of the full sequence are never materialized.

[tokens, hidden]      tile → MLP → tile      forward saves only the input
                      tile → MLP → tile      backward recomputes each tile, and sums the gradients of weights
                      ...                    in float32
"""

import functools
import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from lowmem.errors import StepError, UnsupportedError
from lowmem.layers.autocast import autocast, autocast_dtype
from lowmem.rules import require

# The random state of the host, the indices of devices, and the random state of each device.
_RandomState = tuple[Tensor, tuple[list[int], list[Tensor]]]

_FAULT = "a module of class {} is named like an MLP but {}. Omit mlp_tile"


@dataclass
class _Tiling:
    """The tiling of a module, which is stored in its attribute `_tiling`."""

    tokens: int
    forward: MethodType  # the module's forward, bound, because deepcopy binds it to the copy
    checked: bool = False  # whether `_check_tokens` has found that tokens are independent


def tile_mlps(model: nn.Module, tokens: int, names: Collection[str] = ("mlp", "feed_forward")) -> list[str]:
    """Makes the MLPs of a model process `tokens` tokens at a time.

    An MLP is a module with one of these names that takes one tensor of shape `[..., tokens, hidden]`, returns a tensor
    of the same shape, and processes each token independently. Its first forward checks this. Results and gradients are
    the same as without tiles, up to the order of sums. Autograd rounds the gradients of 16-bit weights once per tile,
    and they are summed in float32. Dropout draws random numbers per tile. While backward computes an MLP, the gradients
    of all its weights exist at once, in float32 or wider. A second call changes the number of tokens.

    Args:
        model: modified in-place. Under DeepSpeed ZeRO-3, call this before `deepspeed.initialize`.
        tokens: number of tokens per tile, counted over the full batch.
        names: last components of module names. Modules with stacks of experts are not tiled.

    Returns:
        The names of the tiled modules.

    Raises:
        ConfigError: `tokens` is less than 1.
        UnsupportedError: the model does not have such an MLP, or DeepSpeed has already initialized the model.
    """
    require.number(">= 1", whole=True)("mlp_tile", tokens)
    mlps: dict[str, Any] = {}
    sparse: list[str] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names and len(inspect.signature(type(module).forward).parameters) == 2:
            if any(len(getattr(param, "ds_shape", param.shape)) > 2 for param in module.parameters()):
                sparse.append(name)
            else:
                mlps[name] = module
    if not mlps:
        reason = f", and {sparse[0]!r} is a mixture of experts, which cannot be tiled" if sparse else ""
        raise UnsupportedError(
            f"{type(model).__name__} has no MLP that can be tiled: a module named {' or '.join(names)} that is called "
            f"with one tensor{reason}. Omit mlp_tile, or call tile_mlps(model, tokens, names) of lowmem.layers.mlp "
            "before the optimizer or trainer is created"
        )
    for name, module in mlps.items():
        # DeepSpeed 0.19, runtime/zero/parameter_offload.py, _register_deepspeed_module numbers the modules it hooks
        if any(hasattr(child, "ds_id") for child in module.modules() if child is not module):
            raise UnsupportedError(
                f"{name!r}: DeepSpeed gathers the weights of each linear layer only while it computes, but a tiled MLP "
                "needs them together. Call tile_mlps(model, tokens) before deepspeed.initialize"
            )
    for module in mlps.values():
        if hasattr(module, "_tiling"):
            module._tiling.tokens = tokens
        else:
            module._tiling = _Tiling(tokens, module.forward)
            module.forward = MethodType(_forward, module)
            # DeepSpeed 0.19, utils/z3_leaf_module.py: ZeRO-3 gathers the module's weights together, once for all tiles
            module._z3_leaf = True
    return list(mlps)


def _forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Forward of a tiled module. Its only argument may be passed by name."""
    (hidden,) = (*args, *kwargs.values())
    if hidden.shape[:-1].numel() <= self._tiling.tokens:
        return self._tiling.forward(hidden)  # type: ignore[no-any-return]
    return _forward_in_tiles(self, hidden)


@_disable_dynamo  # it would trace the backward without the saved tensors
def _forward_in_tiles(self: Any, hidden: Tensor) -> Tensor:
    params = {name: param for name, param in self.named_parameters() if param.requires_grad}
    for name, param in params.items():
        if hasattr(param, "device_mesh"):
            raise UnsupportedError(
                f"parameter {name!r} of a tiled MLP ({type(self).__name__}) is sharded while the module computes. Call "
                "fully_shard on the layer or the MLP, not on the linear layers inside, and omit tensor parallelism"
            )
    hidden = _SavedInput.apply(hidden)
    return _Tiled.apply(self, list(params), hidden, *params.values())  # type: ignore[no-any-return]


class _SavedInput(torch.autograd.Function):
    """Saves the input before any tile is computed. Activation checkpointing stops recomputing after the last saved
    tensor, so it does not recompute the tiles.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Any, names: list[str], hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.module = module
        ctx.names = names
        ctx.saved = hidden.grad_fn  # the node of _SavedInput
        if ctx.saved is None:  # the input does not require a gradient
            ctx.save_for_backward(hidden)
        ctx.versions = [param._version for param in params]
        ctx.autocast = autocast_dtype(hidden.device)
        ctx.tokens = module._tiling.tokens
        ctx.random = torch.get_rng_state(), get_device_states(hidden)
        hidden = hidden.detach()
        result = None
        for rows, tile in _tiles(hidden, ctx.tokens):
            part = module._tiling.forward(tile)
            if not isinstance(part, Tensor) or part.shape != tile.shape:
                fault = "does not return one tensor of the shape of its input"
                raise UnsupportedError(_FAULT.format(type(module).__name__, fault))
            if result is None:
                result = part.new_empty(hidden.shape)
            _flat(result)[..., rows, :] = part
        if not module._tiling.checked and type(hidden) is Tensor and hidden.device.type != "meta":  # not fake
            _check_tokens(module, hidden, ctx.random)
        assert result is not None
        return result

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (hidden,) = (ctx.saved or ctx).saved_tensors
        params = dict(ctx.module.named_parameters())
        if [params[name]._version for name in ctx.names] != ctx.versions:  # autograd does not see recomputed tiles
            raise StepError(
                f"a weight of a tiled MLP ({type(ctx.module).__name__}) has changed since the forward of this "
                "backward. Run the backward of each loss before another backward updates the weights"
            )
        leaves = {f"mlp.{name}": params[name].detach().requires_grad_() for name in ctx.names}
        sums: dict[str, Tensor] = {}
        # a hook must not reference its leaf: garbage collection cannot find this cycle, which keeps the weight alive
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(functools.partial(_add, sums, name))
        body = nn.Module()  # without the hooks of the MLP, which expect the full input and output
        body.mlp = ctx.module
        body.forward = ctx.module._tiling.forward
        needed = ctx.needs_input_grad[2]
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needed else None
        flat_grad = _flat(grad)
        with _random_state(ctx.random, hidden.device.type):
            for rows, values in _tiles(hidden, ctx.tokens):
                tile = values.detach().requires_grad_(needed)
                with torch.enable_grad(), autocast(hidden.device, ctx.autocast):
                    part = torch.func.functional_call(body, leaves, (tile,))
                part.backward(flat_grad[..., rows, :])
                del part
                if grad_hidden is not None and tile.grad is not None:
                    _flat(grad_hidden)[..., rows, :] = tile.grad
        # None for unused weights. Each sum is freed after rounding
        rounded = (sums.pop(name).to(leaf.dtype) if name in sums else None for name, leaf in leaves.items())
        return None, None, grad_hidden, *rounded


def _check_tokens(module: Any, hidden: Tensor, random: _RandomState) -> None:
    """Raises `UnsupportedError` if the result for a token depends on the next or the previous token."""

    def run(tile: Tensor) -> Tensor:
        with _random_state(random, hidden.device.type):
            return module._tiling.forward(tile).float()  # type: ignore[no-any-return]

    both = _flat(hidden)[..., :2, :]
    expected = run(both)
    for token in (0, 1):
        alone = both.clone()
        alone[..., 1 - token, :] = 0
        difference = (run(alone) - expected)[..., token, :]
        if difference.norm() > 0.01 * expected[..., token, :].norm():  # False if there are NaNs
            raise UnsupportedError(_FAULT.format(type(module).__name__, "mixes tokens"))
    module._tiling.checked = True


def _add(sums: dict[str, Tensor], name: str, leaf: Tensor) -> None:
    """A hook that adds the gradient of a leaf to its sum, in float32 or wider, and frees the gradient."""
    assert leaf.grad is not None
    if name in sums:
        sums[name].add_(leaf.grad)
    else:  # a copy, because gradients may share memory
        sums[name] = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32), copy=True)
    leaf.grad = None


def _flat(tensor: Tensor) -> Tensor:
    """Views [batch, tokens, hidden] as [1, batch · tokens, hidden], with the same number of dimensions."""
    return tensor.reshape(*[1] * (tensor.dim() - 2), -1, tensor.shape[-1])


def _tiles(hidden: Tensor, tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields each tile with the slice of its tokens."""
    flat = _flat(hidden)
    for start in range(0, flat.shape[-2], tokens):
        rows = slice(start, start + tokens)
        yield rows, flat[..., rows, :]


@contextmanager
def _random_state(state: _RandomState, device_type: str) -> Iterator[None]:
    """Draws random numbers from a saved state in this context, and restores the current state afterwards."""
    host, (devices, states) = state
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.set_rng_state(host)
        set_device_states(devices, states, device_type=device_type)
        yield
