import contextlib
import json
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from frozen.timer import Budget
from harness import checkpoints
from harness.cli import main
from harness.errors import SealBroken
from harness.records import Failed, TrialState
from harness.replay import Replay
from harness.seal import tool_version
from harness.study import load
from harness.upgrade import inspect, tool_of
from harness.verify import Finding, verify
from harness.view import Silent

Night = Any  # the fixture's class lives in conftest.py


def broken(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if not finding.ok]


def best(night: Night) -> Any:
    digest = night.reader.checkpoints()[1]
    return checkpoints.folder_of(night.study.paths, 1, digest) / "model.safetensors"


@pytest.fixture
def sound(night: Night) -> Night:
    """Return a study with a winner."""
    night.seat_baseline()
    night.keep(1e-3)
    return night


def test_a_sound_study_passes(sound: Night) -> None:
    """Seal, ledger, both checkpoints and the best score are found to be what they were."""
    findings = verify(sound.study, scorer=sound.launcher)
    assert broken(findings) == []
    assert [finding.what for finding in findings] == ["seal", "ledger", "checkpoint", "checkpoint", "score"]
    assert "node 1" in findings[-1].text
    assert sound.launcher.orders[0].split == sound.study.paths.split("val").resolve()


def test_a_study_without_trials_passes(night: Night) -> None:
    """A study that has not begun has nothing to score."""
    assert broken(verify(night.study, scorer=night.launcher)) == []
    assert night.launcher.orders == []


def flip(path: Any) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda n: flip(n.study.paths.split("holdout") / "tokens.bin"), "data/holdout/tokens.bin has changed"),
        (lambda n: flip(n.study.paths.tokenizer / "tokenizer.json"), "data/tokenizer/tokenizer.json has changed"),
        (lambda n: flip(n.study.paths.policy_toml), "policy.toml has changed"),
        (lambda n: flip(best(n)), "has changed since it was published"),
        (lambda n: best(n).unlink(), "has changed since it was published"),
        (lambda n: best(n).rename(best(n).with_name("x")), "has changed since it was published"),
        (lambda n: n.study.paths.lineage.rename(n.study.paths.root / "gone"), "there is no model folder"),
    ],
)
def test_damage_is_named_and_nothing_is_scored(sound: Night, damage: Callable[[Night], None], said: str) -> None:
    """One byte in data, tokenizer, policy or checkpoint is named; a score from there on would mean nothing."""
    damage(sound)
    found = broken(verify(sound.study, scorer=sound.launcher))
    assert any(said in text for text in found), found
    assert "is not scored again" in found[-1]
    assert sound.launcher.orders == []


def test_every_damage_is_named(sound: Night) -> None:
    """One broken thing does not hide the next."""
    flip(sound.study.paths.split("val") / "tokens.bin")
    flip(best(sound))
    (sound.study.paths.split("train") / "more").touch()
    text = "\n".join(broken(verify(sound.study, scorer=sound.launcher)))
    assert all(name in text for name in ("data/val/tokens.bin", "lineage", "data/train/more"))


def test_a_wrong_score_is_found(sound: Night) -> None:
    """A recorded score that the weights do not give is a broken promise."""
    shifted = sound.launcher.run

    def run(job: Any, **told: Any) -> Any:
        scored = shifted(job, **told)
        return scored.model_copy(update={"nats": scored.nats * (1 + 1e-5)})

    sound.launcher.run = run
    assert "the ledger has" in broken(verify(sound.study, scorer=sound.launcher))[0]


def states(findings: list[Finding]) -> list[str]:
    return [f"{finding.what} {finding.state}" for finding in findings]


def test_an_upgrade_that_scores_the_same_is_said_but_is_not_plain_ok(
    sound: Night, upgrade: Callable[..., None]
) -> None:
    """What changed is named, all else is verified, and that the new tool gives the recorded score is the conclusion."""
    upgrade(sound)
    findings = verify(sound.study, scorer=sound.launcher)
    assert states(findings) == [
        *("seal changed", "seal changed", "seal ok", "ledger ok", "checkpoint ok", "checkpoint ok", "score ok"),
    ]
    assert "this is overnight 9.9" in findings[0].text
    assert findings[1].text == "frozen/timer.py has changed"
    assert "this tool measures it as the sealed one did" in findings[-1].text


def test_an_upgrade_that_scores_otherwise_is_no_tampering(sound: Night, upgrade: Callable[..., None]) -> None:
    """Where everything but the tool is as recorded, another score is the tool's, and nothing is called broken."""
    upgrade(sound)
    honest = sound.launcher.run

    def run(job: Any, **told: Any) -> Any:
        scored = honest(job, **told)
        return scored.model_copy(update={"nats": scored.nats * (1 + 1e-5)})

    sound.launcher.run = run
    finding = verify(sound.study, scorer=sound.launcher)[-1]
    assert finding.state == "changed"
    assert "the tool scores differently now" in finding.text


def test_only_what_is_plainly_ok_exits_with_0(
    sound: Night, upgrade: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script must not take a changed tool for a sound study; the words and the state tell it from damage."""
    place = str(sound.study.paths.root)
    monkeypatch.setattr("harness.study.load", lambda root: sound.study)
    monkeypatch.setattr("harness.verify.verify", lambda study: verify(study, scorer=sound.launcher))
    assert main(["verify", place]) == 0
    upgrade(sound)
    assert main(["verify", place]) == 1
    assert "\nCHANGED  seal: frozen/timer.py has changed\n" in capsys.readouterr().out
    assert main(["verify", place, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert {(found["state"], found["ok"]) for found in document} == {("ok", True), ("changed", False)}


def test_an_upgrade_hides_no_damage(sound: Night, upgrade: Callable[..., None]) -> None:
    """Data and checkpoints are held against the recorded seal under every tool."""
    upgrade(sound)
    flip(sound.study.paths.split("val") / "tokens.bin")
    flip(best(sound))
    findings = verify(sound.study, scorer=sound.launcher)
    failed = [finding.text for finding in findings if finding.state == "failed"]
    assert failed[0] == "data/val/tokens.bin has changed"
    assert "has changed since it was published" in failed[1]
    assert "is not scored again" in failed[2]
    assert sound.launcher.orders == []


def test_changed_code_of_the_same_version_fails(sound: Night, upgrade: Callable[..., None]) -> None:
    """One changed file of frozen/ is named, no upgrade is claimed, and nothing is scored by it."""
    upgrade(sound, sound.study.seal.manifest.tool)
    findings = verify(sound.study, scorer=sound.launcher)
    assert [finding.text for finding in findings if finding.state == "failed"][:2] == [
        "frozen/timer.py has changed",
        f"no upgrade explains changed code: this is overnight {tool_version()}, as when it was sealed",
    ]
    assert sound.launcher.orders == []


def test_a_scoring_that_fails_is_a_finding(sound: Night) -> None:
    """A crash while scoring is reported with its reason."""
    sound.launcher.spoil = lambda job: Failed(state=TrialState.CRASHED, error_class="E", error_text="boom")
    assert broken(verify(sound.study, scorer=sound.launcher)) == ["the best checkpoint cannot be scored: crashed, boom"]


def test_a_study_is_read_back(sound: Night) -> None:
    """What `load` returns is the study that was made."""
    again = load(sound.study.paths.root.name, sound.study.paths.root.parent)
    assert (again.file, again.baseline, again.budget, again.evaluation) == (
        sound.study.file,
        sound.study.baseline,
        sound.study.budget,
        sound.study.evaluation,
    )
    assert again.seal.verify(thorough=True) == sound.study.seal.digest
    assert again.mark == sound.study.mark


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE trials SET config = replace(config, 'precision', 'xrecision') WHERE id = 2",
        "UPDATE proposals SET diff = '{' WHERE number = 1",
        "UPDATE lineage SET config = '{' WHERE node = 1",
    ],
)
def test_a_cell_that_reads_as_nothing_is_a_finding_and_hides_no_other(sound: Night, edit: str) -> None:
    """Random damage to the file is named as a failed check, beside what else is wrong."""
    flip(sound.study.paths.policy_toml)
    sound.ledger.close()
    with contextlib.closing(sqlite3.connect(sound.study.paths.ledger)) as raw:
        raw.execute("PRAGMA ignore_check_constraints = ON")
        for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            raw.execute(f"DROP TRIGGER {name}")
        raw.execute(edit)
        raw.commit()
    findings = verify(sound.study, scorer=sound.launcher)
    assert any("policy.toml has changed" in text for text in broken(findings))
    assert any(finding.what in ("ledger", "checkpoint") and finding.state == "failed" for finding in findings)
    assert findings[-1].state == "failed"


def test_another_model_in_the_place_of_a_full_run_is_found(sound: Night) -> None:
    """What the owner takes away is the one that was scored; its card may be edited."""
    tool = tool_of(sound.study.seal, thorough=True)
    replay = Replay(sound.study, tool, sound.ledger, sound.reader, sound.launcher, Silent())
    replay.reproduce()
    run = replay.full_run(Budget.parse("2Mtok"))
    (run.model / "README.md").write_text("# mine")
    assert broken(verify(sound.study, scorer=sound.launcher)) == []
    (run.model / "model.safetensors").write_text("1.0")
    assert any("is not the one that trial" in text for text in broken(verify(sound.study, scorer=sound.launcher)))


def test_another_version_alone_is_an_upgrade(sound: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file need differ: what is not sealed may, and decides too. It is no longer the tool of the seal."""
    versions = sound.study.seal.manifest.versions
    assert versions["overnight"] == tool_version()
    monkeypatch.setattr("harness.seal.PACKAGES", ("overnight",))
    monkeypatch.setattr(
        sound.study.seal,
        "_manifest",
        sound.study.seal.manifest.model_copy(update={"versions": {"overnight": "0.0.9"}, "tool": "0.0.9"}),
    )
    found = inspect(sound.study.seal, thorough=False)
    assert found.upgrade is not None
    assert "overnight 0.0.9 sealed the study" in found.upgrade.versions
    with pytest.raises(SealBroken, match="overnight"):
        sound.study.seal.verify()


def test_the_rules_of_the_judge_are_sealed(sound: Night) -> None:
    """A loosened rule must not pass for the study's."""
    assert {"harness/judge.py", "harness/noise.py", "harness/walk.py"} <= sound.study.seal.manifest.code.keys()
