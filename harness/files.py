"""Files appear whole or not at all: write beside, fsync, rename.

A study must survive ``kill -9`` between any two system calls, so whatever another process may read (a manifest, a
checkpoint, a data set) gets its final name only when every byte of it is on the disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from harness.errors import CheckFailed

CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
"""Another device, a file system without hard links, or a kernel that forbids linking to other people's files."""


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` by a file with ``text``; a reader sees the old file or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: a rename is on the disk only after its folder was synced."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Walk everything below ``folder`` in order of names, without following symbolic links; folders are not yielded."""
    with os.scandir(folder) as scan:
        found = sorted(scan, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from entries(Path(entry.path))
        else:
            yield entry


def regular_files(folder: Path) -> list[Path]:
    """Return every file below ``folder``, relative to it and sorted; `CheckFailed` for a link or a device.

    A training child can write what it likes into its own folder; a link in there would make the driver read or publish
    a file that the child itself may not open.
    """
    found = []
    for entry in entries(folder):
        if not entry.is_file(follow_symlinks=False):
            raise CheckFailed(f"{entry.path} is not a regular file: links and devices are not taken over")
        found.append(Path(entry.path).relative_to(folder))
    return found


def link_or_copy(source: Path, target: Path) -> None:
    """Give ``source`` a second name; where the file system cannot, copy it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        with source.open("rb") as read, target.open("xb") as write:
            shutil.copyfileobj(read, write, 1 << 20)
            write.flush()
            os.fsync(write.fileno())


def link_tree(source: Path, target: Path) -> None:
    """Make ``target`` a folder with the same files as ``source`` (hard links, copies across devices), synced."""
    names = regular_files(source)
    target.mkdir(parents=True)
    folders = {target}
    for name in names:
        inside = target / name
        inside.parent.mkdir(parents=True, exist_ok=True)
        folders.add(inside.parent)
        link_or_copy(source / name, inside)
        # A hard link shares the bytes of a file whose writer may never have synced it.
        descriptor = os.open(inside, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for folder in folders:
        sync_folder(folder)
