"""One file from which a long training job goes on, bit for bit: written whole or not at all.

It is read by the job that wrote it and by nobody else, and holds tensors and plain values only.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from frozen.timer import Timer
from harness.jobs.job import TrainJob

_FILE = "resume.pt"


@dataclass(frozen=True, slots=True)
class Resume:
    """Everything that the rest of the training depends on; the loader's place follows from the timer's steps."""

    model: dict[str, torch.Tensor]
    """The weights that are trained; what is frozen, the job builds again."""
    optimizer: dict[str, Any]
    timer: dict[str, Any]
    points: int
    """Probe points reported so far."""
    random: torch.Tensor
    random_of_device: torch.Tensor | None


def save(
    job: TrainJob,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    timer: Timer,
    points: int,
    on_gpu: bool,
) -> None:
    """Replace the job's resume file by the state of this moment, between two steps."""
    state = {
        "identity": _identity(job),
        "model": _trained(model),
        "optimizer": optimizer.state_dict(),
        "timer": timer.state(),
        "points": points,
        "random": torch.get_rng_state(),
        "random_of_device": torch.cuda.get_rng_state() if on_gpu else None,
    }
    aside = job.folder / f"{_FILE}.new"
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(job.folder / _FILE)
    _sync_folder(job.folder)


def load(job: TrainJob) -> Resume | None:
    """Return where an earlier run of this job stopped, None if there was none or its file is damaged (the log says so).

    `ValueError` if the file is of another config, seed or budget.
    """
    path = job.folder / _FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:  # a disk that lost what it had acknowledged
        sys.stderr.write(f"{path} cannot be read ({error}): training starts over\n")
        return None
    if state["identity"] != _identity(job):
        raise ValueError(f"{path} belongs to another config, seed or budget: remove it to train from the start")
    return Resume(**{field.name: state[field.name] for field in fields(Resume)})


def restore(model: torch.nn.Module, trained: dict[str, torch.Tensor]) -> None:
    """Put the trained weights back."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in trained.items():
            parameters[name].copy_(tensor)


def clear(job: TrainJob) -> None:
    """Remove the file of a job whose model is saved."""
    (job.folder / _FILE).unlink(missing_ok=True)


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def _identity(job: TrainJob) -> str:
    start = "" if job.start is None else f" from {job.start}"
    return f"{job.config.digest} seed {job.seed} budget {job.budget}{start}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
