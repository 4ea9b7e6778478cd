"""Proposals from outside at the command line, and the page that tells coding agents how to make them."""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any

import pytest

from harness import cli, inbox
from harness.inbox import Propose
from harness.mcp import Tools
from harness.proposing import Wish, check, send
from harness.records import AbortIf, Proposal
from harness.setup import guide

Night = Any  # the fixture's class lives in conftest.py


@pytest.fixture
def seated(night: Night, monkeypatch: pytest.MonkeyPatch) -> Night:
    """Return a study with its baseline and one kept proposal, and stand in the folder that holds it."""
    night.seat_baseline()
    night.keep(1e-3)
    monkeypatch.chdir(night.study.paths.root.parent)
    return night


def propose(night: Night, *words: str) -> int:
    """Run `overnight propose` with a change that would help."""
    place = f"./{night.study.name}"
    return cli.main(["propose", place, "--set", "optim.learning_rate=2e-3", "--why", "it still falls", *words])


def letters(night: Night) -> list[Proposal]:
    return [message.proposal for message in inbox.peek(night.study.paths) if isinstance(message, Propose)]


def test_a_person_proposes(seated: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name it is a human's, and it waits for a search."""
    assert propose(seated) == 0
    (found,) = letters(seated)
    assert (found.source, found.rationale, found.abort_if) == ("human", "it still falls", None)
    assert "no search is running" in capsys.readouterr().out


def test_a_person_predicts_and_gives_up_early(seated: Night) -> None:
    """Name, prediction and the condition for giving up arrive in the proposal."""
    words = [
        "--source",
        "ada",
        "--predict",
        "-0.03",
        "--confidence",
        "0.6",
        "--abort-above",
        "4",
        "--abort-after",
        "0.5",
    ]
    assert propose(seated, *words) == 0
    (found,) = letters(seated)
    assert (found.source, found.predicted_change, found.confidence) == ("ada", -0.03, 0.6)
    assert found.abort_if == AbortIf(probe_above=4.0, after=0.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--source", "rules"], "proposer of our own"),
        (["--source", "a b"], "letters, digits"),
        (["--parent", "5"], "node 5 is not in the lineage (nodes: 0, 1)"),
        (["--parent", "9" * 30], "parent = 999"),
        (["--confidence", "2"], "confidence = 2.0"),
        (["--predict", "nan"], "predicted_change"),
        (["--abort-above", "3"], "takes both"),
        (["--abort-above", "3", "--abort-after", "1.5"], "after = 1.5"),
        (["--set", "optim.learning_rate=1e-3"], "is set twice"),
        (["--why", " "], "reason is empty"),
    ],
)
def test_wrong_use_is_one_sentence(
    seated: Night, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Exit code 2, one line, and nothing in the inbox."""
    assert propose(seated, *words) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert letters(seated) == []


def test_a_queued_config_is_not_queued_again(seated: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """A person who types the command twice is told where the first one is."""
    assert propose(seated) == 0
    assert propose(seated) == 2
    assert "waits already: human queued it, in the inbox" in capsys.readouterr().err
    assert len(letters(seated)) == 1


def test_a_stale_proposal_in_the_queue_is_no_obstacle(seated: Night) -> None:
    """What waits and could not run any more does not stand in the way of what can."""
    seated.ledger.queue(Proposal(diff={"optim.learning_rate": 9.0}, source="x", rationale="r", watch="w", parent=77))
    wish = Wish(diff={"optim.learning_rate": 2e-3}, why="still falls")
    assert send(seated.study, check(seated.study, wish)).startswith("Queued")


def test_the_server_is_missing_a_package(
    seated: Night, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra there is one sentence with the remedy, and exit code 2."""
    for name in ("mcp", "mcp.server"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "harness.mcp")
    monkeypatch.delattr("harness.mcp")
    assert cli.main(["mcp", f"./{seated.study.name}"]) == 2
    printed = capsys.readouterr()
    assert "pip install 'mcp>=2.3,<3'" in printed.err
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)


def test_a_study_that_is_not_there_is_told_at_start(seated: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """An agent's settings that name the wrong study fail when the client starts, with the reason on stderr."""
    assert cli.main(["mcp", "./nowhere"]) == 2
    printed = capsys.readouterr()
    assert "there is no study './nowhere'" in printed.err
    assert printed.out == ""


# --- AGENTS.md ---------------------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """Return the commands of the page's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


def test_the_commands_of_agents_md_run(seated: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """What a coding agent is told to type works as it stands, but for the change that it chooses."""
    found = commands(guide(seated.study.name))
    assert [command.split()[1] for command in found] == ["briefing", "status", "propose"]
    for command in found:
        program, *words = shlex.split(command.replace("KNOB=VALUE", "optim.learning_rate=2e-3"))
        assert program == "overnight"
        assert cli.main(words) == 0, capsys.readouterr().err
    (proposal,) = letters(seated)
    assert proposal.source == "my-agent"


def test_what_agents_md_names_is_there(seated: Night) -> None:
    """Its tools are the server's, its options the command's, its fields the answers', its files the study's."""
    text = re.sub(r"```.*?```", "", guide(seated.study.name), flags=re.DOTALL)
    words = set(re.findall(r"`([^`]+)`", text))
    tools: dict[str, Any] = {name: getattr(Tools, name, None) for name in words if name.isidentifier()}
    known = {"status", "knobs", "ledger", "show", "briefing", "propose", "wait", "insights", "add_insight", "report"}
    assert known <= {name for name, tool in tools.items() if tool is not None}
    fields = {"mark", "search_runs", "noise", "stopped", "kept", "discarded", "inconclusive"}
    rest = {name for name, tool in tools.items() if tool is None} - fields
    assert rest - {"overnight", "final"} == set()
    files = {word for word in words if word.endswith((".toml", ".md", ".html", "/"))}
    paths = seated.study.paths
    real = {paths.report_html, paths.inbox, paths.split("holdout"), paths.replay}
    assert {paths.root / name for name in files} == real


def test_agents_md_speaks_of_its_own_study() -> None:
    """The page carries the study's name wherever one has to be typed."""
    text = guide("my.night-1")
    assert "# Study my.night-1" in text
    assert "./my.night-1" in text
    assert "$name" not in text


def test_what_cannot_fit_is_told_at_once(
    seated: Night, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person need not wait for its turn to learn that a config is far beyond the device's memory."""
    monkeypatch.setattr("harness.origin.device_memory_bytes", lambda device: 10_000_000)
    assert propose(seated) == 2
    said = capsys.readouterr().err
    assert "it needs about" in said
    assert "the device has 0.0 GB" in said
    assert not letters(seated)
