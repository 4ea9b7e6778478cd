"""What a job may touch: Landlock, a network namespace and dropped capabilities, set by the job on itself.

A prompt is no control and neither is ``chmod`` when everything runs as root: a training job that can read the
validation text can learn it, and one that can write outside its folder can leave something behind for the next. So a
job gives these rights up before it does any work, in a single thread (the kernel covers only the calling thread), and
cannot get them back. Everything is allow-listed; a path that is missing is an error, because a sandbox that quietly
skips a rule is worse than none.

Three system calls by number, and no package: ``landlock`` on PyPI and its relatives are young and tiny. Numbers and
layouts: https://docs.kernel.org/userspace-api/landlock.html. File *metadata* (modes, times) of files that the job's
user owns stays changeable: the seal therefore trusts content only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import site
import stat
import struct
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import frozen
import harness

Tier = Literal["landlock", "plain"]

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_CAPABILITY_VERSION = 0x20080522
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_WRITING = (
    _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE
    | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
)  # fmt: skip
_TCP = 1 << 0 | 1 << 1
_ABSTRACT_SOCKETS_AND_SIGNALS = 1 << 0 | 1 << 1
_KEPT_CAPABILITIES = frozenset({1, 2})
"""DAC_OVERRIDE and DAC_READ_SEARCH: root without them could not read a study that another user owns. Landlock, which
is asked as well, still holds them to the list."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class SandboxFailed(OSError):
    """A right could not be given up although the kernel offers it: the job must not run."""


def landlock_version() -> int:
    """Return the kernel's Landlock ABI, 0 where there is none (not built in, not enabled, or filtered)."""
    version = int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))
    return max(version, 0)


def tier() -> Tier:
    """Return what `lock_in` can promise here: ``landlock``, or ``plain`` for almost nothing."""
    return "landlock" if landlock_version() else "plain"


def lock_in(readable: Sequence[Path], writable: Sequence[Path], *, network: bool = False) -> Tier:
    """Give up every path but these, the network, other processes and capabilities, for this process and its children.

    Folders stand for all below them; what is writable is readable. Call it in a single-threaded process. Raises
    `FileNotFoundError` for a path that does not exist and `SandboxFailed` if the kernel refuses what it offers.
    """
    version = landlock_version()
    _no_new_privileges()
    if not network:
        leave_network()
    if version:
        _landlock(version, readable, writable, network=network)
    drop_capabilities()
    return "landlock" if version else "plain"


def _landlock(version: int, readable: Sequence[Path], writable: Sequence[Path], *, network: bool) -> None:
    """Build and enforce the rules that this ABI knows; newer rights do not exist for older kernels."""
    handled = (1 << 13) - 1
    handled |= _REFER if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    handled |= _IOCTL_DEV if version >= 5 else 0
    attributes = struct.pack("=Q", handled)
    if version >= 4:
        attributes += struct.pack("=Q", 0 if network else _TCP)
    if version >= 6:
        attributes += struct.pack("=Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = _checked(
        "landlock_create_ruleset",
        _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)),
    )
    try:
        for path in readable:
            _allow(ruleset, path, _READING & handled)
        for path in writable:
            _allow(ruleset, path, (_WRITING | _IOCTL_DEV) & handled)
        _checked("landlock_restrict_self", _libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    """Add one rule. Rights on a file may not include those of folders; device control is for devices only."""
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISDIR(mode):
            rights &= _OF_FILES
        if not stat.S_ISCHR(mode):
            rights &= ~_IOCTL_DEV
        rule = struct.pack("=Qi", rights, handle)
        result = _libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        _checked(f"landlock_add_rule for {path}", result)
    finally:
        os.close(handle)


def leave_network() -> bool:
    """Move into an empty network namespace, which also stops UDP and MPTCP; tell whether the kernel allowed it."""
    return unshare(CLONE_NEWNET)


def unshare(flags: int) -> bool:
    """Leave the given namespaces; tell whether the kernel allowed it."""
    return int(_libc.unshare(ctypes.c_int(flags))) == 0


def unshare_as_anyone(flags: int) -> bool:
    """Leave the given namespaces, without the right to by way of a user namespace in which the ids stay the same."""
    if unshare(flags):
        return True
    user, group = os.geteuid(), os.getegid()
    if not unshare(flags | CLONE_NEWUSER):
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def drop_capabilities() -> None:
    """Give up root's powers (clock, mounts, tracing, raw sockets) but those over file modes, for good."""
    for capability in range(64):
        if capability not in _KEPT_CAPABILITIES:  # fails, harmlessly, beyond the last one and without the right to
            _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    permitted = _permitted_capabilities() & sum(1 << capability for capability in _KEPT_CAPABILITIES)
    low, high = permitted & 0xFFFFFFFF, permitted >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    _checked("capset", _libc.capset(header, data))


def _permitted_capabilities() -> int:
    for line in Path("/proc/thread-self/status").read_text().splitlines():
        if line.startswith("CapPrm:"):
            return int(line.split()[1], 16)
    raise SandboxFailed("the kernel does not say which capabilities this process has")


def _no_new_privileges() -> None:
    _checked("prctl(PR_SET_NO_NEW_PRIVS)", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def die_with_parent(is_parent_alive: Callable[[], bool]) -> None:
    """Have the kernel kill this process when the thread that forked it ends; exit if it has ended already."""
    _checked("prctl(PR_SET_PDEATHSIG)", _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0))
    if not is_parent_alive():
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends: a double fork does not escape."""
    _checked("prctl(PR_SET_CHILD_SUBREAPER)", _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def _checked(what: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise SandboxFailed(error, f"{what}: {os.strerror(error)}")
    return int(result)


def system_paths() -> list[Path]:
    """Return what any Python program reads here: interpreter, installed packages, system libraries, and our code.

    Of the folder that our own packages lie in only those packages: a checkout also holds ``runs/``. For the same reason
    ``/usr`` and the interpreter's prefix go in by their parts. Which of the system's folders exist differs between
    distributions, so absent ones are left out here, knowingly.
    """
    own = [Path(str(package.__file__)).parent for package in (frozen, harness)]
    found = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {Path(folder) for folder in site.getsitepackages()}
    found |= {Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")}
    prefixes = {Path(sys.prefix), Path(sys.base_prefix), Path("/usr"), Path("/usr/local")}
    parts = ("bin", "lib", "lib32", "lib64", "libexec", "include", "share", "cuda", "nvidia", "pyvenv.cfg")
    found |= {prefix / part for prefix in prefixes for part in parts}
    found |= {Path(name) for name in ("/bin", "/lib", "/lib32", "/lib64", "/etc", "/sys", "/nix/store")}
    found |= {
        Path("/proc") / name for name in ("cpuinfo", "meminfo", "stat", "filesystems", "version", "sys", "driver")
    }
    found |= {Path("/dev") / name for name in ("zero", "full", "random", "urandom")}
    if sys.pycache_prefix is not None:
        found.add(Path(sys.pycache_prefix))
    return own + sorted(path for path in found if path.exists())


def require_private(paths: Sequence[Path], readable: Sequence[Path]) -> None:
    """Refuse a study that lies inside what every job may read: its validation text would be readable too."""
    for path in paths:
        for folder in readable:
            if path.resolve().is_relative_to(folder.resolve()):
                raise SandboxFailed(f"{path} lies inside {folder}, which every job may read: move the study elsewhere")


def system_writable() -> list[Path]:
    """Return what a job may write besides its folder: the null device, its own /proc entry (thread names), GPUs.

    CUDA fails to start unless it may write its device nodes, ``nvidia-uvm-tools`` included, and name its threads.
    """
    gpus = [path for pattern in ("nvidia*", "nvidia-caps/*", "dri/*") for path in sorted(Path("/dev").glob(pattern))]
    return [Path("/dev/null"), Path("/proc/self").resolve(), *(gpu for gpu in gpus if gpu.is_char_device())]


def limit_memory() -> None:
    """Let allocations fail where the machine's memory ends, instead of leaving it to the kernel whom to kill.

    Counts what is available now beyond what this process holds already. A container's own, smaller limit still ends in
    a kill, which the driver recognises.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    held, available = (int(text.split()[0]) * 1024 for text in (lines["VmData"], memory["MemAvailable"]))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + int(available * 0.95)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
