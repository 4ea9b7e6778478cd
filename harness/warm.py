"""The warm parent of all jobs as its driver sees it: started, greeted, and in the end killed.

The driver's side of ``harness.jobs.nursery``. What survives even its end (a kernel without pid namespaces, a killed
warden) carries the study's mark in its environment and is found by `sweep`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import frozen
import harness
from harness import processes
from harness.errors import CannotStart, SealBroken
from harness.jobs.nursery import Hello
from harness.jobs.sandbox import Tier

MARK = "OVERNIGHT_STUDY"
_OWN_MARK = "OVERNIGHT_NURSERY"

_PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
)  # fmt: skip
_SET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # with spinning OpenMP threads a busy machine is ten times slower
    "GOMP_SPINCOUNT": "0",
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads on import, and threads do not survive a fork
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it matrix products on a GPU do not repeat
}

START_SECONDS = 300.0
"""For the imports: seconds on a quiet machine, far more from a cold disk on a busy one."""
CHUNK = 1 << 16
"""Bytes that are read from a descriptor at once."""
_TAIL_BYTES = 2000


class Nursery:
    """One running nursery and the socket to it."""

    def __init__(self, bytecode: Path, mark: str, threads: int, command: Sequence[str] | None) -> None:
        bytecode.mkdir(parents=True, exist_ok=True)
        self._own_mark = uuid4().hex
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the nursery
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        default = [sys.executable, "-I", "-X", f"pycache_prefix={bytecode.resolve()}", "-m", "harness.jobs.nursery"]
        with theirs:
            self.process = subprocess.Popen(
                [*(command or default), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env=environment(os.environ, mark, threads) | {_OWN_MARK: self._own_mark},
                start_new_session=True,  # Ctrl-C in the terminal is the driver's to handle
            )

    def greet(self) -> Tier:
        """Wait for the first message; refuse a nursery whose code is not this driver's."""
        self.channel.settimeout(START_SECONDS)
        try:
            message = self.channel.recv(CHUNK)
        except TimeoutError:
            message = b""
        if not message:
            words = self.last_words()
            self.end(sweep=True)
            raise CannotStart(f"the process that starts jobs ended before it spoke: {words}")
        hello = Hello.model_validate_json(message)
        for package, theirs in ((frozen, hello.frozen), (harness, hello.harness)):
            ours = Path(str(package.__file__)).resolve().parent
            if theirs != ours:
                self.end(sweep=True)
                raise SealBroken(f"jobs would import {package.__name__} from {theirs}, the driver uses {ours}")
        return hello.tier

    def last_words(self) -> str:
        """Return the end of what it wrote, to explain why it died."""
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - _TAIL_BYTES))
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) if lines else f"no output, exit status {self.process.poll()}"

    def end(self, *, sweep: bool) -> None:
        """Kill it: between jobs it has nothing to lose, and its imports are not waited for.

        ``sweep`` kills all that carries its mark as well, for when a job's warden can no longer do that.
        """
        self.channel.close()
        self.process.kill()
        self.process.wait()
        if sweep:
            processes.sweep(f"{_OWN_MARK}={self._own_mark}")
        self._words.close()


def environment(inherited: Mapping[str, str], mark: str, threads: int) -> dict[str, str]:
    """Return the environment of all job processes: an allow-list, so that no key of the owner's is ever in it."""
    passed = {name: inherited[name] for name in _PASSED_ON if name in inherited}
    return passed | _SET | {"OMP_NUM_THREADS": str(threads), MARK: mark}


def sweep(mark: str) -> int:
    """Kill every process that carries the study's mark in its environment; return how many there were.

    For the start of a run, when no launcher of this study is alive.
    """
    return processes.sweep(f"{MARK}={mark}")
