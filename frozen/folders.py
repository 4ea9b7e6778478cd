"""Which files of a folder are a source's: what is left out, and what leads out of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

_SUFFIXES = (
    "txt text md markdown rst adoc tex org log csv tsv html htm xml yaml yml toml ini cfg py pyi c h cc "
    "cpp hpp cu rs go java kt js jsx ts tsx css sh bash sql r jl lua rb php pl scala swift hs ml "
)
TEXT_SUFFIXES = frozenset(f".{suffix}" for suffix in _SUFFIXES.split())
"""In a folder, files with these suffixes are read as text. A file that is named itself may have any."""
Reject = Callable[[str, str], None]
"""Is told a place in the folder and why it is left out."""


def files_of(folder: Path, reject: Reject) -> Iterator[Path]:
    """Yield regular files in a fixed order, and note the links that lead nowhere or out of the folder.

    What lies outside is not what its owner named: it may be half a disk, or the held-out text of another study. Links
    to files within are read like the files that they stand for; links to folders are never entered, so nothing loops,
    and what they lead to within is read in its own place.
    """
    border = os.path.realpath(folder)

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if _is_looked_into(Path(root, name)))
        for name in sorted([*names, *(name for name in folders if Path(root, name).is_symlink())]):
            path = Path(root, name)
            if name.startswith("."):
                continue
            fault = _fault_of_link(path, border) if path.is_symlink() else None
            if fault is not None:
                reject(path.relative_to(folder).as_posix(), fault)
            elif path.is_file():
                yield path


def _fault_of_link(path: Path, border: str) -> str | None:
    if not path.exists():
        return "a link that leads nowhere"
    target = os.path.realpath(path)
    return (
        None if os.path.commonpath((border, target)) == border else f"a link that leads out of the folder, to {target}"
    )


def _is_looked_into(folder: Path) -> bool:
    """Tell whether a folder may hold text of the owner's.

    Hidden folders and bytecode do not, and neither does the folder of a study: else one study's held-out text would
    be the next one's source, and the same command would read something else every time.
    """
    is_study = (folder / "study.toml").is_file() and (folder / "ledger.db").is_file()
    return not (folder.name.startswith(".") or folder.name == "__pycache__" or is_study)
