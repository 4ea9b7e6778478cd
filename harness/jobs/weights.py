"""Tensors out of a folder and into one: by exact name and shape from one plain file, and whole or not at all."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from harness.jobs.failures import WeightsRefused

WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ONE_FILE = "1000GB"
"""Shard size above any model: what is scored is read from a single file."""

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """Return the shape of every tensor by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def read_tensors(folder: Path, file: str, expected: Shapes) -> dict[str, torch.Tensor]:
    """Return the tensors of one file, which must hold exactly those that are expected.

    `WeightsRefused` if the file is missing, is no plain file, or holds anything else.
    """
    path = folder / file
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise WeightsRefused(f"there is no {file} in {folder}") from None
    if not stat.S_ISREG(mode):
        raise WeightsRefused(f"{path} is no plain file: a link could lead to weights that this job did not train")
    tensors: dict[str, torch.Tensor] = load_file(path)
    found = shapes_of(tensors)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise WeightsRefused(
            f"{path} does not hold the config's model: {name} is {found.get(name, 'missing')} in the file,"
            f" {expected.get(name, 'not there')} in the model ({len(wrong)} tensors differ)"
        )
    return tensors


def write_whole(folder: Path, tokenizer: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a new folder beside the tokenizer's files, and put it where ``folder`` is."""
    aside = folder.with_name(f"{folder.name}.new")
    for leftover in (aside, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    shutil.copytree(tokenizer, aside)  # first: nothing of it may replace weights
    write(aside)
    aside.replace(folder)
