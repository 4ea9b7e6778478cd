"""Tells cached bytecode that is the compiled source from bytecode that is not.

A forged ``.pyc`` replaces a module whose source, and so its digest, is intact (integrity.md, part 6). Children of the
driver read bytecode only from a cache of their own; what lies beside the source is still read by the driver and by
everybody's tools, so the seal refuses bytecode that is not the compiled source in both places. Ordinary bytecode, as
any import writes it, passes.
"""

from __future__ import annotations

import functools
import importlib.util
import marshal
import re
import sys
from pathlib import Path
from types import CodeType

_CACHED = re.compile(r"(?P<stem>[^.]+)\.(?P<tag>[^.]+)(?:\.opt-(?P<level>[12]))?\.pyc")
_BEING_WRITTEN = re.compile(r".+\.pyc\.\d+")
"""The name under which an import writes bytecode before it renames it."""


def fault(cached: Path, sources: Path, stems: frozenset[str]) -> str | None:
    """Say what is wrong with a file of a bytecode folder, or None.

    ``stems`` are the sealed modules of the folder ``sources``. Bytecode of another Python version, and bytecode that
    this interpreter would throw away as outdated, is harmless: it is never run.
    """
    if _BEING_WRITTEN.fullmatch(cached.name):
        return None
    match = _CACHED.fullmatch(cached.name)
    if match is None or match["stem"] not in stems:
        return "was added"
    if cached.is_symlink() or not cached.is_file():
        return "is not a regular file"
    if match["tag"] != sys.implementation.cache_tag:
        return None
    source = sources / f"{match['stem']}.py"
    return _unlike(cached.read_bytes(), source, int(match["level"] or 0))


def _unlike(cached: bytes, source: Path, level: int) -> str | None:
    text = source.read_bytes()
    if len(cached) < 16 or cached[:4] != importlib.util.MAGIC_NUMBER or _is_outdated(cached, source, text):
        return None
    return _fault_of(cached[16:], text, source, level)


@functools.lru_cache(maxsize=1024)  # by content: compiling all of it before each trial would take a fifth of a second
def _fault_of(code: bytes, text: bytes, source: Path, level: int) -> str | None:
    try:
        found = marshal.loads(code)
    except (EOFError, ValueError, TypeError):
        return "is not readable bytecode"
    try:
        expected = compile(text, str(source), "exec", dont_inherit=True, optimize=level)
    except (SyntaxError, ValueError):  # the source has changed, which its own digest says; null bytes are a ValueError
        return f"is not the compiled {source.name}"
    same = isinstance(found, CodeType) and _is_same(found, expected)
    return None if same else f"is not the compiled {source.name}"


def _is_outdated(cached: bytes, source: Path, text: bytes) -> bool:
    """Tell whether import would ignore the file (PEP 552: flags, then either a hash or time and size)."""
    flags = int.from_bytes(cached[4:8], "little")
    if flags & 0b1:
        return bool(flags & 0b10) and cached[8:16] != importlib.util.source_hash(text)
    status = source.stat()
    modified, size = (int.from_bytes(cached[at : at + 4], "little") for at in (8, 12))
    return modified != int(status.st_mtime) & 0xFFFFFFFF or size != status.st_size & 0xFFFFFFFF


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Compare code objects; equality alone leaves flags and stack size out, and does not see them in nested code."""
    return (
        one == other
        and (one.co_flags, one.co_stacksize) == (other.co_flags, other.co_stacksize)
        and all(
            _is_same(mine, theirs)
            for mine, theirs in zip(one.co_consts, other.co_consts, strict=True)
            if isinstance(mine, CodeType) and isinstance(theirs, CodeType)
        )
    )
