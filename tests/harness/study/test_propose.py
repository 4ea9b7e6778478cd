"""`overnight propose`: what would come to nothing is refused at once, and nothing is queued."""

from __future__ import annotations

from typing import Any

import pytest

from harness import cli, inbox
from harness.proposing import LONGEST_WORDS
from harness.records import Proposal

Night = Any  # the fixture's class lives in conftest.py


@pytest.fixture
def study(night: Night) -> Night:
    """Return a study with a winner, and a proposal in the queue."""
    night.seat_baseline()
    night.keep(1e-3)
    queued = Proposal(diff={"optim.learning_rate": 2e-3}, source="rules", rationale="why", watch="what")
    night.ledger.queue(queued)
    return night


def propose(night: Night, change: str, *more: str, why: str = "because") -> int:
    return cli.main(["propose", str(night.study.paths.root), "--set", change, "--why", why, *more])


def test_a_new_change_is_queued_once(study: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """The second time it is still in the inbox, whatever the reason says."""
    assert propose(study, "optim.learning_rate=3e-3") == 0
    capsys.readouterr()
    assert propose(study, "optim.learning_rate=0.003", why="another") == 2
    assert "this config waits already: human queued it, in the inbox" in capsys.readouterr().err
    assert len(inbox.waiting(study.study.paths)) == 1
    assert propose(study, "optim.learning_rate=3e-3", "--set", "optim.beta1=0.85") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.learning_rate=2e-3"], "this config waits already: rules queued it, as proposal 2"),
        (["optim.learning_rate=2e-3", "--parent", "0"], "this config waits already"),
        (["optim.learning_rate=1e-3", "--parent", "0"], "this config was tried already: it is that of proposal 1"),
        (["optim.learning_rate=1e-3", "--parent", "7"], "node 7 is not in the lineage (nodes: 0, 1)"),
        (["optim.learning_rate=9"], "optim.learning_rate"),
        (["optim.beta1=0.85", "--watch", "x" * (LONGEST_WORDS + 1)], "what to watch has 2001 characters"),
    ],
)
def test_what_comes_to_nothing_is_refused(
    study: Night, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Exit code 2, one sentence, an empty inbox."""
    assert propose(study, *words) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.splitlines()) == 1
    assert inbox.waiting(study.study.paths) == []


def test_a_reason_is_bounded(study: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown whole in tables and prompts."""
    assert propose(study, "optim.learning_rate=3e-3", why="x" * LONGEST_WORDS) == 0
    assert propose(study, "optim.learning_rate=4e-3", why="x" * 100_000) == 2
    assert "the reason has 100000 characters: say it in at most 2000" in capsys.readouterr().err


def test_a_letter_that_is_no_message_is_passed_over(study: Night) -> None:
    """The driver will say so; a person who proposes need not care."""
    study.study.paths.inbox.mkdir(exist_ok=True)
    (study.study.paths.inbox / "1.json").write_text("{")
    assert propose(study, "optim.learning_rate=3e-3") == 0
