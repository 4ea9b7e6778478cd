import contextlib
import html
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from frozen.timer import Budget
from harness import acting, cli
from harness.audit import audit
from harness.cli import main
from harness.errors import CheckFailed, SealBroken, WrongUse
from harness.fullrun import FULL_RUN_REPLICATE, Reproduction
from harness.jobs.job import ScoreJob, TrainJob
from harness.queries import Reader
from harness.records import Failed, Role, TrialState
from harness.recovery import DRIVER_DIED
from harness.replay import ABLATION_REPLICATES, Replay, replay
from harness.report.page import page
from harness.report.summary import gather
from harness.report.unproven import unproven
from harness.rows import Ending
from harness.upgrade import TOOL_CHANGED, tool_of
from harness.view import Silent
from harness.warm import MARK

Night = Any  # the fixture's class lives in conftest.py
LONG = Budget.parse("2Mtok")


@pytest.fixture
def won(night: Night) -> Night:
    """Return a study with a winner."""
    night.seat_baseline()
    night.keep(1e-3)
    return night


def replay_of(night: Night) -> Replay:
    return Replay(
        night.study, tool_of(night.study.seal, thorough=True), night.ledger, night.reader, night.launcher, Silent()
    )


def trained(night: Night) -> list[TrainJob]:
    return [order for order in night.launcher.orders if isinstance(order, TrainJob)]


def looks(night: Night) -> list[ScoreJob]:
    holdout = night.study.paths.split("holdout").resolve()
    return [order for order in night.launcher.orders if isinstance(order, ScoreJob) and order.split == holdout]


def test_reproduction_is_a_fresh_seed_within_the_noise(won: Night) -> None:
    """The winner runs once more with a seed that nobody used, and does not move what it is checked against."""
    before = won.reader.incumbent().scores
    found = replay_of(won).reproduce()
    assert found.agrees
    assert found.expected == pytest.approx(sum(before.values()) / len(before))
    assert won.reader.incumbent().scores == before
    assert replay_of(won).reproduce().trial != found.trial
    assert len({order.seed for order in trained(won)} | set(before)) == 2 + len(before)
    assert trained(won)[0].budget == "200000tok"
    assert won.reader.trial(found.trial).curve
    assert looks(won) == []


def test_a_winner_that_does_not_reproduce_is_not_trained_further(won: Night) -> None:
    """Hours of training are not spent on a result that one fresh seed refutes."""
    won.launcher.shift = 0.5
    runner = replay_of(won)
    assert not runner.reproduce().agrees
    with pytest.raises(CheckFailed, match="does not reproduce"):
        runner.reproduced()
    assert len(trained(won)) == 2


def test_seeds_that_did_not_agree_are_not_forgotten(won: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever replays until a seed agrees is told of the others."""
    won.launcher.shift = 0.5
    refuted = replay_of(won).reproduce()
    won.launcher.shift = 0.0
    agreed = replay_of(won).reproduce()
    assert list(acting._missed(won.study, agreed)) == [
        f"Of 2 seeds of this config so far 1 lay outside: trial {refuted.trial} with {refuted.score:.4f}."
    ]


def test_a_full_run_of_hardly_any_steps_is_refused_before_anything_runs(won: Night) -> None:
    """Like a study's own budget: nothing is trained, no folder is made."""
    assert cli.main(["replay", str(won.study.paths.root), "--tokens", "10"]) == 2
    assert [trial for trial in won.reader.trials() if trial.role is Role.FINAL] == []
    assert not won.study.paths.replay.exists()


def test_a_resumed_full_run_has_its_whole_curve(won: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """The points from before a death are there, those that ran again only once, and a line that was cut off is none."""
    (point,) = won.reader.trial(replay_of(won).reproduce().trial).curve
    run, early = won.launcher.run, point.model_copy(update={"step": 4, "progress": 0.4})

    def dies(job: Any, **options: Any) -> Any:
        options["on_point"](early)
        options["on_point"](point)
        raise RuntimeError("the driver dies")

    monkeypatch.setattr(won.launcher, "run", dies)
    with pytest.raises(RuntimeError, match="dies"):
        replay_of(won).full_run(LONG)
    monkeypatch.setattr(won.launcher, "run", run)
    (lost,) = won.reader.open_trials()
    died = Failed(state=TrialState.LOST, error_class=DRIVER_DIED, error_text="its driver died")
    won.ledger.close_trial(lost.id, Ending.of_failed(died))
    (file,) = won.study.paths.replay.glob("*/curve.jsonl")
    with file.open("a") as lines:
        lines.write('{"progress": 0.')
    found = replay_of(won).full_run(LONG)
    assert won.reader.trial(found.best.trial).curve == (early, point)


def test_an_agreeing_reproduction_is_not_repeated(won: Night) -> None:
    """A resumed full run does not start with another reproduction."""
    found = replay_of(won).reproduce()
    assert replay_of(won).reproduced() == found
    assert len(trained(won)) == 1


def test_full_run_stands_beside_the_baseline(won: Night) -> None:
    """Both run under the same budget and seed, are scored on val, and look at the holdout once each."""
    replay_of(won).reproduce()
    won.launcher.orders.clear()
    run = replay_of(won).full_run(LONG)
    assert run.node == 1
    assert run.best.val < run.baseline.val
    orders = trained(won)
    assert {order.budget for order in orders} == {"2000000tok"}
    assert {order.seed for order in orders} == {FULL_RUN_REPLICATE}
    assert all(order.resumable for order in orders)
    assert len(looks(won)) == len(won.reader.events("holdout_look")) == 2
    assert sorted(path.name for path in run.model.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    card = (run.model / "README.md").read_text()
    for text in (f"{run.best.holdout:.4f}", won.study.seal.digest, "optim.learning_rate", "node 1 reproduces"):
        assert text in card
    finals = [trial for trial in won.reader.trials() if trial.role is Role.FINAL]
    assert [trial.proposal for trial in finals] == [1, 1, None]
    assert audit(won.study, won.reader) == []
    assert not list(won.study.paths.replay.glob("*/train"))


def test_a_second_call_looks_at_nothing_again(won: Night) -> None:
    """The same full run again gives the same numbers without training, scoring or a look at the holdout."""
    first = replay_of(won).full_run(LONG)
    won.launcher.orders.clear()
    assert replay_of(won).full_run(LONG) == first
    assert won.launcher.orders == []


def test_a_baseline_that_won_runs_once(night: Night) -> None:
    """Where nothing was kept there is one full run, and it is said to be the baseline."""
    night.seat_baseline()
    run = replay_of(night).full_run(LONG)
    assert run.best == run.baseline
    assert run.node == 0
    assert len(trained(night)) == 1


class Killed(BaseException):
    """The driver dies here."""


@pytest.mark.parametrize("turn", range(6))
def test_a_full_run_goes_on_after_a_death(won: Night, turn: int) -> None:
    """Dying before any job leaves checkpoints in place, repeats no finished part, and counts every look."""
    replay_of(won).reproduce()
    done = [0]

    def die(job: TrainJob | ScoreJob) -> Failed | None:
        done[0] += 1
        if done[0] == turn + 1:
            raise Killed
        return None

    won.launcher.spoil = die
    with pytest.raises(Killed):
        replay_of(won).full_run(LONG)
    for trial in won.reader.open_trials():
        assert next(won.study.paths.replay.glob("*/train")).exists()
        lost = Failed(state=TrialState.LOST, error_class=DRIVER_DIED, error_text="gone")
        won.ledger.close_trial(trial.id, Ending.of_failed(lost))
    run = replay_of(won).full_run(LONG)
    assert run.best.val < run.baseline.val
    finals = [trial for trial in won.reader.trials() if trial.role is Role.FINAL and trial.score is not None]
    assert len(finals) == 3
    assert len(won.reader.events("holdout_score")) == 2
    assert len(won.reader.events("holdout_look")) == 2 + (turn in (2, 5))
    assert audit(won.study, won.reader) == []


def test_an_interrupted_run_is_closed(won: Night) -> None:
    """Ctrl-C closes the row as interrupted and keeps what is needed to go on."""

    def interrupt(job: TrainJob | ScoreJob) -> Failed | None:
        raise KeyboardInterrupt

    won.launcher.spoil = interrupt
    with pytest.raises(KeyboardInterrupt):
        replay_of(won).full_run(LONG)
    assert won.reader.trials()[-1].state is TrialState.INTERRUPTED


def test_a_failed_run_says_why(won: Night) -> None:
    """A full run that diverges is an error with the trial and its log."""
    won.launcher.spoil = lambda job: Failed(state=TrialState.DIVERGED, error_class="Diverged", error_text="loss is NaN")
    with pytest.raises(CheckFailed, match=r"ended diverged: loss is NaN; see .*log\.txt"):
        replay_of(won).full_run(LONG)


def test_a_study_without_a_baseline_cannot_be_replayed(night: Night) -> None:
    """There is nothing to replay before the first trial."""
    with pytest.raises(WrongUse, match="no baseline yet"):
        replay_of(night).reproduce()


def test_a_model_that_was_swapped_does_not_look_at_the_holdout(won: Night) -> None:
    """The score of a row belongs to the files that were scored: other files are refused before the holdout is read."""
    run = replay_of(won).full_run(LONG)
    looks_before = len(looks(won))
    assert replay_of(won).full_run(LONG) == run
    (run.model / "model.safetensors").write_text("1.0")
    with pytest.raises(CheckFailed, match="is not the one that trial"):
        replay_of(won).full_run(LONG)
    assert len(looks(won)) == looks_before


# --- taking steps out ---


@pytest.fixture
def climbed(won: Night) -> Night:
    """Return a study with a second step, which turned the first one's learning rate again but not its other knob."""
    won.keep(2e-3, beta1=0.8)
    won.keep(3e-3, beta2=0.9)
    assert [standing.node for standing in won.reader.best_lineage()] == [0, 1, 2, 3]
    return won


def test_every_step_is_taken_out_on_the_seeds_of_the_reproductions(climbed: Night) -> None:
    """What a later step turned again stays; what is left is turned back, and the rows tell what is lost without it."""
    first = replay_of(climbed).reproduce()
    overridden, second, third = replay_of(climbed).ablate()
    assert (overridden.without, overridden.pairs) == (None, 0)
    assert second.back == {"optim.beta1": climbed.study.baseline.optim.beta1}
    assert (second.loss, second.is_proven) == (pytest.approx(0), False)
    assert third.back == {"optim.learning_rate": 2e-3, "optim.beta2": climbed.study.baseline.optim.beta2}
    assert (third.loss, third.is_proven) == (pytest.approx(0.1), True)
    noise = climbed.reader.noise()
    assert third.standard_error == pytest.approx(noise.standard_deviation * (2 / ABLATION_REPLICATES) ** 0.5)
    finals = [trial for trial in climbed.reader.trials() if trial.role is Role.FINAL]
    by_config: dict[str, list[int]] = {}
    for trial in finals:
        by_config.setdefault(trial.config.digest, []).append(trial.replicate)
    assert list(by_config.values()) == [[first_of(first, climbed) + n for n in range(ABLATION_REPLICATES)]] * 3
    assert {trial.proposal for trial in finals} == {2, 3}
    assert {order.budget for order in trained(climbed)} == {str(climbed.study.budget)}
    assert audit(climbed.study, climbed.reader) == []
    assert climbed.reader.incumbent().config.optim.learning_rate == 3e-3
    assert not list(climbed.study.paths.replay.iterdir())


def first_of(found: Reproduction, night: Night) -> int:
    return int(night.reader.trial(found.trial).replicate)


def test_a_second_ablation_runs_nothing(climbed: Night) -> None:
    """Rows that are there answer."""
    first = replay_of(climbed).ablate()
    climbed.launcher.orders.clear()
    assert replay_of(climbed).ablate() == first
    assert climbed.launcher.orders == []


@pytest.mark.parametrize("turn", [0, 1, 3, 7, 10, 17])
def test_an_ablation_goes_on_after_a_death(climbed: Night, turn: int) -> None:
    """Whatever job the driver dies before, the next call runs what is missing and comes to the same."""
    done = [0]

    def die(job: TrainJob | ScoreJob) -> Failed | None:
        done[0] += 1
        if done[0] == turn + 1:
            raise Killed
        return None

    climbed.launcher.spoil = die
    with pytest.raises(Killed):
        replay_of(climbed).ablate()
    for trial in climbed.reader.open_trials():
        lost = Failed(state=TrialState.LOST, error_class=DRIVER_DIED, error_text="gone")
        climbed.ledger.close_trial(trial.id, Ending.of_failed(lost))
    assert [step.pairs for step in replay_of(climbed).ablate()] == [0, ABLATION_REPLICATES, ABLATION_REPLICATES]
    finals = [trial for trial in climbed.reader.trials() if trial.role is Role.FINAL and trial.score is not None]
    assert len(finals) == 3 * ABLATION_REPLICATES
    assert audit(climbed.study, climbed.reader) == []


def test_an_ablation_stays_sound_when_the_search_goes_on(won: Night) -> None:
    """A config without its only step is the baseline's, and one without its last step is the former incumbent's."""
    (only,) = replay_of(won).ablate()
    assert only.without == won.study.baseline
    won.keep(2e-3, beta1=0.8)
    former = won.reader.best_lineage()[1].config
    overridden, last = replay_of(won).ablate()
    assert (overridden.back, last.without) == ({}, former)
    won.keep(3e-3)
    assert audit(won.study, won.reader) == []


def test_failing_without_a_step_is_a_result(climbed: Night) -> None:
    """Where training diverges without a step, the ablation goes on, says so, and does not try again."""

    def diverge(job: TrainJob | ScoreJob) -> Failed | None:
        if isinstance(job, TrainJob) and job.config.optim.learning_rate == 2e-3:
            return Failed(state=TrialState.DIVERGED, error_class="Diverged", error_text="loss is NaN")
        return None

    climbed.launcher.spoil = diverge
    third = replay_of(climbed).ablate()[2]
    assert (third.failed, third.pairs, third.loss) == (ABLATION_REPLICATES, 0, None)
    assert (climbed.study.paths.replay / "without-3").exists()
    climbed.launcher.orders.clear()
    replay_of(climbed).ablate()
    assert climbed.launcher.orders == []
    assert audit(climbed.study, climbed.reader) == []


def test_another_tool_takes_steps_out_anew(climbed: Night, upgrade: Callable[..., None]) -> None:
    """Pairs are made within one tool."""
    replay_of(climbed).ablate()
    upgrade(climbed)
    before = len(trained(climbed))
    assert [step.pairs for step in replay_of(climbed).ablate()] == [0, 2 * ABLATION_REPLICATES, 2 * ABLATION_REPLICATES]
    assert len(trained(climbed)) == before + 3 * ABLATION_REPLICATES
    assert audit(climbed.study, climbed.reader) == []


def test_what_was_taken_out_is_where_people_look(
    climbed: Night, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lineage, proposal, report and model card tell from the rows what each step is worth."""
    place = str(climbed.study.paths.root)
    assert main(["lineage", place]) == 0
    assert "without it" not in capsys.readouterr().out
    with Reader(climbed.study.paths.ledger) as reader:
        asked = "\n".join(unproven(gather(reader, driver_lives=False)))
    assert "`overnight replay night --ablate`" in asked
    error = replay_of(climbed).ablate()[2].standard_error
    loss, nothing = f"+0.1000 ± {error:.4f}", f"+0.0000 ± {error:.4f}, not proven"
    for command in (["lineage", place], ["show", place, "p3"]):
        assert main(command) == 0
        assert loss in " ".join(capsys.readouterr().out.split())
    assert main(["show", place, "p2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["loss_without_proven"], document["loss_without_pairs"]) == (False, ABLATION_REPLICATES)
    with Reader(climbed.study.paths.ledger) as reader:
        facts = gather(reader, driver_lives=False)
        text = html.unescape(page(facts, climbed.study.paths))
        left = unproven(facts)
    assert loss in text
    assert nothing in text
    assert "turned again by later steps" in text
    assert [sentence for sentence in left if "still matters" in sentence] == [
        "That p2 still matters: the best config is not worse without it beyond chance."
    ]
    card = (replay_of(climbed).full_run(LONG).model / "README.md").read_text()
    assert f"without it: {loss}" in card


def test_without_a_kept_change_there_is_nothing_to_take_out(night: Night) -> None:
    """The baseline has no steps, which is said before anything runs."""
    night.seat_baseline()
    with pytest.raises(WrongUse, match="has kept no change yet"):
        replay_of(night).ablate()
    assert night.launcher.orders == []


# --- the whole command ---


class Heard(Silent):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """Remember."""
        self.lines.append(text)


@pytest.fixture
def nursery(won: Night, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Let replays use the made-up launcher, beside a process that carries the study's mark as a nursery does."""
    started: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def launcher(*, mark: str, **_: Any) -> Iterator[Any]:
        started.append(marked(mark))
        yield won.launcher
        started[-1].kill()
        started[-1].wait()

    monkeypatch.setattr("harness.replay.Launcher", launcher)
    return started


def marked(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "300"], env=os.environ | {MARK: mark})


@pytest.mark.process
def test_leftovers_are_swept_before_our_own_nursery_starts(won: Night, nursery: list[subprocess.Popen[bytes]]) -> None:
    """What a dead driver left is killed and its row closed; our own nursery, which carries the same mark, lives."""
    left_row = won.ledger.begin(
        proposal=1,
        role=Role.FINAL,
        config=won.reader.incumbent().config,
        seed=5,
        replicate=FULL_RUN_REPLICATE,
        epoch=0,
        budget="2000000tok",
        seal=won.study.seal.digest,
        device="cpu",
        sandbox="plain",
    )
    left = marked(won.study.mark)
    alive: list[int | None] = []
    won.launcher.spoil = lambda job: alive.append(nursery[0].poll())
    assert replay(won.study, None, Silent()).reproduction.agrees
    assert left.wait() == -signal.SIGKILL
    assert alive == [None, None]
    assert won.reader.trial(left_row).state is TrialState.LOST
    assert [event.data["processes"] for event in won.reader.events("swept")] == [1]


@pytest.mark.process
@pytest.mark.usefixtures("nursery")
def test_another_tool_is_said_before_anything_runs(won: Night, upgrade: Callable[..., None]) -> None:
    """The first line on the screen names what differs; without an upgrade there is none."""
    heard = Heard()
    replay(won.study, None, heard)
    assert len(heard.lines) == 1
    upgrade(won)
    replay(won.study, None, heard)
    assert "this is overnight 9.9: frozen/timer.py has changed" in heard.lines[1]
    assert heard.lines[2].startswith("Node 1 reproduces")


def test_a_tampered_tool_starts_no_launcher(
    won: Night, upgrade: Callable[..., None], nursery: list[subprocess.Popen[bytes]]
) -> None:
    """A broken seal refuses a replay before anything is started."""
    upgrade(won, won.study.seal.manifest.tool)
    with pytest.raises(SealBroken):
        replay(won.study, None, Silent())
    assert nursery == []


# --- after an upgrade of the tool ---


def test_an_upgraded_tool_must_reproduce_first(won: Night, upgrade: Callable[[Night], None]) -> None:
    """What the old tool reproduced proves nothing of the new one, whose rows and events say what ran."""
    sealed = won.study.seal.digest
    old = replay_of(won).reproduced()
    upgrade(won)
    new = replay_of(won).reproduced()
    assert new.trial != old.trial
    assert replay_of(won).reproduced() == new
    seals = [won.reader.trial(found.trial).seal for found in (old, new)]
    assert seals == [sealed, tool_of(won.study.seal, thorough=True).seal]
    assert seals[0] != seals[1]
    (event,) = won.reader.events(TOOL_CHANGED)
    assert "this is overnight 9.9: frozen/timer.py has changed" in event.text
    assert event.data["seal"] == seals[1]
    assert "this is overnight 9.9" in won.reader.events("reproduced")[-1].text
    assert audit(won.study, won.reader) == []


def test_the_card_of_an_upgraded_tool_says_so(won: Night, upgrade: Callable[[Night], None]) -> None:
    """Whoever gets the model reads that another tool trained it, and what differs."""
    before = won.study.seal.digest
    upgrade(won)
    replay_of(won).reproduced()
    run = replay_of(won).full_run(LONG)
    card = (run.model / "README.md").read_text()
    for text in (before, won.reader.trial(run.best.trial).seal, "by another tool", "frozen/timer.py has changed"):
        assert text in card
    assert before != won.reader.trial(run.best.trial).seal
    assert audit(won.study, won.reader) == []


def test_two_tools_share_no_full_run(won: Night, upgrade: Callable[[Night], None]) -> None:
    """A run that the old tool left half done starts anew, and one that it finished is not set beside a new one."""
    replay_of(won).reproduced()
    won.launcher.spoil = lambda job: interrupted()
    with pytest.raises(KeyboardInterrupt):
        replay_of(won).full_run(LONG)
    won.launcher.spoil = lambda job: None
    (left,) = won.study.paths.replay.glob("*/train")
    replay_of(won).full_run(Budget.parse("3Mtok"))
    trained_before = len(trained(won))
    upgrade(won)
    with pytest.raises(WrongUse, match=r"best was trained for 3000000tok before the tool changed .*another budget"):
        replay_of(won).full_run(Budget.parse("3Mtok"))
    assert len(trained(won)) == trained_before
    replay_of(won).reproduced()
    replay_of(won).full_run(LONG)
    assert left.resolve() not in {order.folder.resolve() for order in trained(won)[trained_before:]}
    assert audit(won.study, won.reader) == []


def interrupted() -> Failed:
    raise KeyboardInterrupt


def test_a_tool_that_changes_meanwhile_ends_the_replay(won: Night, upgrade: Callable[[Night], None]) -> None:
    """No row says that one tool ran what another one did: neither training nor scoring goes on."""
    runner, orders = replay_of(won), won.launcher.orders

    def change(job: TrainJob | ScoreJob) -> None:
        upgrade(won)
        runner.finals.study = won.study

    won.launcher.spoil = change
    with pytest.raises(SealBroken, match="changed since this replay began"):
        runner.full_run(LONG)
    assert len(orders) == 1
    with pytest.raises(SealBroken, match="changed since this replay began"):
        runner.reproduce()
    assert len(orders) == 1


def test_no_upgrade_replays_another_question(won: Night, upgrade: Callable[[Night], None]) -> None:
    """Changed data stay refused, whatever the tool."""
    upgrade(won)
    (won.study.paths.split("val") / "tokens.bin").write_bytes(b"easy")
    with pytest.raises(SealBroken, match=r"data/val/tokens\.bin has changed"):
        replay_of(won)


def test_a_changed_tool_of_the_same_version_is_not_replayed(won: Night, upgrade: Callable[..., None]) -> None:
    """Changed code is an upgrade only if it says so."""
    upgrade(won, won.study.seal.manifest.tool)
    with pytest.raises(SealBroken, match=r"frozen/timer\.py has changed"):
        replay_of(won)
