"""Processes that are not ours to wait for: leftovers of dead drivers, and what the kernel killed for memory."""

from __future__ import annotations

import os
import selectors
import signal
from pathlib import Path

_DEATH_SECONDS = 20.0


def sweep(assignment: str) -> int:
    """Kill every process whose environment holds ``NAME=value``; return how many there were."""
    wanted = assignment.encode()
    killed = 0
    while True:
        found = [pid for pid in _processes() if pid != os.getpid() and _kill_if_marked(pid, wanted)]
        if not found:
            return killed
        killed += len(found)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _kill_if_marked(pid: int, wanted: bytes) -> bool:
    """Kill a process if its environment holds the mark, and wait until it is dead; tell whether it was.

    Held by a process descriptor, so that a number that the kernel gives out again is never hit.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # gone already, or a thread
        return False
    try:
        if wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            selector.select(_DEATH_SECONDS)
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended meanwhile, or another user's
        return False
    finally:
        os.close(handle)
    return True


def kills_for_memory() -> int:
    """Return how many processes the kernel has killed for memory: of this container where it is told, else of all."""
    for counter in (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control")):
        counts = _counts(counter)
        if "oom_kill" in counts:
            return counts["oom_kill"]
    return _counts(Path("/proc/vmstat")).get("oom_kill", 0)


def _counts(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdigit()}
