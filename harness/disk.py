"""The disk reserve: a night must not end because a checkpoint filled the disk, nor take the owner's machine with it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

RESERVE_BYTES = 1 << 30
"""Kept free whatever happens: ledger, logs and the system's own needs."""
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "it is read-only"}
NOT_WRITABLE = FULL | {errno.EACCES: "permission denied", errno.EPERM: "permission denied"}
"""What the operating system says when a folder cannot be written, in words for people."""


def free_bytes(folder: Path) -> int:
    """Return what this user may still write to the disk of ``folder``, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shortfall_bytes(folder: Path, need_bytes: int, reserve_bytes: int = RESERVE_BYTES) -> int:
    """Return how many bytes are missing to write ``need_bytes`` and keep the reserve; 0 if there is room."""
    return max(0, need_bytes + reserve_bytes - free_bytes(folder))


def used_bytes(folder: Path) -> int:
    """Return what the files below ``folder`` take; links to the same bytes are counted once."""
    seen: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))  # noqa: PTH118 - os.walk gives text
            except FileNotFoundError:
                continue  # pruned or renamed meanwhile
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


def readable(size_bytes: float) -> str:
    """Return a size for people, e.g. ``1.4 GB`` (powers of 1000)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"
