"""Who may run: one driver per study, one study per GPU.

Both are file locks of the operating system's: the kernel drops them with their owner, so a dead driver holds nothing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import StudyLocked
from harness.paths import StudyPaths

GRACE_SECONDS = 0.5
"""A reader that asks whether a driver lives holds the lock for a moment; this is longer."""


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
    import tempfile

    path = Path(tempfile.gettempdir()) / f"overnight-{device.replace(':', '')}.lock"
    with _held(path, f"another study of this machine is using {device}: let it end, or choose another device"):
        yield


def driver_lives(paths: StudyPaths) -> bool:
    """Tell whether a driver owns the study at this moment.

    A shared lock, held for no longer than the question: many may ask at once, and a driver that starts just then waits
    `GRACE_SECONDS` before it gives up.
    """
    try:
        descriptor = os.open(paths.lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


@contextmanager
def _held(path: Path, message: str) -> Iterator[None]:
    from filelock import FileLock, Timeout  # a tenth of a second that `overnight status` does not have

    lock = FileLock(path, mode=0o666, is_singleton=False)
    try:
        lock.acquire(timeout=GRACE_SECONDS, poll_interval=0.02)
    except Timeout as error:
        raise StudyLocked(f"{message} ({path})") from error
    try:
        path.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        lock.release()
