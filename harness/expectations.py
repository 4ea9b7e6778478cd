"""What the owner is told before the night: how far it will get, what it needs, what it can prove, who will see what."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness import disk
from harness.jobs.sandbox import system_paths
from harness.limits import Limits, counted, expected_seconds
from harness.noise import smallest_provable
from harness.queries import Reader
from harness.study import Study

GIB = 1024**3


def expectations(study: Study, reader: Reader, tier: str, limits: Limits) -> list[str]:
    """Return the lines for the start of a run."""
    trials = reader.trials()
    lines = [f"Study {study.paths.name}: {study.file.study.task}, budget {study.budget} a trial on {study.device}."]
    if trials:
        lines.append(f"Going on after {counted(trials)} trials and {len(reader.past())} proposals.")
    lines.append(_extent(limits, counted(trials), expected_seconds(trials)))
    free = shutil.disk_usage(study.paths.root).free
    lines.append(
        f"Disk: {free / GIB:.1f} GiB free, {disk.RESERVE_BYTES / GIB:.1f} GiB kept in reserve,"
        f" about {study.checkpoint_bytes / GIB:.3f} GiB a checkpoint; only the lineage's are kept."
    )
    noise = reader.noise()
    if noise is None:
        lines.append("Noise is not known yet: the baseline runs with three seeds first.")
    else:
        lines.append(
            f"Noise of one trial: {noise.standard_deviation:.4f}; an improvement of about"
            f" {smallest_provable(noise, study.policy.judge):.4f} or more can be proven, a smaller one seldom."
        )
    if tier == "plain":
        lines.append("WARNING: no sandbox on this kernel. Jobs run unconfined; every row is stamped `plain`.")
    else:
        lines.append(f"Sandbox: {tier}; a job writes to its own folder only, without network and without keys.")
    readable = [source.name for source in study.file.study.data if is_readable_by_jobs(Path(source.path))]
    if readable:
        lines.append(
            f"Note: the text of {', '.join(readable)} lies where every Python process reads (the interpreter or the"
            " system): a job could read its val documents there. Keep data elsewhere to close that."
        )
    lines.append("Nothing leaves this machine and nothing is spent: the proposer works offline.")
    return lines


def is_readable_by_jobs(source: Path) -> bool:
    """Tell whether a source lies inside what the sandbox leaves readable: interpreter, packages, system."""
    return any(source.resolve().is_relative_to(folder.resolve()) for folder in system_paths())


def _extent(limits: Limits, done: int, seconds: float | None) -> str:
    parts = []
    if limits.trials is not None:
        parts.append(f"up to {limits.trials} trials in all ({max(0, limits.trials - done)} to go)")
    if limits.proposals is not None:
        parts.append(f"{limits.proposals} more proposal{'s' if limits.proposals > 1 else ''}")
    if limits.hours is not None:
        fit = f", about {limits.hours * 3600 / seconds:.0f} trials" if seconds else ""
        parts.append(f"{limits.hours:g} driver hours in all{fit}")
    if limits.until is not None:
        parts.append(f"until {limits.until:%Y-%m-%d %H:%M}")
    length = f"; a trial takes about {seconds:.0f} s" if seconds else ""
    return f"It runs {' or '.join(parts) if parts else 'until it is stopped'}{length}."
