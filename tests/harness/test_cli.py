"""The command line as a person meets it: one sentence for what is wrong, JSON for programs, no slow import."""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cli
from harness.acting import assignments, next_moment
from harness.errors import BadValue
from harness.locks import driver_lock
from harness.paths import StudyPaths

STATUS_KEYS = {
    *("study", "metric", "state", "trials", "proposals", "kept", "baseline", "best"),
    *("improvement", "noise", "utilization", "stop_reason"),
}
LEDGER_KEYS = {
    *("proposal", "parent", "diff", "source", "rationale", "watch", "decision"),
    *("difference", "standard_error", "replicates", "state", "reason"),
}


@pytest.fixture
def at_night(played: StudyPaths, monkeypatch: pytest.MonkeyPatch) -> StudyPaths:
    """Stand in the folder above ``runs/`` of the played night."""
    monkeypatch.chdir(played.root.parent.parent)
    return StudyPaths(Path("runs") / played.name)


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run a command that prints JSON and return what it printed."""
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_status_has_what_programs_rely_on(at_night: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys of `status --json` are a promise, and its numbers are those of the ledger."""
    found = document(capsys, "status", at_night.name)
    assert set(found) >= STATUS_KEYS
    for side in ("baseline", "best"):
        assert set(found[side]) >= {"score", "perplexity", "standard_error", "replicates", "trial"}
    assert found["kept"] == 4
    assert found["trials"] == {"scored": 50, "out_of_memory": 1, "diverged": 1, "crashed": 1}
    assert found["improvement"] == pytest.approx(found["baseline"]["score"] - found["best"]["score"])
    assert found["state"] == "stopped"
    assert 0 < found["utilization"] <= 1


def test_ledger_has_what_programs_rely_on(at_night: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """One document per proposal, rejected and failed ones included, each with its reason."""
    found = document(capsys, "ledger")
    assert [entry["proposal"] for entry in found] == list(range(1, 21))
    assert all(set(entry) >= LEDGER_KEYS for entry in found)
    assert all(entry["reason"] for entry in found if entry["state"] not in ("queued", "running"))
    assert sum(entry["decision"] == "kept" for entry in found) == 4


def test_show_compare_and_lineage_speak_json(at_night: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads has a document."""
    assert document(capsys, "show", "1")["role"] == "baseline"
    assert document(capsys, "show", at_night.name, "p4")["trials"][0]["state"] == "diverged"
    assert [step["node"] for step in document(capsys, "lineage")] == [0, 1, 2, 5, 11]
    found = document(capsys, "compare", "baseline", "best")
    assert found["difference"] < 0
    assert set(found["diff"]) == {"optim.learning_rate", "batch.sequence_length"}


def test_show_tells_what_the_sensors_said(at_night: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they were read; a trial that failed early has no line for them."""
    found = document(capsys, "show", "1")
    assert (found["device_celsius"], found["device_watts"]) == (54.0, 231.5)
    assert cli.main(["show", "1"]) == 0
    assert "54 °C, 232 W near the end of training" in capsys.readouterr().out
    failed = document(capsys, "show", "p4")["trials"][0]["id"]
    assert document(capsys, "show", str(failed))["device_celsius"] is None
    assert cli.main(["show", str(failed)]) == 0
    assert "sensors" not in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize(
    "words", [["status"], ["ledger"], ["lineage"], ["show", "9"], ["show", "p11"], ["compare", "1", "31"]]
)
def test_tables_fit_the_terminal(
    at_night: StudyPaths,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
    words: list[str],
) -> None:
    """Nothing that people read is cut off or wider than their window."""
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "…" not in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "nigth"], "did you mean 'night'?"),
        (["stauts"], "did you mean 'status'?"),
        (["show", "999"], "no trial 999"),
        (["show", "p999"], "no proposal 999"),
        (["show", "first"], "'first' is no trial"),
        (["compare", "1", "11"], "trial 11 has no score"),
        (["pause", "night"], "no search of study night is running"),
        (["run", "nowhere"], "there is no study 'nowhere'"),
        (["run", "night", "--trials", "0"], "not a whole number above 0"),
        (["run", "night", "--until", "25:00"], "not a time of day"),
        (["report", "night", "-o", "no/such/folder.html"], "there is no folder"),
        (["init", "x", "--policy", "demo", "--data", "nowhere", "--budget", "6s"], "nowhere"),
        (["init", "x", "--policy", "demo", "--data", ".", "--budget", "6x"], "6x"),
        (["init", "x", "--policy", "demo", "--data", "", "--budget", "6s"], "names no file or folder"),
        (["init", "x", "--data", ".", "--budget", "6s"], "needs --policy"),
        (["init", "", "--policy", "demo", "--data", ".", "--budget", "6s"], "needs a name"),
        (["status", "x" * 300], "longer than a file's can be"),
        (["show", "9" * 30], "larger than any row's"),
        (["compare", "1", "9" * 30], "larger than any row's"),
        (["report", "night", "-o", "runs"], "it is a folder"),
    ],
)
def test_wrong_use_is_one_sentence(
    at_night: StudyPaths, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Exit code 2, one line on stderr, nothing on stdout, nothing touched."""
    before = sorted(path.name for path in Path("runs").rglob("*"))
    try:
        code = cli.main(words)
    except SystemExit as exit_:  # argparse ends by itself
        code = exit_.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert code == 2
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert sorted(path.name for path in Path("runs").rglob("*")) == before


def test_a_newer_ledger_is_refused(
    at_night: StudyPaths, barren: StudyPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study made by a newer version is not guessed at."""
    connection = sqlite3.connect(barren.ledger)
    connection.execute("PRAGMA user_version = 999")
    connection.commit()
    connection.close()
    assert cli.main(["status", str(barren.root)]) == 2
    assert "newer" in capsys.readouterr().err


def test_pause_resume_and_stop_leave_a_letter(barren: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Another shell speaks to a running search through the inbox."""
    with driver_lock(barren):
        assert [cli.main([name, str(barren.root)]) for name in ("pause", "resume", "stop")] == [0, 0, 0]
    kinds = [json.loads(letter.read_text())["kind"] for letter in sorted(barren.inbox.glob("*.json"))]
    assert kinds == ["pause", "resume", "stop"]


def test_report_writes_one_file(at_night: StudyPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report goes where the owner says."""
    assert cli.main(["report", at_night.name, "-o", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_every_command_is_known_to_the_parser() -> None:
    """The list that mistyped words are compared with is the parser's own."""
    assert all(f"    {name} " in cli.parser().format_help() for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["--help"], {"torch", "numpy", "pydantic", "rich", "plotly", "sqlite_utils"}),
        (["status", "night", "--json"], {"torch", "numpy", "rich", "plotly", "sqlite_utils", "filelock", "scipy"}),
        (["ledger", "night"], {"torch", "numpy", "plotly", "sqlite_utils", "filelock", "scipy"}),
    ],
)
def test_reading_imports_nothing_slow(at_night: StudyPaths, words: list[str], absent: set[str]) -> None:
    """What only looks must answer at once, so it may not pull in what it does not use."""
    program = (
        "import sys\nfrom harness.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        f"print(sorted({absent!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@given(
    st.dictionaries(
        st.text(string.ascii_lowercase + "._", min_size=1), st.floats(-1e9, 1e9) | st.booleans(), max_size=4
    )
)
def test_assignments_round_trip(diff: dict[str, float | bool]) -> None:
    """A knob given as text has the value that a file would give it."""
    assert assignments([f"{name}={json.dumps(value)}" for name, value in diff.items()]) == diff


@given(st.text(max_size=30))
def test_any_text_is_an_assignment_or_refused(text: str) -> None:
    """Whatever a shell hands over, it never crashes."""
    with contextlib.suppress(BadValue):
        assert len(assignments([text])) == 1


@pytest.mark.parametrize("texts", [["optim.beta1"], ["=1"], ["optim.beta1="], ["a=1", "a=2"], ["a=1e999"]])
def test_what_is_no_assignment_is_explained(texts: list[str]) -> None:
    """The message shows how it is written, which knob is set twice, or which value no knob can have."""
    with pytest.raises(BadValue, match=r"KNOB=VALUE|set twice|not a finite number"):
        assignments(texts)


def test_until_is_the_next_time_the_clock_shows_it() -> None:
    """07:00 said at 23:00 is tomorrow morning."""
    evening = datetime.datetime(2026, 11, 30, 23, 0, tzinfo=datetime.UTC)
    assert next_moment("07:00", evening) == datetime.datetime(2026, 12, 1, 7, 0, tzinfo=datetime.UTC)
    assert next_moment("23:30", evening) == datetime.datetime(2026, 11, 30, 23, 30, tzinfo=datetime.UTC)


def test_a_module_that_no_longer_parses_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed code that was broken outright cannot even be imported: one sentence, exit code 1, no trace."""

    def broken(name: str) -> object:
        raise SyntaxError("invalid syntax", (f"{name}.py", 3, 1, "def (", 3, 2))

    monkeypatch.setattr("harness.cli.importlib.import_module", broken)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().err
    assert "line 3, does not parse" in printed
    assert len(printed.splitlines()) == 1
