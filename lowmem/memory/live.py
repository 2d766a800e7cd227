"""Every tensor's memory, from birth to death, counted by storage: real tensors and fake ones alike."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(eq=False)
class Storage:
    """Memory that one or several tensors share.

    born, died: when, on the clock of the `LiveBytes` that saw it; died is None while it lives.
    kind: what it is; "" until it is named.  like: dtype and shape of the tensor that it was first seen in.
    """

    nbytes: int
    device: torch.device
    born: int
    like: str
    kind: str = ""
    died: int | None = None


class LiveBytes(TorchDispatchMode):
    """While it is active, sees each storage that an operation makes.

    Views share their storage and are counted once. What a kernel takes for itself and gives back is no tensor, and not
    seen.

    Attributes:
        now: a clock that goes on by one with every birth and every death.
        seen: every storage, in order of birth.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.seen: list[Storage] = []
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._of(made)
        return result

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Says what the memory of some tensors is; it is counted from here on if it was not seen before."""
        for tensor in tensors:
            self._of(tensor).kind = kind

    def name_living(self, kind: str, since: int) -> None:
        """Says what everything is that was born at `since` or later, lives, and has no name."""
        for storage in reversed(self.seen):
            if storage.born < since:
                break
            if storage.died is None and not storage.kind:
                storage.kind = kind

    def _of(self, tensor: Tensor) -> Storage:
        held = tensor.untyped_storage()
        storage: Storage | None = self._known.get(held)
        if storage is None:
            like = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            storage = self._known[held] = Storage(held.nbytes(), tensor.device, self._tick(), like)
            self.seen.append(storage)
            weakref.finalize(held, self._end, storage).atexit = False
        return storage

    def _end(self, storage: Storage) -> None:
        storage.died = self._tick()

    def _tick(self) -> int:
        self.now += 1
        return self.now
