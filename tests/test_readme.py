"""The README cannot lie: its examples run, its links lead somewhere, its tree names files that exist."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from harness.cli import COMMANDS, parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def examples() -> list[str]:
    """Return the commands of the README's console blocks, in order."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.process
def test_the_examples_run_in_order(tmp_path: Path) -> None:
    """A person who types the README's commands gets exit code 0 from every one of them."""
    notes = tmp_path / "notes"
    notes.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for module in sorted(library.glob("[a-d]*.py")):
        shutil.copy(module, notes / f"{module.stem}.txt")
    commands = examples()
    assert len(commands) >= 8
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "overnight"
        code = "import sys; from harness.cli import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "notes.html").stat().st_size > 10_000


def test_the_clients_configurations_start_our_server() -> None:
    """The blocks that a person copies into an agent's settings parse, and name a command that there is."""
    (plain,) = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", README, re.DOTALL)]
    (table,) = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", README, re.DOTALL)]
    for server in (plain["mcpServers"]["overnight"], table["mcp_servers"]["overnight"]):
        assert server["command"] == "overnight"
        arguments = parser().parse_args(server["args"])
        assert (arguments.command, arguments.study) == ("harness.acting:mcp", "runs/notes")


def test_every_command_is_in_the_readme() -> None:
    """What the command line offers is documented."""
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", README)] == []


def test_links_and_pictures_exist() -> None:
    """Every relative link of the README leads to a file of the checkout."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


PACKAGES = ("frozen", "harness", "agent", "policies")


def in_the_tree() -> dict[str, set[str]]:
    """Return the files that the annotated tree names, by folder: what is indented belongs to the folder above it."""
    found: dict[str, set[str]] = {}
    folders: list[str] = []
    for line in README[README.index("## The tree") :].partition("```\n")[2].partition("```")[0].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        if head := re.match(r" *([a-z]+)/ ", line):
            folders.append(head[1])
        found.setdefault("/".join(folders), set()).update(re.findall(r"\b[a-z_]+\.(?:py|toml|md)\b", line))
    return found


def in_the_checkout() -> dict[str, set[str]]:
    """Return the files of every package, by folder."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for suffix in ("py", "toml", "md"):
            for path in (ROOT / package).rglob(f"*.{suffix}"):
                if path.name != "__init__.py":
                    found.setdefault(path.parent.relative_to(ROOT).as_posix(), set()).add(path.name)
    return found


def test_the_tree_names_every_file_and_no_other() -> None:
    """Each under its folder: two modules of one name in different packages are two."""
    named, there = in_the_tree(), in_the_checkout()
    assert {"frozen", "harness", "harness/jobs", "harness/report", "agent", "policies"} <= there.keys()
    assert {folder: files for folder, files in named.items() if files} == there
