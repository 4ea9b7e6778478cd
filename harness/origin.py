"""Where a study's results come from: versions, code commit, device. Written once, so that a reader can judge later."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import harness
from harness.seal import PACKAGES, tool_version

_GIT_SECONDS = 10
_GPU_SECONDS = 10


class Commit(NamedTuple):
    """The checkout that the program runs from."""

    digest: str
    dirty: bool


def versions() -> dict[str, str]:
    """Return the versions of everything that shapes a result; what is not installed is left out."""
    found = {"overnight": tool_version(), "python": platform.python_version(), "system": platform.platform()}
    for package in (*PACKAGES, "accelerate", "numpy", "safetensors", "optuna"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> Commit | None:
    """Return the git commit of our own checkout, or None if we do not run from one (or git cannot say)."""
    root = Path(str(harness.__file__)).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    digest = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    return None if digest is None or status is None else Commit(digest, bool(status))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def device(environment: Mapping[str, str] = os.environ, nodes: Path = Path("/dev")) -> str:
    """Return ``cuda:0`` if there is a GPU that jobs can use, else ``cpu``; without importing torch.

    A torch built for CPUs says so in its version, and an empty CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    built_for_cpu = importlib.metadata.version("torch").endswith("+cpu")
    present = any(node.name[len("nvidia") :].isdigit() for node in nodes.glob("nvidia*"))
    return "cuda:0" if present and not hidden and not built_for_cpu else "cpu"


def device_memory_bytes(
    device: str, environment: Mapping[str, str] = os.environ, folders: str | None = None
) -> int | None:
    """Return the memory of the GPU, or of the machine on a CPU, without importing torch; None where nobody says.

    A GPU is asked for through the driver's own ``nvidia-smi``, looked for in ``folders`` (default: PATH). Where
    CUDA_VISIBLE_DEVICES lists some, ``cuda:0`` is the first of those; ``nvidia-smi`` takes both numbers and UUIDs.
    """
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    program = shutil.which("nvidia-smi", path=folders)
    if program is None:
        return None
    index = int(device.removeprefix("cuda:"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    return _gpu_memory_bytes(program, names[index] if index < len(names) else str(index))


@functools.cache
def _gpu_memory_bytes(program: str, gpu: str) -> int | None:
    """Ask once: a driver needs the answer for every proposal, and it does not change."""
    question = [program, f"--id={gpu}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=_GPU_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = done.stdout.strip()
    return int(answer) << 20 if done.returncode == 0 and answer.isascii() and answer.isdigit() else None


def threads() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
