"""Who may run: one driver per study, one study per GPU.

Both are file locks of the operating system's: the kernel drops them with their owner, so a dead driver holds nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from harness.errors import StudyLocked
from harness.paths import StudyPaths


@contextmanager
def driver_lock(paths: StudyPaths) -> Iterator[None]:
    """Own the study, or raise `StudyLocked`."""
    with _held(paths.lock, f"another driver is running study {paths.name}: stop it with `overnight stop {paths.name}`"):
        yield


@contextmanager
def device_lock(device: str) -> Iterator[None]:
    """Own the GPU on this machine, whoever the user is; a CPU is shared."""
    if device == "cpu":
        yield
        return
    path = Path(tempfile.gettempdir()) / f"overnight-{device.replace(':', '')}.lock"
    with _held(path, f"another study of this machine is using {device}: let it end, or choose another device"):
        yield


def driver_lives(paths: StudyPaths) -> bool:
    """Tell whether a driver owns the study at this moment."""
    if not paths.lock.exists():
        return False
    lock = FileLock(paths.lock, is_singleton=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


@contextmanager
def _held(path: Path, message: str) -> Iterator[None]:
    lock = FileLock(path, mode=0o666, is_singleton=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise StudyLocked(f"{message} ({path})") from error
    try:
        path.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        lock.release()
