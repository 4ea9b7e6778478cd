import json
from collections.abc import Callable
from typing import Any

import pytest

from harness import checkpoints
from harness.cli import main
from harness.records import Failed, TrialState
from harness.seal import tool_version
from harness.study import load
from harness.verify import Finding, verify

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
