"""Activation offload to a file: neither the device nor the host holds what checkpointed layers save for backward."""

import errno
import functools
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from lowmem.errors import ConfigError, LowmemError, UnsupportedError

# Tensors of fewer bytes stay where they are.
_LEAST = 1 << 16

# The file consists of blocks of this many bytes. A block has data of one tensor.
_BLOCK = 1 << 20


class FileOffload(saved_tensors_hooks):
    """Context manager under which tensors saved by the forward pass are written to a file, and read in backward.

    It is meant for the inputs of checkpointed layers, as `torch.autograd.graph.save_on_cpu` is:

        offload = FileOffload("/scratch")
        for layer in layers:
            with offload:
                x = checkpoint(layer, x, use_reentrant=False)

    The file has no name and is gone when the process ends. It grows to what the largest step needs, and later steps
    use it again. Each tensor is in it for as long as its graph lives, so several graphs can exist at once, and one can
    be used by several backwards. Parameters and tensors of less than 64 KiB are not written. Of fake tensors only the
    shape is kept, so a plan counts them neither on the device nor on the host.

    Args:
        folder: where the file is created; None for the system's directory of temporary files.

    Raises:
        ConfigError: the directory does not exist, or, in a forward, has no room.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._file = _File(folder)
        super().__init__(self._file.save, self._file.load)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file.nbytes


def offload_to_file(model: nn.Module, folder: str | None = None) -> FileOffload:
    """Makes the checkpointed layers of a transformers model write their inputs to a file.

    Activation checkpointing must have been enabled on the model; enabling it again ends the offload.

    Args:
        model: a model with layers that transformers checkpoints.
        folder: where the file is created; None for the system's directory of temporary files.

    Raises:
        ConfigError: no layer is checkpointed, or the directory does not exist.
        UnsupportedError: checkpointing is reentrant, or is not that of PyTorch.
    """
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if not layers:
        raise ConfigError(
            f"activation_offload='disk' writes the inputs of checkpointed layers, and {type(model).__name__} has none; "
            "set gradient_checkpointing=true"
        )
    functions = [_checkpointing(layer) for layer in layers]
    offload = FileOffload(folder)
    for layer, function in zip(layers, functions, strict=True):
        layer._gradient_checkpointing_func = _under(offload, function)  # type: ignore[assignment]
    return offload


def _checkpointing(layer: nn.Module) -> Callable[..., Any]:
    """The function that checkpoints a layer, without an earlier offload. Raises unless its inputs can be offloaded."""
    function: Any = getattr(layer, "_gradient_checkpointing_func", None)
    function = getattr(function, "without_offload", function)
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    if getattr(function, "func", function) is not checkpoint:
        raise UnsupportedError(
            f"activation_offload='disk': {type(layer).__name__} is checkpointed by another function than "
            "torch.utils.checkpoint.checkpoint, which may offload its inputs elsewhere; omit 'offload' from "
            "gradient_checkpointing_kwargs"
        )
    if keywords.get("use_reentrant") is not False:
        raise UnsupportedError(
            "activation_offload='disk' needs activation checkpointing that is not reentrant; set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    return function  # type: ignore[no-any-return]


def _under(offload: FileOffload, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, which deepcopy() of a model does not copy, where a partial would be copied with its file."""

    def checkpoint_to_file(*args: Any, **kwargs: Any) -> Any:
        with offload:
            return function(*args, **kwargs)

    checkpoint_to_file.without_offload = function  # type: ignore[attr-defined]
    return checkpoint_to_file


class _Saved:
    """A tensor in the file. Its blocks are free again when this object is."""

    def __init__(self, tensor: Tensor, flat: Tensor, blocks: list[int], free: list[int]) -> None:
        self.like = flat.new_empty(0)  # device and dtype; fake if the tensor is
        self.length = len(flat)
        self.place = _place(tensor)
        self.blocks = blocks
        weakref.finalize(self, free.extend, reversed(blocks)).atexit = False


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Offset, size and strides of a tensor in its memory, its dtype, and its version, which any write changes."""
    return int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype, tensor._version


class _File:
    """A file without a name, as blocks.

    It is not mapped: mapped pages would count as memory of the process, and reading them takes four times as long.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = Path(folder or tempfile.gettempdir())
        try:
            file = tempfile.TemporaryFile(dir=folder, prefix="activations-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"activation_offload='disk': no file can be created in {self._folder}: {error.strerror}. Set "
                "activation_dir to a directory with room."
            ) from error
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self._blocks = 0
        self._free: list[int] = []
        # the last tensor that was written of each memory: layers may share an input, such as a mask
        self._last = WeakIdKeyDictionary()

    @property
    def nbytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def save(self, tensor: Tensor) -> Tensor | _Saved:
        """Writes a tensor. Returns it if it is to stay where it is."""
        if isinstance(tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.nbytes < _LEAST:
            return tensor
        storage = tensor.untyped_storage()
        saved: _Saved | None = self._last.get(storage, lambda: None)()
        if saved is None or saved.place != _place(tensor):
            saved = self._write(tensor)
            self._last[storage] = weakref.ref(saved)
        return saved

    def _write(self, tensor: Tensor) -> _Saved:
        # all memory from the first element to the last, so that the tensor that is read has the same strides
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        flat = tensor.detach().as_strided((length,), (1,))
        exists = not (is_fake(flat) or flat.is_meta)
        blocks = self._take(-(-flat.nbytes // _BLOCK)) if exists else []
        saved = _Saved(tensor, flat, blocks, self._free)
        if exists:
            try:
                self._transfer(os.pwritev, flat.cpu(), blocks)
            except OSError as error:
                raise ConfigError(
                    f"activation_offload='disk' needs more than {self.nbytes:,} bytes in {self._folder}: "
                    f"{error.strerror}. Set activation_dir to a directory with room."
                ) from error
        return saved

    def load(self, saved: Tensor | _Saved) -> Tensor:
        """Returns a tensor as it was saved."""
        if isinstance(saved, Tensor):
            return saved
        flat = saved.like.new_empty(saved.length)
        if saved.blocks:
            host = flat if flat.device.type == "cpu" else torch.empty_like(flat, device="cpu")
            try:
                self._transfer(os.preadv, host, saved.blocks)
            except OSError as error:
                raise LowmemError(f"{self._folder}: activations cannot be read: {error.strerror}") from error
            if host is not flat:
                flat.copy_(host)
        return flat.as_strided(*saved.place[1:3])

    def _take(self, count: int) -> list[int]:
        """So many blocks, those first that are free."""
        blocks = [self._free.pop() for _ in range(min(count, len(self._free)))]
        start, self._blocks = self._blocks, self._blocks + count - len(blocks)
        return blocks + list(range(start, self._blocks))

    def _transfer(self, move: Callable[..., int], flat: Tensor, blocks: list[int]) -> None:
        """Writes a tensor in memory of the host into blocks, or reads it."""
        data = flat.view(torch.uint8).numpy().data
        for number, block in enumerate(blocks):
            part, offset = data[number * _BLOCK : (number + 1) * _BLOCK], block * _BLOCK
            while part:  # the system may move less than it is asked to
                moved = move(self._descriptor, [part], offset)
                if not moved:
                    raise OSError(errno.EIO, "the file is too short")
                part, offset = part[moved:], offset + moved
