"""Sensors tell what they can, and never cost a trial."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rows import Sensed
from harness.sensors import NOTHING, Sensors, parse

Fake = Callable[[str], dict[str, str]]
ASKED = "--query-gpu=temperature.gpu,power.draw --format=csv,noheader,nounits -i"


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Return a function that makes an `nvidia-smi` of a few shell lines, and the environment in which it is found."""

    def make(script: str) -> dict[str, str]:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script}\n')
        program.chmod(0o755)
        return {"PATH": f"{program.parent}:{os.environ['PATH']}"}

    return make


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def gpu(environment: dict[str, str], device: str = "cuda:0", timeout_seconds: float = 60) -> Sensors:
    return Sensors(device, environment=environment, timeout_seconds=timeout_seconds)


@pytest.mark.parametrize(
    ("printed", "celsius", "watts"),
    [
        ("45, 123.45", 45, 123.45),
        ("31, [N/A]", 31, None),
        ("[N/A], [N/A]", None, None),
        ("38, [Not Supported]", 38, None),
        ("[Unknown Error], 70.11", None, 70.11),
        ("45, -1", 45, None),
        ("nan, inf", None, None),
        ("No devices were found", None, None),
        ("45", None, None),
        ("45, 1\\n46, 2", None, None),
        ("", None, None),
        ("\\377\\376\\000, \\377", None, None),
    ],
)
def test_what_nvidia_smi_prints(fake: Fake, printed: str, celsius: float | None, watts: float | None) -> None:
    """Numbers are numbers; what it does not know, and every other text, is None."""
    assert gpu(fake(f"printf '{printed}\\n'")).read() == Sensed(celsius=celsius, watts=watts)


@pytest.mark.parametrize("script", ["echo 45, 123; exit 9", "kill -9 $$", "exit 0"])
def test_an_nvidia_smi_that_fails(fake: Fake, script: str) -> None:
    """What a failing program prints is no reading."""
    assert gpu(fake(script)).read() == NOTHING


def test_an_nvidia_smi_that_hangs_is_asked_once(fake: Fake, tmp_path: Path) -> None:
    """A GPU that fell off the bus costs one time-out, not one for every point of every curve, and leaves no process."""
    sensors = gpu(fake(f"echo $$ > {tmp_path}/pid; sleep 600"), timeout_seconds=1)
    assert [sensors.read(), sensors.read()] == [NOTHING, NOTHING]
    assert len(asked(tmp_path)) == 1
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_no_nvidia_smi(tmp_path: Path) -> None:
    """Without the program, or without the right to run it, nothing is known."""
    assert gpu({"PATH": str(tmp_path)}).read() == NOTHING
    (tmp_path / "nvidia-smi").write_text("no program")
    assert gpu({"PATH": str(tmp_path)}).read() == NOTHING


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cuda:0", None, "0"),
        ("cuda:3", None, "3"),
        ("cuda:1", "4,7", "7"),
        ("cuda:0", "GPU-8f3a, 2", "GPU-8f3a"),
        ("cuda:0", "", "0"),
    ],
)
def test_the_right_gpu_is_asked(fake: Fake, tmp_path: Path, device: str, visible: str | None, name: str) -> None:
    """Torch counts what CUDA_VISIBLE_DEVICES lets it see, `nvidia-smi` counts all."""
    environment = fake("echo 45, 123") | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert gpu(environment, device).read() == Sensed(celsius=45, watts=123)
    assert asked(tmp_path) == [f"{ASKED} {name}"]


def cpu(system: Path, files: dict[str, str]) -> Sensed:
    for name, text in files.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(f"{text}\n")
    return Sensors("cpu", system=system).read()


@pytest.mark.parametrize(
    ("files", "celsius"),
    [
        ({}, None),
        (
            {
                "hwmon/hwmon0/name": "nvme",
                "hwmon/hwmon0/temp1_input": "38850",
                "hwmon/hwmon1/name": "coretemp",
                "hwmon/hwmon1/temp1_label": "Core 0",
                "hwmon/hwmon1/temp1_input": "50000",
                "hwmon/hwmon1/temp2_label": "Package id 0",
                "hwmon/hwmon1/temp2_input": "61500",
            },
            61.5,
        ),
        ({"hwmon/hwmon0/name": "k10temp", "hwmon/hwmon0/temp1_input": "47125"}, 47.125),
        ({"hwmon/hwmon0/name": "coretemp"}, None),
        ({"hwmon/hwmon0/name": "k10temp", "hwmon/hwmon0/temp1_input": "asleep"}, None),
        (
            {
                "thermal/thermal_zone0/type": "acpitz",
                "thermal/thermal_zone0/temp": "27800",
                "thermal/thermal_zone1/type": "x86_pkg_temp",
                "thermal/thermal_zone1/temp": "55000",
            },
            55.0,
        ),
    ],
)
def test_a_processor(tmp_path: Path, files: dict[str, str], celsius: float | None) -> None:
    """The package's own sensor counts, never a disk's or the board's; watts are not known."""
    assert cpu(tmp_path, files) == Sensed(celsius=celsius, watts=None)


def test_this_machine_answers() -> None:
    """Whatever this machine has, it is a number or None."""
    found = Sensors("cpu").read()
    assert found.celsius is None or -50 < found.celsius < 150


@given(st.text(max_size=40))
def test_any_answer_is_numbers_or_none(answer: str) -> None:
    """The ledger takes nothing else."""
    found = parse(answer)
    assert found.celsius is None or math.isfinite(found.celsius)
    assert found.watts is None or 0 <= found.watts < 1e300
