"""The inbox: whole letters, nothing lost, junk put aside."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadInput
from harness.inbox import Insight, Message, Pause, Propose, Resume, Stop, Unreadable, peek, post, take, waiting
from harness.paths import StudyPaths
from harness.records import Proposal

VALUES = st.one_of(st.booleans(), st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6), st.text(max_size=8))
PROPOSALS = st.builds(
    Proposal,
    diff=st.dictionaries(st.text(string.ascii_lowercase + "._", min_size=1, max_size=12), VALUES, max_size=3),
    source=st.just("human"),
    rationale=st.text(max_size=40),
    watch=st.text(max_size=40),
    parent=st.none() | st.integers(0, 99),
)


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    return StudyPaths(tmp_path)


@given(proposal=PROPOSALS)
def test_a_proposal_survives_the_trip(tmp_path_factory: pytest.TempPathFactory, proposal: Proposal) -> None:
    """What is posted is what is taken, to the last character."""
    paths = StudyPaths(tmp_path_factory.mktemp("study"))
    post(paths, Propose(proposal=proposal))
    assert list(take(paths)) == [Propose(proposal=proposal)]
    assert list(take(paths)) == []


def test_order_is_kept(paths: StudyPaths) -> None:
    """Messages come out in the order they went in."""
    sent: list[Message] = [Pause(), Resume(), Stop(), Pause()]
    for message in sent:
        post(paths, message)
    assert list(take(paths)) == sent


def test_a_letter_stays_until_it_was_dealt_with(paths: StudyPaths) -> None:
    """A driver that dies while it handles a message finds it again."""
    post(paths, Stop())
    messages = take(paths)
    assert next(messages) == Stop()
    messages.close()  # type: ignore[attr-defined]  # a generator: as if the driver had been killed here
    assert list(take(paths)) == [Stop()]


@pytest.mark.parametrize("junk", [b"{", b"\xff\xfe", b"[]", b'{"kind": "explode"}', b'{"kind": "propose"}', b""])
def test_junk_is_put_aside_with_the_reason(paths: StudyPaths, junk: bytes) -> None:
    """A file that is no message neither stops the search nor comes back."""
    paths.inbox.mkdir()
    (paths.inbox / "00.json").write_bytes(junk)
    post(paths, Stop())
    taken = list(take(paths))
    assert isinstance(taken[0], Unreadable)
    assert taken[0].reason
    assert taken[1:] == [Stop()]
    assert list(take(paths)) == []
    assert (paths.inbox / "unreadable" / "00.json").read_bytes() == junk


def letter(**changes: object) -> bytes:
    proposal = {"diff": {}, "source": "me", "rationale": "r", "watch": "w"} | changes
    return json.dumps({"kind": "propose", "proposal": proposal}).encode()


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (letter(source="sampler"), "proposer of our own"),
        (letter(source="a b"), "letters, digits"),
        (letter(source="x" * 41), "up to 40"),
        (letter(call=999), "call: only a proposer of our own"),
        (letter(model="m", tokens=5, cost_usd=1.0), "model, tokens, cost_usd"),
        (letter(parent=10**30), "less than"),
        (b'{"kind": "insight", "source": "me", "text": ""}', "at least 1"),
        (json.dumps({"kind": "insight", "source": "me", "text": "x" * 501}).encode(), "at most 500"),
        (b'{"kind": "insight", "source": "mixed", "text": "x"}', "proposer of our own"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_forged_letters_are_put_aside(paths: StudyPaths, junk: bytes, reason: str) -> None:
    """Whoever can write a file cannot pose as a proposer, book a call, or stop the search with a number too large."""
    paths.inbox.mkdir()
    (paths.inbox / "00.json").write_bytes(junk)
    (message,) = take(paths)
    assert isinstance(message, Unreadable)
    assert reason in message.reason


def test_peeking_leaves_everything_where_it_is(paths: StudyPaths) -> None:
    """What waits can be read without taking it; junk is the driver's to put aside."""
    sent: list[Message] = [Insight(source="me", text="width pays"), Stop()]
    for message in sent:
        post(paths, message)
    (paths.inbox / "00.json").write_text("{")
    assert peek(paths) == sent
    assert len(waiting(paths)) == 3


def test_half_written_letters_are_not_read(paths: StudyPaths) -> None:
    """Only a finished letter counts; one still being written is left alone."""
    paths.inbox.mkdir()
    (paths.inbox / ".2.json").write_text('{"kind": "st')
    assert waiting(paths) == []
    assert (paths.inbox / ".2.json").exists()


def test_an_inbox_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    """A disk that does not take the letter is said in one sentence."""
    (tmp_path / "inbox").write_text("a file where the folder should be")
    with pytest.raises(BadInput, match="inbox"):
        post(StudyPaths(tmp_path), Pause())


def test_control_characters_do_not_reach_a_terminal() -> None:
    """What a person, a shell or a model wrote cannot restyle what the owner reads, and can always be written down."""
    proposal = Proposal(diff={}, source="human", rationale="\x1b[31mred\x07\udcff line\nnext", watch="\x9bm")
    assert "\x1b" not in proposal.rationale
    assert proposal.rationale.encode("utf-8")
    assert "\x07" not in proposal.rationale
    assert proposal.rationale.endswith(" line\nnext")
    assert proposal.watch == "\N{REPLACEMENT CHARACTER}m"
