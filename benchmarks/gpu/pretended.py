"""A GPU that this machine does not have: inductor generates Triton code for it, and nothing is ever launched on it."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.config
from torch._dynamo import device_interface

# Compute capability → what inductor asks of a device.
_COMMON = {
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "total_memory": 80 << 30,
}
DEVICES: dict[int, Any] = {
    80: SimpleNamespace(
        name="A100", major=8, minor=0, multi_processor_count=108, shared_memory_per_block_optin=166912, **_COMMON
    ),
    90: SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448, **_COMMON
    ),
}

# c10::DeviceType
_CUDA, _META, _TYPES = 1, 14, 22


def pretend(capability: int) -> None:
    """Lets this process, for the rest of its life, trace and generate code for "cuda"."""
    import triton
    from triton.backends.compiler import GPUTarget

    device = DEVICES[capability]
    _set_device_guard()
    torch.version.cuda = torch.version.cuda or "13.0"
    torch._inductor.config.force_disable_caches = True
    answers: dict[str, Any] = {
        "get_device_properties": lambda *_: device,
        "get_device_capability": lambda *_: (device.major, device.minor),
        "current_device": lambda: 0,
        "set_device": lambda _: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    answers |= {
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_bf16_supported": lambda **_: True,
        "get_compute_capability": lambda *_: capability,
    }
    for name, answer in answers.items():
        setattr(device_interface.CudaInterface, name, staticmethod(answer))
    device_interface.caching_worker_device_properties["cuda"] = [device]
    device_interface.caching_worker_current_devices["cuda"] = 0
    target = GPUTarget("cuda", capability, device.warp_size)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    triton.runtime.driver.set_active(driver)


def _set_device_guard() -> None:
    """Gives "cuda" the device guard of "meta", which does nothing, where torch is built without CUDA. Indexing a fake
    tensor asks for a guard. (`torch._C._ensureCUDADeviceGuardSet` does the same, but only for builds with CUDA.)
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * _TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    registry[_CUDA] = registry[_CUDA] or registry[_META]
