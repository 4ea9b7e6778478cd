"""How hot the device is and what it draws, where that can be read: a score from a throttled GPU is told apart later.

Asked by the driver while a job runs, between two points of its curve: after it the device has cooled down already. A
sensor is no reason to lose a trial, so whatever cannot be read is None and nothing is raised.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.rows import Sensed

NVIDIA_SECONDS = 5.0
"""A driver without persistence mode needs a second or two to answer; a GPU that fell off the bus never does."""
_REAP_SECONDS = 1.0
_QUERY = ("--query-gpu=temperature.gpu,power.draw", "--format=csv,noheader,nounits")
_CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Kernel drivers of Intel's, AMD's and most ARM processors' own sensors."""
_CPU_LABELS = ("Package id 0", "Tctl", "Tdie")
"""Of the whole processor; where a chip labels its sensors otherwise, its first one counts."""
_CPU_ZONES = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "cpu0-thermal")
_LARGEST = 1e6
"""No sensor means what is beyond it, in whatever unit."""
NOTHING = Sensed(celsius=None, watts=None)


class Sensors:
    """Reads one device's sensors; gives up on a program that once did not answer."""

    def __init__(
        self,
        device: str,
        *,
        environment: Mapping[str, str] = os.environ,
        system: Path = Path("/sys/class"),
        timeout_seconds: float = NVIDIA_SECONDS,
    ) -> None:
        self._gpu = _gpu(device, environment)
        self._environment = environment
        self._system = system
        self._timeout_seconds = timeout_seconds
        self._hangs = False

    def read(self) -> Sensed:
        """Return what the sensors say now."""
        if self._gpu is None:
            return Sensed(celsius=_cpu_celsius(self._system), watts=None)
        if self._hangs:
            return NOTHING
        try:
            answer = self._ask(self._gpu)
        except subprocess.TimeoutExpired:
            self._hangs = True
            return NOTHING
        except OSError:  # no such program, or it may not be run
            return NOTHING
        return parse(answer)

    def _ask(self, gpu: str) -> str:
        command = ["nvidia-smi", *_QUERY, "-i", gpu]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(self._environment),
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(timeout=self._timeout_seconds)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, where nothing kills
                    process.wait(_REAP_SECONDS)
            assert process.stdout is not None
            process.stdout.close()
        return answer.decode(errors="replace") if process.returncode == 0 else ""


def _gpu(device: str, environment: Mapping[str, str]) -> str | None:
    """Return what `nvidia-smi` calls a device of torch's; None for a CPU.

    torch counts only the visible devices, by index or UUID. (Without CUDA_DEVICE_ORDER=PCI_BUS_ID it may number unequal
    cards otherwise than `nvidia-smi` does.)
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    index = int(number or 0)
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[index] if index < len(visible) else str(index)


def parse(answer: str) -> Sensed:
    """Return the numbers of one line such as ``45, 123.45``; None for ``[N/A]`` and whatever else is no number."""
    lines = answer.strip().splitlines()
    fields = [_number(field) for field in lines[0].split(",")] if len(lines) == 1 else []
    if len(fields) != 2:
        return NOTHING
    celsius, watts = fields
    return Sensed(celsius=celsius, watts=watts if watts is not None and watts >= 0 else None)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and abs(number) < _LARGEST else None


def _cpu_celsius(system: Path) -> float | None:
    """Return the processor's temperature from the first kernel interface that tells it."""
    return next(
        (found for found in (*_chips(system / "hwmon"), *_zones(system / "thermal")) if found is not None), None
    )


def _chips(folder: Path) -> Iterator[float | None]:
    for chip in sorted(folder.glob("hwmon*")):
        if _text(chip / "name") in _CPU_CHIPS:
            inputs = sorted(chip.glob("temp*_input"))
            whole = [i for i in inputs if _text(i.with_name(i.name.replace("_input", "_label"))) in _CPU_LABELS]
            yield from (_millidegrees(sensor) for sensor in (whole or inputs[:1]))


def _zones(folder: Path) -> Iterator[float | None]:
    for zone in sorted(folder.glob("thermal_zone*")):
        if _text(zone / "type") in _CPU_ZONES:
            yield _millidegrees(zone / "temp")


def _millidegrees(file: Path) -> float | None:
    number = _number(_text(file) or "")
    return None if number is None else number / 1000


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # not there, or the sensor is asleep
        return None
