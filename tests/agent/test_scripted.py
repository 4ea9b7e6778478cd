from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.scripted import SCRIPT, ScriptedProposer
from harness.errors import BadInput

LINES = [
    {"diff": {"optim.learning_rate": 1e-3}, "rationale": "more", "watch": "loss"},
    {"diff": {"optim.lerning_rate": 2e-3}, "rationale": "a slip", "watch": "loss"},
    {"diff": {"model.depth": 5}, "rationale": "less", "watch": "loss", "predicted_change": -0.1, "confidence": 0.5},
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return path


def test_lines_come_in_order_also_after_a_restart(script: Path, make_night: Any) -> None:
    """What the history holds says which line is next; after the last there is none."""
    night = make_night()
    for line in LINES:
        proposal = ScriptedProposer(script).propose(night.history(), 1)[0]
        assert proposal.diff == line["diff"]
        assert proposal.source == "scripted"
        night.run(proposal)
    assert list(ScriptedProposer(script).propose(night.history(), 1)) == []
    assert len(night.refused) == 1


def test_several_at_once(script: Path, make_night: Any) -> None:
    """A batch is the next lines."""
    assert len(ScriptedProposer(script).propose(make_night().history(), 2)) == 2


def test_the_environment_names_the_file(script: Path, make_night: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point takes no argument."""
    monkeypatch.setenv(SCRIPT, str(script))
    assert len(ScriptedProposer().propose(make_night().history(), 9)) == 3
    monkeypatch.delenv(SCRIPT)
    with pytest.raises(BadInput, match=SCRIPT):
        ScriptedProposer()


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"diff": {}}', '{"diff": 1, "rationale": "", "watch": ""}', "\x00"])
def test_a_bad_line_is_named_before_anything_runs(tmp_path: Path, line: str) -> None:
    """File and line number, at the start and not in the middle of the night."""
    path = tmp_path / "script.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(BadInput, match="line 2"):
        ScriptedProposer(path)


@given(text=st.text(max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Arbitrary text never gets past as something else than proposals or `BadInput`."""
    path = tmp_path_factory.mktemp("script") / "script.jsonl"
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(BadInput):
        assert ScriptedProposer(path).name == "scripted"


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """No trace, a name."""
    with pytest.raises(BadInput, match=r"none\.jsonl"):
        ScriptedProposer(tmp_path / "none.jsonl")
