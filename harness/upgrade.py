"""Tells a tool that was upgraded since a study was sealed from one that was tampered with.

A changed file of sealed code looks the same either way. What sets an upgrade apart is written down elsewhere: the
ledger and the manifest hold the version of overnight that sealed, and the installer holds digests of the files that it
brought. So changed code is an upgrade only under another version of overnight, and only where it is what that version's
installer brought; a checkout has no such list, and is taken at its word. Other package versions speak for themselves.
A question (data, tokenizer, rules) has no upgrade. After one a study can be verified and replayed, never searched on.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.seal import ADDED, CHANGED, MISSING, Change, Code, Manifest, Seal, sentence

TOOL_CHANGED = "tool_changed"
"""Kind of the event that says under which other tool a replay ran."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Another tool than the one that sealed."""

    before: str
    """Version of overnight that sealed."""
    now: str
    changes: tuple[Change, ...]

    @property
    def versions(self) -> str:
        """Which overnight sealed, and which this is."""
        if self.before == self.now:
            return f"overnight {self.before} sealed the study with other packages"
        return f"overnight {self.before} sealed the study, this is overnight {self.now}"

    def __str__(self) -> str:
        return f"{self.versions}: {sentence(self.changes)}"


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is not as it was sealed, told apart."""

    faults: tuple[Change, ...]
    """The question has changed, or the tool in a way that no upgrade explains."""
    upgrade: Upgrade | None


@dataclass(frozen=True, slots=True)
class Tool:
    """What a replay runs under."""

    manifest: Manifest
    """The study's question under the code and the versions that run."""
    upgrade: Upgrade | None
    """None: it is the tool that sealed."""

    @property
    def seal(self) -> str:
        """Digest of what runs; the study's own seal unless there was an upgrade."""
        return self.manifest.root

    def facts(self) -> dict[str, Any]:
        """Return what the event says, enough to compute `seal` again."""
        return {
            "seal": self.seal,
            "overnight": self.manifest.tool,
            "code": self.manifest.code,
            "versions": self.manifest.versions,
        }


def inspect(seal: Seal, *, thorough: bool, installed: Mapping[str, str] | None = None) -> Inspection:
    """Look at everything sealed. ``installed`` are the installer's digests, asked for unless given."""
    before, now = seal.manifest.tool, seal.code.tool()
    faults: list[Change] = []
    changes: list[Change] = []
    for change in seal.changes(thorough=thorough):
        is_new_code = change.part == "code" and before != now and change.what in (ADDED, CHANGED, MISSING)
        (changes if is_new_code or change.part == "versions" else faults).append(change)
    if any(change.part == "code" for change in changes):
        faults += _unlike_installed(seal.code, installed_digests() if installed is None else installed)
    return Inspection(tuple(faults), Upgrade(before, now, tuple(changes)) if changes else None)


def tool_of(seal: Seal, *, thorough: bool) -> Tool:
    """Return the tool that a replay runs under now; `SealBroken` if anything but an upgrade stands between."""
    found = inspect(seal, thorough=thorough)
    if found.faults:
        raise seal.broken([*found.faults, *(found.upgrade.changes if found.upgrade else ())])
    if found.upgrade is None:
        return Tool(seal.manifest, None)
    return Tool(seal.under_this_tool(), found.upgrade)


def is_truthful(sealed: Manifest, facts: Mapping[str, Any]) -> bool:
    """Tell whether the facts of an event give the seal that they name, and another one than the study's."""
    if "seal" not in facts:
        return False
    try:
        now = {part: dict(facts[part]) for part in ("code", "versions")}
        root = sealed.model_copy(update=now).root
    except (KeyError, TypeError, ValueError):
        return False
    return bool(facts["seal"] == root != sealed.root)


def installed_digests() -> dict[str, str]:
    """Return the SHA-256 of every file that the installer brought; of a checkout, those are none of our modules."""
    found = {}
    for file in importlib.metadata.distribution("overnight").files or ():
        if file.hash is not None and file.hash.mode == "sha256":
            found[file.as_posix()] = base64.urlsafe_b64decode(file.hash.value + "==").hex()
    return found


def _unlike_installed(code: Code, installed: Mapping[str, str]) -> Iterator[Change]:
    files = code.files()
    if not files.keys() & installed.keys():
        return
    for name, path in sorted(files.items()):
        if name not in installed:
            yield Change("imports", name, f"is no part of overnight {code.tool()} as it was installed")
        elif _digest(path) != installed[name]:
            yield Change("imports", name, f"is not what overnight {code.tool()} installed")


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else None
