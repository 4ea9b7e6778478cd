"""Instruction data without a download: functions of Python's standard library, and the docstrings that they have.

A row asks for the docstring of a function whose source is shown without it. That is a real task with right answers, it
is the same on every machine with the same Python, and nothing about it is private. Rows are in Alpaca's layout
(``instruction``, ``input``, ``output``), one JSON object per line.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness import files
from harness.errors import BadInput

INSTRUCTION = "Write the docstring of this Python function."
LEAST_SOURCE, MOST_SOURCE = 60, 700
"""Characters of a function without its docstring: less says nothing, more does not fit a short row."""
LEAST_ANSWER, MOST_ANSWER = 30, 300
LEAST_ROWS = 500
LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip", "__pycache__"})
"""Folders that hold tests, demonstrations or other people's packages."""


class Row(NamedTuple):
    """One function and its docstring."""

    source: str
    answer: str


def docstring_data(cache: Path, library: Path | None = None) -> Path:
    """Return the JSONL file of this interpreter's library below ``cache``, made once.

    `BadInput` if the interpreter comes without the source of its library.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    folder = cache / f"docstrings-{platform.python_version()}"
    path = folder / "docstrings.jsonl"
    if path.is_file():
        return path
    found = rows(library)
    if len(found) < LEAST_ROWS:
        raise BadInput(f"the demo needs the source of Python's standard library, and {library} has {len(found)} rows")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(
        folder / "ORIGIN.txt",
        f"Functions of Python {platform.python_version()}'s standard library, read from {library}: the source"
        " without its docstring is the input, the docstring the answer. Licence: PSF, as the library's.\n",
    )
    lines = (
        json.dumps({"instruction": INSTRUCTION, "input": row.source, "output": row.answer}, ensure_ascii=False)
        for row in found
    )
    files.write_whole(path, "\n".join(lines) + "\n")
    return path


def rows(library: Path) -> list[Row]:
    """Return the usable functions below a folder, in the order of their sources' digests; no two share either half."""
    by_source: dict[str, Row] = {}
    answers: set[str] = set()
    for path in _modules(library):
        for row in _of(path):
            if row.source not in by_source and row.answer not in answers:
                by_source[row.source] = row
                answers.add(row.answer)
    return sorted(by_source.values(), key=lambda row: hashlib.sha256(row.source.encode()).digest())


def _modules(library: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(library):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        yield from (Path(root, name) for name in sorted(names) if name.endswith(".py"))


def _of(path: Path) -> Iterator[Row]:
    """Yield the functions of one module; one that does not parse (there are some on purpose) has none."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in old modules are none of the owner's business
            tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            row = _row(node)
            if row is not None:
                yield row


def _row(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Row | None:
    """Return a function's row, or None if it says too little, too much, or something that is no description."""
    answer = ast.get_docstring(node)
    if answer is None or len(node.body) < 2:
        return None
    answer = inspect.cleandoc(answer)
    node.body = node.body[1:]
    source = ast.unparse(node)
    fits = LEAST_SOURCE <= len(source) <= MOST_SOURCE and LEAST_ANSWER <= len(answer) <= MOST_ANSWER
    if not fits or not answer.isascii() or ">>>" in answer or "XXX" in answer or "\\" in answer:
        return None
    return Row(source, answer)
