"""What a proposer is given, and what `overnight briefing` prints of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.briefing import brief
from frozen.timer import Budget
from harness import cli, origin
from harness.config import Value, apply, told
from harness.history import history_of
from harness.noise import smallest_provable
from harness.records import Proposal, ProposalState, Role
from harness.replay import Replay
from harness.upgrade import tool_of
from harness.view import Silent

SLOW = {"torch", "optuna", "numpy", "scipy", "rich", "plotly", "sqlite_utils", "filelock", "anthropic", "openai"}


@pytest.fixture
def won(night: Any) -> Any:
    """Return a study with a baseline of three seeds and one kept proposal."""
    night.seat_baseline()
    night.keep(5e-3)
    return night


def test_the_files_of_the_study_are_part_of_it(won: Any) -> None:
    """Knobs and limits come from the policy, the owner's words from program.md as it is now."""
    study = won.study
    study.paths.program_md.write_text("Mind the warm-up.")
    history = history_of(study, won.reader)
    assert history.knobs == study.policy.knobs
    assert history.max_changes == study.policy.proposals.max_changes
    assert history.minimum_steps == study.policy.proposals.minimum_steps
    assert history.smallest_provable == smallest_provable(won.reader.noise(), study.policy.judge)
    assert history.program == "Mind the warm-up."
    assert history.device_memory_bytes is not None
    assert history.device_memory_bytes > 1 << 28


def test_a_program_that_is_gone_or_no_text_ends_no_night(won: Any) -> None:
    """The owner may remove the file, or save it in some other encoding."""
    assert history_of(won.study, won.reader).program == ""
    won.study.paths.program_md.write_bytes(b"caf\xe9")
    assert history_of(won.study, won.reader).program == "caf\N{REPLACEMENT CHARACTER}"


def test_a_running_proposal_is_shown_without_its_trials(won: Any) -> None:
    """A proposal that is asked for at the start of another's trials or in their middle is the same."""
    diff: dict[str, Value] = {"optim.learning_rate": 2e-3}
    number = won.ledger.queue(Proposal(diff=diff, source="hand", rationale="slower", watch="loss"))
    config = apply(won.study.baseline, diff)
    won.ledger.start(number, 1, config)
    before = history_of(won.study, won.reader)
    won.run(config, 0, Role.SCREEN, number)
    assert history_of(won.study, won.reader) == before
    assert before.past[-1].state is ProposalState.RUNNING


def test_a_full_run_changes_nothing_that_a_model_is_shown(won: Any) -> None:
    """Neither the holdout nor the val score of a replay reaches a history, so the briefing is the same as before."""
    before = brief(history_of(won.study, won.reader))
    tool = tool_of(won.study.seal, thorough=True)
    replay = Replay(won.study, tool, won.ledger, won.reader, won.launcher, Silent())
    replay.reproduce()
    won.launcher.shift = -0.0777
    found = replay.full_run(Budget("tokens", 2e6))
    assert won.reader.events("holdout_score")
    assert any(trial.role is Role.FINAL for trial in won.reader.trials())
    history = history_of(won.study, won.reader)
    trials = [*history.baseline_trials, *(trial for past in history.past for trial in past.trials)]
    assert {trial.role for trial in trials} == {Role.BASELINE, Role.SCREEN, Role.REPLICATE}
    assert not {found.best.val, found.best.holdout, found.baseline.holdout} & {trial.score for trial in trials}
    assert brief(history) == before


# --- overnight briefing ---


def test_the_command_prints_the_proposers_briefing(won: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is what the study's proposer would show a model now; nothing is written, no lock is taken."""
    root = won.study.paths.root
    path = won.study.paths.study_toml
    path.write_text(path.read_text().replace('proposer = "mixed"', 'proposer = "rules"'))
    before = sorted(path.relative_to(root) for path in root.rglob("*"))
    assert cli.main(["briefing", str(root)]) == 0
    said = capsys.readouterr().out
    assert said == brief(history_of(won.study, won.reader))
    assert all(name in said for name in told(won.study.baseline))
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == before


@pytest.mark.parametrize(("proposer", "code", "said"), [("scripted", 0, "# Briefing"), ("mixd", 2, "'mixed'")])
def test_a_proposer_that_lacks_its_script_or_does_not_exist(
    won: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, proposer: str, code: int, said: str
) -> None:
    """Without its file the scripted one is replaced by the default; a name that nobody has is wrong use."""
    monkeypatch.delenv("OVERNIGHT_SCRIPT", raising=False)
    path = won.study.paths.study_toml
    path.write_text(path.read_text().replace('proposer = "mixed"', f'proposer = "{proposer}"'))
    assert cli.main(["briefing", str(won.study.paths.root)]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


@pytest.mark.process
def test_the_command_imports_nothing_slow(won: Any) -> None:
    """It answers in about half a second, so it may not pull in what only a search needs."""
    root = str(won.study.paths.root)
    program = (
        f"import sys\nfrom harness.cli import main\nmain(['briefing', {root!r}])\n"
        f"print(sorted({SLOW!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout.startswith("# Briefing")


# --- memory of the device ---


def pretend(folder: Path, answer: str) -> str:
    """Write an ``nvidia-smi`` that prints its first argument to a file and then its answer."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$1" >> "{folder}/asked"\n{answer}\n')
    program.chmod(0o755)
    return str(folder)


@pytest.mark.process
@pytest.mark.parametrize(
    ("visible", "device", "asked"),
    [(None, "cuda:1", "--id=1"), ("3,GPU-5ea1", "cuda:1", "--id=GPU-5ea1"), ("", "cuda:0", "--id=0")],
)
def test_the_driver_says_how_much_memory_a_gpu_has(
    tmp_path: Path, visible: str | None, device: str, asked: str
) -> None:
    """The GPU is the one that jobs see under that name, and it is asked once."""
    folders = pretend(tmp_path, "echo 24564")
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = [origin.device_memory_bytes(device, environment, folders) for _ in range(2)]
    assert found == [24564 << 20] * 2
    assert (tmp_path / "asked").read_text().split() == [asked]


@pytest.mark.process
@pytest.mark.parametrize("answer", ["echo [N/A]", "exit 9"])
def test_an_unknown_memory_is_none(tmp_path: Path, answer: str) -> None:
    """No driver, a driver that fails or one that does not know: None, and never a number."""
    assert origin.device_memory_bytes("cuda:0", {}, pretend(tmp_path, answer)) is None
    assert origin.device_memory_bytes("cuda:0", {}, str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path)])
def test_something_else_in_the_place_of_program_md_ends_no_night(won: Any, make: Any) -> None:
    """It is said where the owner's words would stand: the file may change, and a night must not hang on it."""
    won.study.paths.program_md.unlink(missing_ok=True)
    make(won.study.paths.program_md)
    assert history_of(won.study, won.reader).program == "(program.md is no file and could not be read)"


def test_a_trial_is_shown_with_what_it_was_expected_to_hold(won: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Estimate, parts, correction by the other trials, observed peak and error; for people and as JSON."""
    root = str(won.study.paths.root)
    assert cli.main(["show", root, "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    memory = shown["memory"]
    assert sum(part["size_bytes"] for part in memory["parts"]) == memory["estimated_bytes"]
    assert memory["observed_peak_bytes"] == shown["peak_memory_bytes"]
    assert memory["correction_trials"] == sum(t.score is not None and t.id != 1 for t in won.reader.trials())
    assert memory["relative_error"] == pytest.approx(memory["expected_peak_bytes"] / shown["peak_memory_bytes"] - 1)
    assert cli.main(["show", root, "1"]) == 0
    said = capsys.readouterr().out
    for words in ("Memory, estimated", "weights", "activations", "observed peak", "the estimate is off by"):
        assert words in said
    won.study.paths.study_toml.write_text("[study]\n")
    assert cli.main(["show", root, "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] is None
