"""Replays of a base model's study over made-up jobs: the base on the holdout, adapters, merging, cards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from frozen.timer import Budget
from frozen.tokens import EncodedSplit
from harness import acting, cli
from harness.audit import audit
from harness.errors import CheckFailed, WrongUse
from harness.fullrun import Replayed
from harness.jobs.job import Job, MergeJob, ScoreJob, TrainJob
from harness.ledger import Ledger
from harness.queries import Reader
from harness.records import Failed, Role, TrialState
from harness.recovery import DRIVER_DIED
from harness.replay import Replay, budget_of_epochs
from harness.report.summary import gather
from harness.report.unproven import unproven
from harness.rows import Ending
from harness.study import Study, load
from harness.upgrade import tool_of
from harness.view import Silent
from tests.drive import Drive, Killed, Script

BETTER = {"optim.learning_rate": 3e-3}
LONG = Budget.parse("2Mtok")


class Won:
    """A finished search of a base model, with hands to replay it."""

    def __init__(self, study: Study, launcher: Any, *diffs: dict[str, Any]) -> None:
        self.study, self.launcher = study, launcher
        Drive(study.paths, launcher, Script(*diffs)).run()
        self.ledger, self.reader = Ledger.open(study.paths.ledger), Reader(study.paths.ledger)
        launcher.orders.clear()

    def replay(self) -> Replay:
        tool = tool_of(self.study.seal, thorough=True)
        return Replay(self.study, tool, self.ledger, self.reader, self.launcher, Silent())

    def looks(self) -> list[ScoreJob]:
        return [job for job in self.launcher.orders if isinstance(job, ScoreJob) and job.split.name == "holdout"]

    def audit(self) -> list[str]:
        return audit(load(self.study.paths.root), self.reader)


@pytest.fixture
def won(base_study: Callable[..., Study], launcher: Any) -> Iterator[Callable[..., Won]]:
    """Return a maker of finished searches."""
    made: list[Won] = []

    def make(*diffs: dict[str, Any], **asked: Any) -> Won:
        made.append(Won(base_study(**asked), launcher, *(diffs or (BETTER,))))
        return made[-1]

    yield make
    for one in made:
        one.ledger.close()
        one.reader.close()


def test_base_baseline_and_best_are_compared_on_val_and_holdout(won: Callable[..., Won]) -> None:
    """The base looks at the holdout once per study, however many budgets the full runs have."""
    night = won()
    night.replay().reproduce()
    run = night.replay().full_run(LONG)
    assert run.base is not None
    assert run.best.holdout < run.baseline.holdout < run.base.holdout
    assert (run.base.val, run.base.trial, run.base.guard) == (pytest.approx(3.0), 1, pytest.approx(4.0))
    assert [job.weights is None for job in night.looks()] == [False, False, True]
    assert run.best.guard == pytest.approx(4.03, abs=0.001)
    again = night.replay().full_run(Budget.parse("3Mtok"))
    assert again.base == run.base
    assert [job.weights is None for job in night.looks()] == [False, False, True, False, False]
    assert len(night.reader.events("holdout_look")) == 5
    assert night.audit() == []
    facts = gather(night.reader, driver_lives=False)
    assert "looked at 4 times" in " ".join(unproven(facts))
    assert {job.base for job in night.launcher.orders} == {night.study.paths.base.resolve()}
    finals = [trial for trial in night.reader.trials() if trial.role is Role.FINAL]
    assert None not in {trial.guard_score for trial in finals}


def test_the_model_folder_is_the_adapter_with_its_card(won: Callable[..., Won], tiny_base: Any) -> None:
    """PEFT's layout; the card says on which base, how it was trained, how to load it, and claims no license."""
    run = (night := won()).replay().full_run(LONG)
    names = sorted(path.name for path in run.model.iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors", "guard.txt"]
    card = (run.model / "README.md").read_text()
    assert night.study.base is not None
    for text in (
        "library_name: peft",
        f'base_model: "{tiny_base}"',
        "| untouched base | 3.0000 | 3.0000 | 4.0000 |",
        "| bits per byte of the answers | val | holdout | guard |",
        "AutoPeftModelForCausalLM.from_pretrained",
        night.study.base.digest,
        "license: not looked at",
        "`adapter_config.json` names the study's own copy",
        "This model: +0.03",
    ):
        assert text in card


def test_a_card_that_the_trainer_left_is_no_part_of_the_model(
    won: Callable[..., Won], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT writes a template of a card; ours takes its place without changing what was scored."""
    night = won()
    night.replay().reproduce()
    run = night.launcher.run

    def with_card(job: Job, **options: Any) -> Any:
        result = run(job, **options)
        if isinstance(job, TrainJob):
            (job.folder / "model" / "README.md").write_text("# Model card template")
        return result

    monkeypatch.setattr(night.launcher, "run", with_card)
    first = night.replay().full_run(LONG)
    assert "template" not in (first.model / "README.md").read_text()
    assert night.replay().full_run(LONG) == first
    assert night.audit() == []


def test_full_fine_tuning_and_preferences_have_their_own_words(won: Callable[..., Won]) -> None:
    """Pairs right beside bits per pair, no guard where there is none, and a whole model to load."""
    run = won(task="dpo", method="full", guard=False).replay().full_run(LONG)
    card = (run.model / "README.md").read_text()
    assert "| bits per preference pair | val | holdout | val, pairs right | holdout, pairs right |" in card
    assert "| untouched base | 1.0000 | 1.0000 | 50.0% | 50.0% |" in card
    assert "transformers import AutoModelForCausalLM" in card
    assert "library_name: transformers" in card
    assert "uard" not in card
    assert run.base is not None
    assert run.base.holdout_accuracy == 0.5
    unit, lines = "bits per preference pair", acting._full(run, "bits per preference pair", None)
    assert unit in lines[0]
    assert (
        lines[1]
        == "  base      val 1.0000, 50.0% of the pairs right, holdout 1.0000, 50.0% of the pairs right (trial 1)"
    )


def test_a_replay_of_nothing_but_the_baseline_says_so(
    won: Callable[..., Won], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was kept: it is not compared with itself, but with the untouched base."""
    night = won({"optim.learning_rate": 1e-4})
    night.replay().reproduce()
    run = night.replay().full_run(LONG)
    assert (run.node, run.best, run.base is not None) == (0, run.baseline, True)
    lines = acting._full(run, "bits", night.study.file.eval.guard)
    assert lines[0] == "Full run with 2000000tok, of the baseline, in bits:"
    assert [line.split()[0] for line in lines[1:3]] == ["base", "baseline"]
    gain = run.base.holdout - run.baseline.holdout
    assert gain > 0.01
    assert lines[3] == f"  on the holdout the baseline is {gain:.4f} better than the untouched base; one seed."
    assert not any("best" in line for line in lines if not line.startswith("Model:"))
    found = night.replay().reproduced()
    monkeypatch.setattr("harness.replay.replay", lambda *_, **__: Replayed(reproduction=found, ablation=None, full=run))
    assert cli.main(["replay", str(night.study.paths.root), "--tokens", "2000000"]) == 0
    shown = capsys.readouterr().out
    assert "The search has kept no change, so its best config is the baseline: what was replayed is the" in shown
    assert "not better" not in shown


@pytest.mark.parametrize(("gain", "said"), [(0.01, "0.0100 better"), (-0.01, "0.0100 worse"), (-1e-6, "no better")])
def test_a_best_config_is_better_worse_or_no_better(won: Callable[..., Won], gain: float, said: str) -> None:
    """In plain words."""
    run = won().replay().full_run(LONG)
    run = dataclasses.replace(run, best=dataclasses.replace(run.best, holdout=run.baseline.holdout - gain))
    assert f"  on the holdout the best config is {said} than the baseline; one seed each." in acting._full(
        run, "bits", None
    )


# --- merging ---


def test_a_merged_model_lies_beside_the_adapter_and_scores_the_same(won: Callable[..., Won]) -> None:
    """It is scored as a full model without its adapter; the difference is an event and in the card."""
    night = won()
    night.replay().reproduce()
    night.launcher.merge_shift = 2e-5
    run = night.replay().full_run(LONG, merge=True)
    assert run.merged is not None
    assert run.merged.folder == run.model.with_name("merged")
    assert run.merged.agrees
    assert run.merged.difference == pytest.approx(2e-5)
    (job,) = [job for job in night.launcher.orders if isinstance(job, MergeJob)]
    assert (job.base, job.weights) == (night.study.paths.base.resolve(), run.model.resolve())
    scores = [job for job in night.launcher.orders if isinstance(job, ScoreJob) and job.weights is not None]
    scoring = [job for job in scores if job.weights == run.model.with_name("merging").resolve() / "model"]
    assert [(job.config.method, job.config.adapter) for job in scoring] == [("full", None)]
    (event,) = night.reader.events("merged")
    assert event.data["difference"] == pytest.approx(2e-5)
    assert "merged into its base it scores" in (run.model / "README.md").read_text()
    night.launcher.orders.clear()
    assert night.replay().full_run(LONG, merge=True) == run
    assert night.launcher.orders == []
    assert night.audit() == []
    lines = acting._full(run, "bits per byte of the answers", night.study.file.eval.guard)
    assert lines[-1].startswith(f"Merged: {run.merged.folder}")
    assert any("guard set, bits per byte against the untouched base: best +0.03" in line for line in lines)
    (run.merged.folder / "model.safetensors").write_text("1.0")
    assert any("was merged into" in sentence for sentence in night.audit())
    with pytest.raises(CheckFailed, match="was merged into"):
        night.replay().full_run(LONG, merge=True)


def test_a_merge_that_moves_the_score_is_said(won: Callable[..., Won]) -> None:
    """What rounding does not explain is not passed over."""
    night = won()
    night.launcher.merge_shift = 3e-3
    run = night.replay().full_run(LONG, merge=True)
    assert run.merged is not None
    assert not run.merged.agrees
    (event,) = night.reader.events("merged")
    assert "more than 0.0001, which rounding in fp32 does not explain" in event.text


@pytest.mark.parametrize("turn", range(12))
def test_a_full_run_with_a_merge_goes_on_after_a_death(won: Callable[..., Won], turn: int) -> None:
    """Whatever job the driver dies before, the next call finishes, repeats nothing scored and merges once."""
    night = won()
    night.replay().reproduce()
    done = [0]

    def die(job: Job) -> Failed | None:
        done[0] += 1
        if done[0] == turn + 1:
            raise Killed
        return None

    night.launcher.spoil = die
    with contextlib.suppress(Killed):
        night.replay().full_run(LONG, merge=True)
    for trial in night.reader.open_trials():
        lost = Failed(state=TrialState.LOST, error_class=DRIVER_DIED, error_text="gone")
        night.ledger.close_trial(trial.id, Ending.of_failed(lost))
    run = night.replay().full_run(LONG, merge=True)
    assert run.merged is not None
    assert run.merged.folder.is_dir()
    assert not run.merged.folder.with_name("merging").exists()
    assert len(night.reader.events("merged")) == 1
    assert len(night.reader.events("holdout_score")) == 3
    assert night.audit() == []


@pytest.mark.parametrize(("asked", "said"), [({"method": "full"}, "all weights of its base"), ({}, "")])
def test_what_cannot_be_merged_is_refused_before_anything_runs(
    won: Callable[..., Won], asked: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole model has nothing to merge, and a merge without a full run has nothing to work on."""
    night = won(**asked)
    if said:
        with pytest.raises(WrongUse, match=said):
            night.replay().full_run(LONG, merge=True)
    else:
        assert cli.main(["replay", str(night.study.paths.root), "--merge"]) == 2
        assert "give it a budget" in capsys.readouterr().err
    assert [job for job in night.launcher.orders if not isinstance(job, ScoreJob)] == []


def test_a_failing_merge_says_why(won: Callable[..., Won]) -> None:
    """The full run stays; the next call tries again."""
    night = won()
    failed = Failed(state=TrialState.CRASHED, error_class="E", error_text="no room")
    night.launcher.spoil = lambda job: failed if isinstance(job, MergeJob) else None
    with pytest.raises(CheckFailed, match="could not be merged: crashed, no room"):
        night.replay().full_run(LONG, merge=True)
    night.launcher.spoil = lambda job: None
    assert night.replay().full_run(LONG, merge=True).merged is not None


def test_a_merge_out_of_four_bits_says_why_it_scores_otherwise(won: Callable[..., Won]) -> None:
    """The adapter made up for the rounding of a base that the merged model holds in full."""
    night = won(baseline={"quantization": "nf4"})
    night.launcher.merge_shift = 3e-3
    run = night.replay().full_run(LONG, merge=True)
    assert run.merged is not None
    (event,) = night.reader.events("merged")
    assert "trained beside a base in 4 bits that this model holds in full" in event.text
    assert "its weights held as nf4 while training" in (run.model / "README.md").read_text()


@pytest.mark.parametrize("task", ["continue", "sft", "dpo"])
def test_a_pass_over_the_training_split_is_its_positions(won: Callable[..., Won], task: str) -> None:
    """Every token and a separator for every document; of conversations and pairs whole rows, padding included."""
    study = won(task=task).study
    split = EncodedSplit.load(study.paths.split("train"))
    positions, passes = len(split.tokens) + split.documents, budget_of_epochs(study, 2).amount / 2
    assert passes == positions if task == "continue" else passes > positions
    assert budget_of_epochs(study, 1).amount == passes
