"""Digests of everything that a score depends on; verify, or say which file differs.

Two scores can be compared only if the same code measured them on the same data under the same rules. The manifest
``seal.json`` holds a SHA-256 for each of these things, and its root digest is written on every row of the ledger, so
that neither a changed file nor a rewritten manifest goes unseen. What is sealed is a question (data, tokenizer, rules)
and the tool that answers it (code, package versions); `harness.upgrade` tells a new tool from a damaged one. Times and
modes of files are no evidence (they can be forged): bytes are. A file is hashed again unless the kernel says that it is
untouched since this process hashed it.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import stat
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

import frozen
import harness
from harness import bytecode
from harness.config import explain
from harness.errors import BadInput, SealBroken
from harness.files import entries, write_whole
from harness.paths import StudyPaths
from harness.records import Record

FOLDERS = ("frozen", "harness/jobs")
"""Sealed whole: every file in them, and nothing may be added."""
MODULES = ("harness/__init__.py", "harness/config.py", "harness/errors.py", "harness/records.py", "harness/sizes.py")
"""What the code in `FOLDERS` imports of ours besides (a test follows the imports)."""
VERDICT = ("harness/judge.py", "harness/noise.py", "harness/walk.py")
"""What a decision depends on besides scores and policy: a loosened rule must not pass for the study's."""
PACKAGES = ("overnight", "torch", "transformers", "peft", "trl", "tokenizers", "bitsandbytes", "schedulefree")
SECTIONS = ("study", "baseline", "eval")
"""Sealed sections of study.toml; the others may change."""
LINK = "is a symbolic link"
"""What is said of one, and what stands in the place of its digest: what it points to is not in the study's hands."""
RACY_NS = 2_000_000_000
"""A file modified this shortly before it was hashed could change again within the same tick of its clock."""

Part = Literal["imports", "code", "versions", "data", "settings"]
"""``imports`` is what would be imported in the place of the sealed code, and has no entries of its own."""
ADDED, CHANGED, MISSING = "was added", "has changed", "is missing"
Digest = Callable[[Path], str]


class Change(NamedTuple):
    """One sealed thing that is not as it was."""

    part: Part
    name: str
    """File relative to the code or the study folder, package, or section."""
    what: str
    """``has changed``, ``is missing``, ``was added``, …"""

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


class Manifest(Record):
    """The contents of ``seal.json``. Every part maps a name to a SHA-256, ``versions`` to a version."""

    version: Literal[1] = 1
    tool: str
    """Version of overnight that sealed; tells an upgrade from a change. Not part of the root."""
    created: str
    code: dict[str, str]
    versions: dict[str, str]
    data: dict[str, str]
    settings: dict[str, str]

    @property
    def root(self) -> str:
        """SHA-256 over all parts: the study's seal."""
        parts = {part: dict(sorted(getattr(self, part).items())) for part in ("code", "versions", "data", "settings")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def tool_version() -> str:
    """Return the installed version of overnight."""
    return importlib.metadata.version("overnight")


def package_versions() -> dict[str, str]:
    """Return the installed versions of `PACKAGES`; what is not installed is left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Code:
    """Where our packages lie, and where ``frozen`` was really imported from: a folder of that name could shadow it."""

    root: Path = field(default_factory=lambda: Path(str(harness.__file__)).parent.parent)
    imported: Path = field(default_factory=lambda: Path(str(frozen.__file__)).parent)
    tool: Callable[[], str] = tool_version
    """Asked anew each time, like the versions: an installer may run beside a search."""
    versions: Callable[[], dict[str, str]] = package_versions

    def shadow(self) -> Iterator[Change]:
        """Yield a change if ``frozen`` is not the package beside ``harness``."""
        if self.imported.resolve() != (self.root / "frozen").resolve():
            yield Change("imports", "frozen", f"was imported from {self.imported}, not from {self.root / 'frozen'}")

    def files(self) -> dict[str, Path]:
        """Return everything that lies where sealed code lies, by name relative to the root; bytecode caches apart."""
        found = {name: self.root / name for name in (*MODULES, *VERDICT) if _exists(self.root / name)}
        for folder in FOLDERS:
            found |= _below(self.root / folder, self.root)
        stems = {Path(name).stem for name in (*MODULES, *VERDICT)}
        for entry in os.scandir(self.root / "harness"):
            # A package or extension module of the same name would be imported in the place of the sealed module.
            if entry.name.partition(".")[0] in stems:
                found[f"harness/{entry.name}"] = Path(entry.path)
        return {name: path for name, path in found.items() if "__pycache__" not in path.parts}

    def bytecode_faults(self, prefix: Path) -> Iterator[Change]:
        """Yield bytecode of sealed modules that says something else than they do.

        Looked at are the folders beside the sources, and those that the children use below ``prefix``
        (``-X pycache_prefix`` mirrors the whole path of the sources there).
        """
        stems = {self.root / "harness": frozenset(Path(name).stem for name in (*MODULES, *VERDICT))}
        for folder in FOLDERS:
            for path in [self.root / folder, *(self.root / folder).rglob("*")]:
                if "__pycache__" not in path.parts and path.is_dir() and not path.is_symlink():
                    stems[path] = frozenset(source.stem for source in path.glob("*.py"))
        for sources, known in stems.items():
            for place in dict.fromkeys((sources, sources.resolve())):
                yield from self._faults_in(prefix.joinpath(*place.parts[1:]), sources, known)
            yield from self._faults_in(sources / "__pycache__", sources, known)

    def _faults_in(self, cache: Path, sources: Path, stems: frozenset[str]) -> Iterator[Change]:
        if not _exists(cache):
            return
        if cache.is_symlink() or not cache.is_dir():
            yield Change("imports", self._name(cache), "is not a folder")
            return
        for path in sorted(cache.iterdir()):
            if sources == self.root / "harness" and path.name.partition(".")[0] not in stems:
                continue  # unsealed modules of the harness keep their bytecode here too
            if (
                cache.name != "__pycache__"
                and path.is_dir()
                and not path.is_symlink()
                and (sources / path.name).is_dir()
            ):
                continue  # below the prefix, folders mirror those of the sources
            try:
                what = bytecode.fault(path, sources, stems)
            except FileNotFoundError:
                continue  # replaced by another process at this moment; it is looked at again before the next trial
            if what:
                yield Change("imports", self._name(path), what)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _below(folder: Path, root: Path) -> dict[str, Path]:
    """Return all files below ``folder`` by name; a link in the place of the folder is returned as itself."""
    if folder.is_symlink() or not folder.is_dir():
        return {str(folder.relative_to(root)): folder} if _exists(folder) else {}
    return {str(Path(entry.path).relative_to(root)): Path(entry.path) for entry in entries(folder)}


def _settings(paths: StudyPaths) -> dict[str, str]:
    """Return digests of the policy's bytes and of the values (not the spelling) of study.toml's sealed sections."""
    try:
        document = tomllib.loads(paths.study_toml.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SealBroken(f"{paths.study_toml} cannot be read: {error}") from error
    found = {}
    for section in SECTIONS:
        text = json.dumps(document.get(section, {}), sort_keys=True, separators=(",", ":"), default=str)
        found[f"study.toml [{section}]"] = hashlib.sha256(text.encode()).hexdigest()
    if paths.policy_toml.is_symlink():
        found["policy.toml"] = LINK
    elif paths.policy_toml.is_file():
        found["policy.toml"] = hashlib.sha256(paths.policy_toml.read_bytes()).hexdigest()
    return found


class _Hasher:
    """SHA-256 of files, remembered in memory for those that the kernel says are untouched."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}

    def digest(self, path: Path, *, thorough: bool) -> str:
        """Return the digest of a regular file; OSError if it is none or cannot be read."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            before = self._identity(file.fileno())
            known = self._known.get(path)
            if known and known[0] == before and not thorough:
                return known[1]
            began = time.time_ns()
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if self._identity(file.fileno()) == before and began - max(before[3:]) > RACY_NS:
                self._known[path] = (before, digest)
            else:
                self._known.pop(path, None)
            return digest

    @staticmethod
    def _identity(descriptor: int) -> tuple[int, ...]:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Seal:
    """The seal of one study. Keep one object per driver: it remembers what it hashed."""

    def __init__(
        self, paths: StudyPaths, manifest: Manifest, code: Code, recorded: str | None, recorded_tool: str | None
    ) -> None:
        self._paths = paths
        self._manifest = manifest
        self._code = code
        self._recorded = recorded
        self._recorded_tool = recorded_tool
        self._hasher = _Hasher()

    @classmethod
    def take(cls, paths: StudyPaths, *, code: Code | None = None) -> Seal:
        """Seal a study folder whose data, study.toml and policy.toml are in place, and write its manifest.

        `SealBroken` if there are links among the files or bytecode that does not belong to its source.
        """
        code = code or Code()
        faults = [*code.shadow(), *code.bytecode_faults(paths.bytecode)]
        hasher = _Hasher()
        parts: dict[Part, dict[str, str]] = {"code": {}, "data": {}}
        present: dict[Part, dict[str, Path]] = {
            "code": code.files(),
            "data": _below(paths.root / "data", paths.root),
        }
        for part, files in present.items():
            for name, path in files.items():
                try:
                    parts[part][name] = hasher.digest(path, thorough=True)
                except OSError as error:
                    faults.append(Change(part, name, f"cannot be sealed ({error.strerror or error})"))
        settings = _settings(paths)
        faults += [Change("settings", name, LINK) for name, digest in settings.items() if digest == LINK]
        if faults:
            raise SealBroken(f"the study cannot be sealed: {sentence(faults)}")
        manifest = Manifest(
            tool=code.tool(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            code=parts["code"],
            data=parts["data"],
            versions=code.versions(),
            settings=settings,
        )
        document = manifest.model_dump() | {"root": manifest.root}
        write_whole(paths.seal_json, json.dumps(document, indent=1, sort_keys=True) + "\n")
        return cls(paths, manifest, code, manifest.root, manifest.tool)

    @classmethod
    def load(
        cls, paths: StudyPaths, *, recorded: str | None, recorded_tool: str | None = None, code: Code | None = None
    ) -> Seal:
        """Read the manifest of a study. ``recorded`` is the root that the ledger holds (None: not known).

        ``recorded_tool`` is the version of overnight that the ledger holds: the root does not cover the manifest's.

        `BadInput` if a newer version wrote it, `SealBroken` if it cannot be read or contradicts its own root.
        """
        try:
            document = json.loads(paths.seal_json.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SealBroken(f"{paths.seal_json} cannot be read: {error}") from error
        if not isinstance(document, dict):
            raise SealBroken(f"{paths.seal_json} is not a seal: it holds no object")
        version, root = document.get("version"), document.pop("root", None)
        if isinstance(version, int) and version > 1:
            raise BadInput(f"{paths.root} was made by a newer version of overnight (seal format {version}): upgrade")
        try:
            manifest = Manifest.model_validate(document)
        except ValidationError as error:
            raise SealBroken(f"{paths.seal_json} is not a seal: {explain(error)}") from error
        if root != manifest.root:
            raise SealBroken(f"{paths.seal_json} has changed: its entries do not give its own root digest")
        return cls(paths, manifest, code or Code(), recorded, recorded_tool)

    @property
    def digest(self) -> str:
        """Root digest, as written on every trial's row."""
        return self._manifest.root

    @property
    def manifest(self) -> Manifest:
        """What was sealed."""
        return self._manifest

    @property
    def code(self) -> Code:
        """The tool as it is installed now."""
        return self._code

    def verify(self, *, thorough: bool = False) -> str:
        """Return the root digest, or raise `SealBroken` with every file that changed, is missing or was added.

        Unless ``thorough``, a file is not read again if device, inode, size and both times are as at its last hash.
        """
        found = self.changes(thorough=thorough)
        if found:
            raise self.broken(found)
        return self.digest

    def broken(self, changes: list[Change]) -> SealBroken:
        """Return the error that names what changed, and the way on."""
        before, now = self._manifest.tool, self._code.tool()
        tools = f" (overnight {before} sealed it, this is overnight {now})" if before != now else ""
        return SealBroken(
            f"the seal of {self._paths.name} is broken: {sentence(changes)}{tools}. Scores from before and after cannot"
            " be compared: put back what was sealed, or go on with what was found in a new study:"
            f" `overnight init NEW --from {self._paths.name}`"
        )

    def under_this_tool(self) -> Manifest:
        """Return the manifest of the same question under code and versions as they are now."""
        hashed = {name: self._hasher.digest(path, thorough=False) for name, path in self._code.files().items()}
        now = {"tool": self._code.tool(), "code": hashed, "versions": self._code.versions()}
        return self._manifest.model_copy(update=now)

    def changes(self, *, thorough: bool = False) -> list[Change]:
        """Return everything that is not as it was sealed, in order of parts and names."""
        found = [*self._code.shadow(), *self._code.bytecode_faults(self._paths.bytecode)]
        if self._recorded is not None and self._recorded != self.digest:
            found.append(Change("settings", "seal.json", "is not the one that the ledger recorded"))
        if self._recorded_tool not in (None, self._manifest.tool):
            what = f"names overnight {self._manifest.tool}, but the ledger recorded {self._recorded_tool}"
            found.append(Change("settings", "seal.json", what))

        def digest(path: Path) -> str:
            return self._hasher.digest(path, thorough=thorough)

        found += _compare("code", self._manifest.code, self._code.files(), digest)
        found += _compare("data", self._manifest.data, _below(self._paths.root / "data", self._paths.root), digest)
        found += _compare_values("versions", self._manifest.versions, self._code.versions())
        found += _compare_values("settings", self._manifest.settings, _settings(self._paths))
        return found


def _compare(part: Part, sealed: dict[str, str], present: dict[str, Path], digest: Digest) -> Iterator[Change]:
    for name in sorted(sealed.keys() | present.keys()):
        if name not in present:
            yield Change(part, name, MISSING)
        elif present[name].is_symlink():
            yield Change(part, name, LINK)
        elif name not in sealed:
            yield Change(part, name, ADDED)
        else:
            try:
                same = digest(present[name]) == sealed[name]
            except OSError as error:
                yield Change(part, name, f"cannot be read ({error.strerror or error})")
                continue
            if not same:
                yield Change(part, name, CHANGED)


def _compare_values(part: Part, sealed: dict[str, str], present: dict[str, str]) -> Iterator[Change]:
    for name in sorted(sealed.keys() | present.keys()):
        if name not in present:
            yield Change(part, name, MISSING)
        elif present[name] == LINK:
            yield Change(part, name, LINK)
        elif name not in sealed:
            yield Change(part, name, ADDED)
        elif present[name] != sealed[name]:
            change = f"is {present[name]}, not {sealed[name]}" if part == "versions" else CHANGED
            yield Change(part, name, change)


def sentence(changes: Sequence[Change], most: int = 12) -> str:
    """Name the first ``most`` changes, and how many there are besides."""
    text = "; ".join(map(str, changes[:most]))
    return f"{text}; and {len(changes) - most} more" if len(changes) > most else text
