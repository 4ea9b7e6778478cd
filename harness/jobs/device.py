"""The device of one job: chosen before anything touches it, and what can be read from it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import torch


def prepare(name: str, threads: int, *, repeatable: bool) -> torch.device:
    """Return the torch device for ``cpu`` or ``cuda:N``, and set this process up for it.

    Only the one GPU stays visible: with several, Trainer would spread over all of them. ``repeatable`` asks for kernels
    that give the same bits every time, where there are such.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(repeatable, warn_only=True)
    # Filling new memory costs time, and nothing here reads it before writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by a module class
    if name == "cpu":
        return torch.device("cpu")
    index = int(name.removeprefix("cuda:"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return torch.device("cuda:0")


def describe(device: torch.device) -> str:
    """Return the device's name for the ledger."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return what waits until the device has finished; nothing on a CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: of the GPU's allocator, or of this process (its imports included)."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
