"""A platform "cpu" for verl, so that its unmodified trainer runs on a machine without an accelerator.

verl imports this module by its top-level name (``VERL_USE_EXTERNAL_MODULES``) in the driver and in every Ray worker.
Besides the registration, which is verl's own extension point, two calls are adapted that have no setting: the backend
of the process group, where verl would name the device "cpu" twice, and the offload policy of a reference model, which
would pin memory for a device that is not there.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import verl.utils.distributed as verl_distributed
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

NAME = "cpu"


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


def _build_device_module() -> types.ModuleType:
    """Return ``torch.cpu`` with the memory and random calls of ``torch.cuda`` that verl makes."""
    module = types.ModuleType("trajstore_verl_cpu_device")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    memory = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    module.__dict__.update(dict.fromkeys(memory, _zero))
    no_effect = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device")
    module.__dict__.update(dict.fromkeys(no_effect, _nothing))
    module.__dict__.update(
        mem_get_info=lambda *_: (0, 1),
        get_device_name=lambda *_: NAME,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


_DEVICE_MODULE = _build_device_module()


@PlatformRegistry.register(platform=NAME)
class CpuPlatform(PlatformBase):
    """Every question about the accelerator is answered for one CPU; what only exists on a device has no effect."""

    device_name = vendor_name = NAME
    device_module = _DEVICE_MODULE
    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return NAME  # verl hands it to Tensor.to, where the number of a device would mean an accelerator

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # requested by placement groups; Ray gets a logical number of GPUs

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


class UnpinnedOffloadPolicy(CPUOffloadPolicy):  # type: ignore[misc]  # frozen dataclass of torch
    """Offload without pinned memory, whatever is asked for."""

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(pin_memory=False)


def _adapt() -> None:
    """Make this process use the platform, also when verl was imported before the environment named it."""
    import verl.utils.fsdp_utils as fsdp_utils  # binds CPUOffloadPolicy; the engine takes the name from there

    set_platform(CpuPlatform())
    group = verl_distributed.initialize_global_process_group_ray
    if not isinstance(group, functools.partial):
        verl_distributed.initialize_global_process_group_ray = functools.partial(group, backend="gloo")
    fsdp_utils.CPUOffloadPolicy = UnpinnedOffloadPolicy


_adapt()
