from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from harness import docstrings
from harness.docstrings import Row, docstring_data, rows
from harness.errors import BadInput

MODULE = '''
def area(width: float, height: float) -> float:
    """Return the area of a rectangle in the square of its unit."""
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height

def short():
    """Return one, which is a number."""
    return 1

def without(width):
    return [width for _ in range(100) if width and width and width]

def only(width, height):
    """This one has a docstring and nothing else, so it shows nothing at all of what it does."""
'''


def test_a_function_and_its_docstring(tmp_path: Path) -> None:
    """The answer is nowhere in the question; what says too little is left out."""
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "again.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "hidden.py").write_text(MODULE.replace("area", "hidden"))
    (row,) = rows(tmp_path)
    assert row.answer == "Return the area of a rectangle in the square of its unit."
    assert row.source.startswith("def area(width: float")
    assert "rectangle" not in row.source


def test_rows_of_the_real_library(tmp_path: Path) -> None:
    """Enough of them, each within bounds, none twice, the same file every time, and where they came from."""
    path = docstring_data(tmp_path)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) >= docstrings.LEAST_ROWS
    assert len({row["input"] for row in found}) == len({row["output"] for row in found}) == len(found)
    for row in found:
        ast.parse(row["input"])
        assert docstrings.LEAST_ANSWER <= len(row["output"]) <= docstrings.MOST_ANSWER
        assert row["output"] not in row["input"]
    assert "PSF" in (path.parent / "ORIGIN.txt").read_text()
    before = path.stat()
    assert docstring_data(tmp_path) == path
    assert path.stat() == before


def test_a_python_without_its_source_is_said(tmp_path: Path) -> None:
    """No half made file is left."""
    with pytest.raises(BadInput, match="standard library"):
        docstring_data(tmp_path / "cache", library=tmp_path)
    assert not (tmp_path / "cache").exists()


def test_order_depends_on_content_alone(tmp_path: Path) -> None:
    """Names of modules do not matter."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.py").write_text(MODULE + MODULE.replace("area", "volume").replace("Return the", "Give the"))
    one, two = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert one == two
    assert len(one) == 2
    assert all(isinstance(row, Row) for row in one)
