"""``overnight doctor``: what this machine offers a search, and what is missing, before a night is lost on it."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from harness import disk, origin
from harness.demomodel import demo_model
from harness.jobs import sandbox
from harness.paths import RUNS
from harness.reading import console, put

LEAST_PYTHON = (3, 11)
LEAST_DISK_BYTES = 5 * 10**9
LEAST_MEMORY_BYTES = 4 * 10**9
TORCH_SECONDS = 120
PACKAGES = ("transformers", "peft", "trl", "tokenizers", "optuna", "plotly", "sqlite-utils")
KEYS = ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "HF_TOKEN")
State = Literal["ok", "warning", "missing"]
MARKS: dict[State, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warning": ("look", "yellow"),
    "missing": ("MISSING", "bold red"),
}
PROBE = """
import torch
print(torch.__version__)
if torch.cuda.is_available():
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        print(f"cuda:{number}: {found.name}, {found.total_memory / 1e9:.0f} GB")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    text: str


def doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; exit code 1 if something that a search needs is missing."""
    findings = examine(RUNS, os.environ)
    if arguments.json:
        put([{"what": found.what, "state": found.state, "text": found.text} for found in findings])
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for found in findings:
            mark, style = MARKS[found.state]
            table.add_row(Text(mark, style=style), found.what, found.text)
        console().print(table)
    return 1 if any(found.state == "missing" for found in findings) else 0


def examine(runs: Path, environment: os._Environ[str] | dict[str, str]) -> list[Finding]:
    """Look at everything that a search depends on; nothing is written, no key is read further than its presence."""
    return [
        _python(),
        *_torch(),
        _packages(),
        _extra(),
        *_fine_tuning(),
        _cores(),
        _memory(),
        _disk(runs),
        _sandbox(),
        *_keys(environment),
    ]


def _python() -> Finding:
    state: State = "ok" if sys.version_info[:2] >= LEAST_PYTHON else "missing"
    return Finding(
        what="Python", state=state, text=f"{platform.python_version()} on {platform.system()} {platform.release()}"
    )


def _torch() -> list[Finding]:
    """Import torch in a child, as jobs do: a broken build or driver shows here and not at midnight."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, timeout=TORCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [Finding(what="torch", state="missing", text=f"did not import within {TORCH_SECONDS} s")]
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it died without a word"]
        return [Finding(what="torch", state="missing", text=f"does not import: {last[0]}")]
    found, *gpus = done.stdout.strip().splitlines()
    device = "; ".join(gpus) or "CPU only"
    state: State = "ok"
    if not gpus and origin.device() != "cpu":
        device, state = "there is a GPU, but torch cannot use it (driver or build)", "warning"
    return [Finding(what="torch", state="ok", text=found), Finding(what="device", state=state, text=device)]


def _packages() -> Finding:
    texts, absent = [], []
    for name in PACKAGES:
        try:
            texts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(name)
    if absent:
        return Finding(what="packages", state="missing", text=f"not installed: {', '.join(absent)}")
    return Finding(what="packages", state="ok", text=", ".join(texts))


def _extra() -> Finding:
    """Look for what only `overnight mcp` needs; a search does without."""
    try:
        return Finding(what="for agents", state="ok", text=f"mcp {version('mcp')}")
    except PackageNotFoundError:
        text = "`overnight mcp` would need a package more: `pip install 'mcp>=2.3,<3'`"
        return Finding(what="for agents", state="ok", text=text)


def _fine_tuning() -> list[Finding]:
    """Look for what fine-tuning can use; none of it is needed for a search."""
    packages = {
        "bitsandbytes": ("4-bit base models, 8-bit optimizers", "quantization"),
        "schedulefree": ("the schedule_free optimizer", "optimizers"),
        "gguf": ("base models as GGUF files", "gguf"),
    }
    texts = []
    for name, (use, extra) in packages.items():
        try:
            texts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            texts.append(f"no {name}, which {use} would need: `pip install 'overnight[{extra}]'`")
    model = demo_model()
    told = (
        f"{model.name} ({disk.readable(model.stat().st_size)})" if model else "not here; `make demo-model` installs it"
    )
    return [
        Finding(what="fine-tuning", state="ok", text="; ".join(texts)),
        Finding(what="demo model", state="ok", text=told),
    ]


def _cores() -> Finding:
    cores = origin.threads()
    load = os.getloadavg()[0]
    text = f"{cores} cores for this process, load {load:.1f}"
    if load > cores:
        return Finding(what="CPU", state="warning", text=f"{text}: busy, so budgets in seconds would be unfair")
    return Finding(what="CPU", state="ok", text=text)


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts what caches would give back, which sysconf does not
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    state: State = "ok" if free >= LEAST_MEMORY_BYTES else "warning"
    return Finding(what="memory", state=state, text=f"{disk.readable(free)} available of {disk.readable(total)}")


def _disk(runs: Path) -> Finding:
    place = runs if runs.exists() else Path()
    free = disk.free_bytes(place)
    text = f"{disk.readable(free)} free for {runs}/, {disk.readable(disk.RESERVE_BYTES)} of it kept in reserve"
    if not os.access(place, os.W_OK):
        return Finding(what="disk", state="missing", text=f"{place.resolve()} cannot be written")
    return Finding(what="disk", state="ok" if free >= LEAST_DISK_BYTES else "warning", text=text)


def _sandbox() -> Finding:
    tier = sandbox.tier()
    if tier == "plain":
        return Finding(what="sandbox", state="warning", text="plain: this kernel has no Landlock, jobs run unconfined")
    return Finding(what="sandbox", state="ok", text=f"{tier} (ABI {sandbox.landlock_version()})")


def _keys(environment: os._Environ[str] | dict[str, str]) -> list[Finding]:
    present = [name for name in KEYS if environment.get(name)]
    text = ", ".join(f"{name} {'present' if name in present else 'not set'}" for name in KEYS)
    return [Finding(what="keys", state="ok", text=f"{text}; the offline proposers need none")]
