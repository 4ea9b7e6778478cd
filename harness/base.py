"""A base model, from what a person names to a prepared folder in the cache that studies link.

A name is a local folder, a GGUF file or an id on the Hub, in this order. Whatever it is, what a study keeps has one
layout: config, safetensors weights, fast tokenizer, chat template, ``base.json``. Folders are named by the digest of
what they were made from and appear whole or not at all; a second study on the same model prepares nothing. Bytes are
hashed once on the way in, and once by the study's seal, which must find what was prepared (`check_sealed`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import disk, files, hub
from harness.errors import BadInput
from harness.jobs.convert import Conversion
from harness.jobs.facts import facts_of as facts_of
from harness.jobs.facts import shapes_of, weight_files
from harness.sizes import BaseFacts
from harness.warm import environment

RECIPE = 2
"""Counts changes of how a base model is prepared; part of the cache's digest."""
READ_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
              "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt",
              "vocab.txt", "spiece.model", "model.safetensors.index.json")  # fmt: skip
"""Of a model folder, beside the weights."""
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
MANIFEST = "manifest.json"
FACTS = "base.json"
COMMAND = (sys.executable, "-I", "-m", "harness.jobs.convert")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A prepared base model."""

    folder: Path
    facts: BaseFacts
    digests: Mapping[str, str]
    """SHA-256 of every file but ``base.json``, by name, as they were when the folder was made."""
    remedy: str = "it is not as it was when the base model was prepared: remove its folder and make the study again"
    """What to say where the bytes have changed since."""

    def link(self, target: Path) -> None:
        """Give the folder a second name inside a study, with the facts as this study's owner named the model."""
        files.link_tree(self.folder, target)
        (target / MANIFEST).unlink(missing_ok=True)
        files.write_whole(target / FACTS, self.facts.model_dump_json(indent=1) + "\n")

    def check_sealed(self, sealed: Mapping[str, str]) -> None:
        """Raise `BadInput` unless the seal found the bytes that were prepared; ``sealed`` is its part ``data``."""
        prefix = "data/base/"
        found = {name.removeprefix(prefix): digest for name, digest in sealed.items() if name.startswith(prefix)}
        found.pop(FACTS, None)
        wrong = sorted(name for name in found.keys() | self.digests.keys() if found.get(name) != self.digests.get(name))
        if wrong:
            raise BadInput(f"{self.folder / wrong[0]}: {self.remedy}")


def locate(name: str, *, revision: str | None = None) -> Path | None:
    """Return the local folder or file that a name stands for, or None for one on the Hub; `BadInput` if for neither."""
    if not name.strip():
        raise BadInput("--model names nothing: give a folder, a GGUF file or an id on the Hub")
    path = Path(name).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError) as error:
        raise BadInput(f"{name!r} is no name of a model") from error
    if there:
        if revision is not None:
            raise BadInput(f"--revision {revision} names a commit on the Hub, but {name} is on this machine")
        return path
    if name.lower().endswith(".gguf") or name.startswith((".", "/", "~")) or not hub.is_id(name):
        raise BadInput(f"there is no model folder or file {name!r}, and it cannot be the id of one on the Hub")
    return None


def prepare_base(name: str, revision: str | None, cache: Path, say: Say) -> Base:
    """Return the prepared model of this name, made now unless it lies in ``cache``; `BadInput` says what is wrong."""
    source, commit = locate(name, revision=revision), None
    if source is None:
        say(f"Fetching the base model {name} from the Hub.")
        source, commit = hub.fetch_model(name, revision)
    elif hub.is_id(name):
        say(f"The base model {name} is what has that name in this folder, not one on the Hub.")
    originals = _originals(source)
    hashed = {path.name: files.sha256_of(path) for path in originals}
    weights = {path.name: hashed[path.name] for path in originals if path.suffix in (".safetensors", ".gguf")}
    digest = _digest(weights)
    folder = cache / "models" / _digest({"recipe": str(RECIPE)} | _tools() | hashed)
    _sweep(folder.parent)
    if not _is_whole(folder):
        if folder.exists():
            shutil.rmtree(folder)
        size = sum(path.stat().st_size for path in originals)
        say(f"Preparing the base model {name} ({disk.readable(size)}).")
        _make(Conversion(
            source=source.resolve(), target=folder, name=name, revision=commit, digest=digest,
            reserve_bytes=disk.RESERVE_BYTES,
        ), originals, linked=commit is not None)  # fmt: skip
    facts = BaseFacts.read(folder).model_copy(update={"name": name, "revision": commit})
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return Base(folder=folder, facts=facts, digests={name: entry["sha256"] for name, entry in manifest.items()})


def _originals(source: Path) -> list[Path]:
    """Return the files that a model is made of; `BadInput` for what is none, before a byte of the weights is read."""
    if source.is_file():
        return [_checked_gguf(source)]
    if not (source / "config.json").is_file():
        raise BadInput(f"{source} is no model folder: it has no config.json{_instead(source)}")
    weights = weight_files(source)
    dict(shapes_of(source))  # every header is sound
    found = [source / name for name in READ_FILES if (source / name).is_file()]
    return [*found, *weights]


def _instead(folder: Path) -> str:
    """Say what a folder is that is no model."""
    if (folder / "adapter_config.json").is_file():
        return "; it is an adapter (LoRA): name the base model that it was trained on"
    inside = sorted(folder.glob("*.gguf"))
    if inside:
        return f"; name its GGUF file itself, e.g. {inside[0]}"
    return "" if any(folder.iterdir()) else "; it is empty"


def _checked_gguf(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BadInput(f"{path} is neither a model folder nor a GGUF file (it begins with {magic!r})")
    if PART.search(path.name):
        raise BadInput(
            f"{path} is one part of a GGUF that is cut into several: join them with llama-gguf-split --merge"
        )
    try:
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError as error:
        raise BadInput(f"{path} is a GGUF file, and reading it needs a package more: `pip install gguf`") from error
    return path


def _make(order: Conversion, originals: Sequence[Path], *, linked: bool) -> None:
    """Make the folder aside and give it its name."""
    folder = order.target
    aside = folder.with_name(f".building-{folder.name[:16]}.{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        _run(order.model_copy(update={"target": aside.resolve()}))
        if not any(aside.glob("*.safetensors")):
            for path in originals:
                if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
                    _take(path.resolve(), aside / path.name, linked=linked)
        manifest = {
            path.name: {"sha256": files.sha256_of(path), "bytes": path.stat().st_size}
            for path in sorted(aside.iterdir())
            if path.name != FACTS
        }
        files.write_whole(aside / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        for path in aside.iterdir():
            _sync(path)
        files.sync_folder(aside)
        try:
            aside.rename(folder)
        except OSError:
            if not _is_whole(folder):  # else another process was quicker
                raise
        files.sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _take(source: Path, target: Path, *, linked: bool) -> None:
    """Link what lies in the Hub's cache, where nothing is changed in place; copy an owner's own file, which may be."""
    if linked:
        files.link_or_copy(source, target)
        return
    missing = disk.shortfall_bytes(target.parent, source.stat().st_size)
    if missing:
        raise BadInput(f"the disk of {target.parent} is nearly full: {disk.readable(missing)} are missing for {source}")
    shutil.copyfile(source, target)


def _run(order: Conversion) -> None:
    """Convert in a child: transformers and torch are no part of this process."""
    done = subprocess.run(
        COMMAND,
        input=order.model_dump_json(),
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=environment(os.environ, "convert", 1),
    )
    if done.returncode == 0:
        return
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 2 and last.startswith("{"):
        raise BadInput(json.loads(last)["refused"])
    if done.returncode == -9:
        raise BadInput(f"preparing {order.name} was killed, most likely because this machine's memory is too small")
    words = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    raise BadInput(f"{order.name} cannot be prepared: {words}")


def _is_whole(folder: Path) -> bool:
    """Tell whether a prepared folder holds files of the sizes that it was made with; their bytes are the seal's."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return (folder / FACTS).is_file() and all(
            (folder / name).stat().st_size == entry["bytes"] for name, entry in manifest.items()
        )
    except (OSError, ValueError):
        return False


def _sweep(models: Path) -> None:
    """Remove what killed processes left."""
    for left in models.glob(".building-*"):
        if not Path("/proc", left.name.rpartition(".")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)


def _digest(names: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(names.items()))).encode()).hexdigest()


def _tools() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers")}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
