"""Publish checkpoints whole, keep those of the lineage, prune the losers.

A checkpoint's name holds its lineage node and its digest, so publishing twice is publishing once, and a folder that is
there is complete. Publishing comes before the row that mentions it: after a crash a checkpoint may lack its row for a
moment, a row never lacks its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from harness.disk import RESERVE_BYTES, readable, shortfall_bytes, used_bytes
from harness.errors import CheckFailed, StoppedEarly
from harness.files import link_tree, regular_files, sha256_of, sync_folder
from harness.paths import StudyPaths

_ASIDE = ".aside-"


def digest_of(folder: Path, *, besides: Collection[str] = ()) -> str:
    """Return the digest of a model folder: SHA-256 over the names and digests of all its files but ``besides``.

    `CheckFailed` if it is no folder, is empty, or holds links or devices.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise CheckFailed(f"there is no model folder {folder}")
    names = [name for name in regular_files(folder) if name.as_posix() not in besides]
    files = {name.as_posix(): sha256_of(folder / name) for name in names}
    if not files:
        raise CheckFailed(f"the model folder {folder} is empty")
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def folder_of(paths: StudyPaths, node: int, digest: str) -> Path:
    """Return where the checkpoint of a lineage node lies, or would lie."""
    return paths.lineage / f"{node:05d}-{digest[:16]}"


def publish(paths: StudyPaths, trial: int, node: int, *, expected: str | None = None) -> str:
    """Make the trial's model the checkpoint of a lineage node, whole or not at all; return its digest.

    ``expected`` is the digest that was taken when the trial was scored: `CheckFailed` if the files are others by now.
    If the trial's own folder was pruned and the checkpoint is already there, that is as good.
    """
    source = paths.trial(trial).weights
    if expected is not None and not source.exists() and (there := folder_of(paths, node, expected)).exists():
        check(there, expected)
        return expected
    digest = digest_of(source)
    if expected is not None and digest != expected:
        raise CheckFailed(f"the model of trial {trial} changed after it was scored: {source} is not published")
    target = folder_of(paths, node, digest)
    if target.exists():
        check(target, digest)
        return digest
    aside = paths.lineage / f"{_ASIDE}{os.getpid()}-{target.name}"
    paths.lineage.mkdir(exist_ok=True)
    try:
        link_tree(source, aside)
        check(aside, digest)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(paths.lineage)
    return digest


def check(folder: Path, digest: str) -> None:
    """Raise `CheckFailed` unless the folder's files give ``digest``."""
    if digest_of(folder) != digest:
        raise CheckFailed(f"the checkpoint {folder} has changed since it was published")


def prune(paths: StudyPaths, keep: Collection[int]) -> int:
    """Delete the weights of every trial not in ``keep`` and remains of broken publications; return the bytes freed.

    Config, curve and log of a trial stay. Published checkpoints have names of their own for the same bytes and stay
    too; what is shared with them is not counted as freed.
    """
    before = used_bytes(paths.root)
    for folder in sorted(paths.trials.iterdir()) if paths.trials.exists() else []:
        if folder.name.isdigit() and int(folder.name) not in keep:
            shutil.rmtree(paths.trial(int(folder.name)).train, ignore_errors=True)
    if paths.lineage.exists():
        for left in paths.lineage.glob(f"{_ASIDE}*"):
            shutil.rmtree(left, ignore_errors=True)
    return before - used_bytes(paths.root)


def make_room(paths: StudyPaths, keep: Collection[int], need_bytes: int, *, reserve_bytes: int = RESERVE_BYTES) -> int:
    """See to it that ``need_bytes`` can be written and the reserve stays; return the bytes freed by pruning.

    `StoppedEarly` if pruning is not enough: the search pauses before the disk is full.
    """
    if not shortfall_bytes(paths.root, need_bytes, reserve_bytes):
        return 0
    freed = prune(paths, keep)
    missing = shortfall_bytes(paths.root, need_bytes, reserve_bytes)
    if missing:
        raise StoppedEarly(
            f"the disk of {paths.root} is nearly full: the next trial needs {readable(need_bytes)} and"
            f" {readable(reserve_bytes)} stay reserved, {readable(missing)} are missing after pruning"
            f" {readable(freed)}; make room and run again"
        )
    return freed
