"""What the owner is told before the night: how far it will get, what it needs, what it can prove, who will see what."""

from __future__ import annotations

import os
import shutil
import urllib.parse
from pathlib import Path

from harness import disk
from harness.jobs.sandbox import system_paths
from harness.limits import Limits, counted, expected_seconds
from harness.noise import smallest_provable
from harness.queries import Reader
from harness.report.summary import gather, warnings
from harness.sizes import (
    flops_per_token,
    packs,
    padding_share,
    parameters,
    trained_parameters,
    usual_positions,
)
from harness.study import Study
from harness.studyfile import Agent
from harness.terms import provider_and_model

GIB = 1024**3


def expectations(
    study: Study, reader: Reader, tier: str, limits: Limits, agent: Agent, *, asked: str | None
) -> list[str]:
    """Return the lines for the start of a run. ``asked`` is the language model that its proposer asks, if any."""
    trials = reader.trials()
    lines = [f"Study {study.paths.name}: {study.file.study.task}, budget {study.budget} a trial on {study.device}."]
    lines += _trained(study)
    if study.policy.continues:
        lines.append(
            f"Trials go on from their parent's checkpoint: every kept change is {study.budget} more of training, its"
            " learning rate annealing within it, and is compared with the incumbent's config continued as long, which"
            " runs with three seeds first. Replay trains the schedule of the lineage."
        )
    if trials:
        lines.append(f"Going on after {counted(trials)} trials and {len(reader.past())} proposals.")
    lines += _untouched(study)
    lines += warnings(gather(reader, driver_lives=True))
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
    readable = [
        source.name
        for source in study.file.study.data
        if source.path is not None and is_readable_by_jobs(Path(source.path))
    ]
    if readable:
        lines.append(
            f"Note: the text of {', '.join(readable)} lies where every Python process reads (the interpreter or the"
            " system): a job could read its val documents there. Keep data elsewhere to close that."
        )
    lines.append(_model(agent, reader, asked))
    return lines


def _trained(study: Study) -> list[str]:
    """Say which model is trained, and how much of it; nothing of a fresh one, whose shape the config tells."""
    base = study.base
    if base is None:
        return []
    every = parameters(study.baseline, vocabulary=study.vocabulary, base=base)
    trained = trained_parameters(study.baseline, vocabulary=study.vocabulary, base=base)
    how = "all of its weights" if trained == every else f"an adapter of {trained / 1e6:.2f} million parameters"
    held = {"nf4": " in 4 bits", "nf4_double": " in 4 bits"}.get(study.baseline.quantization, "")
    at = f" at {base.revision[:12]}" if base.revision else ""
    lines = [
        f"Base model: {base.name}{at} ({base.architecture}, {base.parameters / 1e6:.1f} million parameters{held}); the"
        f" baseline trains {how}, method {study.baseline.method}."
    ]
    return lines + _rows(study) + [f"Note on the base model: {note}" for note in base.notes]


def _rows(study: Study) -> list[str]:
    """Say what a step of the baseline costs where its rows are padded, and how many steps that usually gives."""
    lengths, baseline = study.lengths, study.baseline
    if lengths is None or packs(baseline):
        return []
    positions = usual_positions(baseline, lengths)
    assert positions is not None
    padding = padding_share(baseline, lengths)
    said = (
        f"Rows: a training {'pair' if baseline.preference else 'document'} takes {lengths.shortest:,} to"
        f" {lengths.longest:,} tokens. A step of the baseline takes about {positions:,.0f}, {padding:.0%} of it padding"
    )
    if study.budget.kind == "seconds":
        return [f"{said}."]
    per_token = flops_per_token(baseline, vocabulary=study.vocabulary, base=study.base)
    steps = study.budget.amount / (positions * (per_token if study.budget.kind == "flops" else 1))
    lines = [f"{said}: about {steps:,.0f} steps within {study.budget}."]
    if steps < study.policy.proposals.minimum_steps:
        lines.append(
            f"WARNING: the policy asks for {study.policy.proposals.minimum_steps} steps, and the baseline usually gets"
            f" {steps:.0f}: take a larger budget or a smaller batch."
        )
    return lines


def _untouched(study: Study) -> list[str]:
    """Say that the base is scored first, and what the guard set allows; nothing where a fresh model is trained."""
    if study.base is None:
        return []
    lines = ["The untouched base model is scored before anything is trained: what does not beat it is worth nothing."]
    guard = study.file.eval.guard
    if guard is not None:
        lines.append(
            f"Guard set: nothing is kept that is more than {guard.max_regression:g} bits per byte worse than the"
            " untouched base on it."
        )
    return lines


def _model(agent: Agent, reader: Reader, asked: str | None) -> str:
    """Say what leaves the machine towards a language model, and what that may cost."""
    if asked is None:
        unused = "" if agent.llm is None else f" Proposer {agent.proposer} asks no language model, so not {agent.llm}."
        return f"Nothing leaves this machine and nothing is spent: the proposer works offline.{unused}"
    provider, model = provider_and_model(asked)
    used = sum(call.tokens for call in reader.calls())
    caps = [
        *([f"${agent.max_usd:.2f}"] if agent.max_usd is not None else []),
        *([f"{agent.max_tokens:,} tokens"] if agent.max_tokens is not None else []),
    ]
    most = f"at most {' and '.join(caps)} in all" if caps else "without a cap (--max-usd, --max-tokens)"
    return (
        f"Model {model} at {_address(provider)} is shown what `overnight briefing {reader.study().name}` prints and"
        " nothing else: settings, rounded scores, curves, errors, program.md; no text of the data. It may use"
        f" {most}; {used:,} tokens are used so far."
    )


def _address(provider: str) -> str:
    """Return whom a provider's SDK will ask: host and port of a base URL, without the password that may be in it."""
    url = os.environ.get(f"{provider.upper()}_BASE_URL", "").strip()
    if not url:
        return provider
    parts = urllib.parse.urlsplit(url)
    return parts.netloc.rpartition("@")[2] or "an address that cannot be read"


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
