"""The folders are the permission model; this holds the arrows between them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("frozen", "harness", "agent", "policies")
CHILD_MAY_SEE = ("harness.config", "harness.sizes", "harness.records", "harness.errors", "harness.jobs", "frozen")
AGENT_MAY_SEE = (
    *("harness.config", "harness.sizes", "harness.memory", "harness.records", "harness.terms", "harness.errors"),
    "agent",
)
TORCH_HOMES = ("harness/jobs/", "frozen/loader.py", "frozen/evaluate.py", "frozen/tokens.py")


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted modules that a file imports, nested imports included."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def allowed(module: str, prefixes: tuple[str, ...]) -> bool:
    if module == "harness":  # the bare package, to see where it lies, holds nothing
        return True
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize(
    ("folder", "may_see"),
    [("frozen", ("frozen",)), ("harness/jobs", CHILD_MAY_SEE), ("agent", AGENT_MAY_SEE)],
)
def test_arrows(folder: str, may_see: tuple[str, ...]) -> None:
    """A folder imports of ours only what its place allows."""
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in files(folder)
        for module in imports(path)
        if module.partition(".")[0] in OURS and not allowed(module, may_see)
    ]
    assert files(folder)
    assert found == []


def test_harness_does_not_import_agent() -> None:
    """Proposers are found through entry points, so that anyone's package can add one."""
    assert [p for p in files("harness") for m in imports(p) if m.partition(".")[0] == "agent"] == []


def test_torch_stays_on_the_childs_side() -> None:
    """Only the jobs and three frozen modules may import torch or what pulls it in."""
    heavy = {"torch", "transformers", "peft", "trl", "accelerate", "safetensors"}
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for folder in OURS
        for path in files(folder)
        for module in imports(path)
        if module.partition(".")[0] in heavy and not str(path.relative_to(ROOT)).startswith(TORCH_HOMES)
    ]
    assert found == []


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    """`overnight status` must answer before torch could even be imported."""
    heavy = ("torch", "transformers", "sqlite_utils", "optuna", "plotly", "datasets", "numpy.linalg")
    code = f"import harness.cli, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
