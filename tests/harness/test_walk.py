import dataclasses
from collections.abc import Callable

import pytest

from harness.config import TrialConfig, apply
from harness.records import (
    BREAKS_GUARD,
    AbortIf,
    Decision,
    Guard,
    JudgeRules,
    Noise,
    Past,
    Role,
    Standing,
    Trial,
    TrialState,
    Verdict,
)
from harness.walk import DRIVER_DIED, VANISHED_LIMIT, Repair, Run, consecutive_failures, next_step

NOISE = Noise(standard_deviation=0.01, degrees_of_freedom=20)
RULES = JudgeRules()


@pytest.fixture
def incumbent(base: TrialConfig) -> Standing:
    """Return the baseline with three replicates around 1.0."""
    scores = {0: 1.0, 1: 1.01, 2: 0.99}
    return Standing(node=0, parent=None, diff={}, config=base, scores=scores, trial=1)


@pytest.fixture
def candidate(base: TrialConfig) -> TrialConfig:
    """Return the config of the proposal under test."""
    return apply(base, {"optim.learning_rate": 1e-3})


def test_a_new_proposal_is_screened(make_past: Callable[..., Past], incumbent: Standing) -> None:
    """The first step is one trial with the first replicate's seed."""
    past = make_past()
    step = next_step(past, incumbent, NOISE, RULES, epoch=1, known=())
    assert step == Run(role=Role.SCREEN, config=past.config, replicate=0, proposal=1)  # type: ignore[arg-type]


def test_out_of_memory_is_repaired_once_with_the_same_effective_batch(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, candidate: TrialConfig
) -> None:
    """Half the per-device batch and twice the accumulation; a second time it is the config's end."""
    failed = make_trial(config=candidate, state=TrialState.OUT_OF_MEMORY, error_text="too big")
    step = next_step(make_past(failed), incumbent, NOISE, RULES, epoch=1, known=())
    assert isinstance(step, Repair)
    assert (step.config.batch.per_device, step.config.batch.accumulation) == (4, 2)
    amended = dataclasses.replace(make_past(failed), config=step.config)
    again = next_step(amended, incumbent, NOISE, RULES, epoch=1, known=())
    assert again == Run(role=Role.REPAIR, config=step.config, replicate=0, proposal=1)
    twice = make_trial(config=step.config, role=Role.REPAIR, state=TrialState.OUT_OF_MEMORY, error_text="still")
    end = next_step(dataclasses.replace(amended, trials=(failed, twice)), incumbent, NOISE, RULES, epoch=1, known=())
    assert isinstance(end, Verdict)
    assert end.decision is Decision.DISCARDED
    assert "still" in end.reason


def test_a_repair_that_is_known_already_is_not_run_again(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, candidate: TrialConfig
) -> None:
    """The repaired config of one proposal may be another's: its result is there."""
    failed = make_trial(config=candidate, state=TrialState.OUT_OF_MEMORY, error_text="too big")
    repaired = apply(candidate, {"batch.per_device": 4, "batch.accumulation": 2})
    step = next_step(make_past(failed), incumbent, NOISE, RULES, epoch=1, known={repaired.digest})
    assert isinstance(step, Verdict)


@pytest.mark.parametrize("size", [1, 3, 9])
def test_repairs_keep_the_effective_batch_of_odd_sizes(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, base: TrialConfig, size: int
) -> None:
    """An odd batch is split by its smallest factor; a batch of one cannot be split."""
    config = apply(base, {"batch.per_device": size})
    failed = make_trial(config=config, state=TrialState.OUT_OF_MEMORY, error_text="too big")
    step = next_step(make_past(failed, **{"batch.per_device": size}), incumbent, NOISE, RULES, epoch=1, known=())
    if size == 1:
        assert isinstance(step, Verdict)
    else:
        assert isinstance(step, Repair)
        assert step.config.batch.per_device < size
        assert step.config.batch.per_step == config.batch.per_step


def test_divergence_in_the_screening_ends_the_proposal(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, candidate: TrialConfig
) -> None:
    """A failed screening has no score and is discarded with its own words."""
    failed = make_trial(config=candidate, state=TrialState.DIVERGED, error_text="loss is NaN at step 3")
    step = next_step(make_past(failed), incumbent, NOISE, RULES, epoch=1, known=())
    assert isinstance(step, Verdict)
    assert (step.decision, step.difference) == (Decision.DISCARDED, None)
    assert "NaN at step 3" in step.reason


def test_a_proposal_is_held_to_its_own_condition(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, candidate: TrialConfig
) -> None:
    """Its screening run carries the condition, and ends the proposal if it is met; replicates run to their end."""
    past = make_past()
    wanted = AbortIf(probe_above=3.0, after=0.5)
    past = dataclasses.replace(past, proposal=past.proposal.model_copy(update={"abort_if": wanted}))
    step = next_step(past, incumbent, NOISE, RULES, epoch=1, known=())
    assert isinstance(step, Run)
    assert step.abort_if == wanted
    stopped = make_trial(config=candidate, state=TrialState.STOPPED, error_text="the probe is at 3.1")
    verdict = next_step(dataclasses.replace(past, trials=(stopped,)), incumbent, NOISE, RULES, epoch=1, known=())
    assert isinstance(verdict, Verdict)
    assert (verdict.decision, verdict.difference) == (Decision.DISCARDED, None)
    assert "the probe is at 3.1" in verdict.reason
    good = make_trial(config=candidate, score=0.5)
    step = next_step(dataclasses.replace(past, trials=(good,)), incumbent, NOISE, RULES, epoch=1, known=())
    assert isinstance(step, Run)
    assert step.abort_if is None
    assert consecutive_failures((stopped, stopped, stopped)) == 0


def test_a_dead_driver_says_nothing_about_the_config(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, candidate: TrialConfig
) -> None:
    """However often the driver is killed, the same trial runs again; a job that vanishes too often is discarded."""
    lost = [make_trial(config=candidate, state=TrialState.LOST, error_class=DRIVER_DIED) for _ in range(9)]
    assert isinstance(next_step(make_past(*lost), incumbent, NOISE, RULES, epoch=1, known=()), Run)
    gone = [
        make_trial(config=candidate, state=TrialState.LOST, error_class="WardenGone") for _ in range(VANISHED_LIMIT)
    ]
    assert isinstance(next_step(make_past(gone[0]), incumbent, NOISE, RULES, epoch=1, known=()), Run)
    assert isinstance(next_step(make_past(*gone), incumbent, NOISE, RULES, epoch=1, known=()), Verdict)


def test_a_hopeless_screening_costs_one_trial(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, candidate: TrialConfig
) -> None:
    """What is clearly worse is discarded at once."""
    step = next_step(make_past(make_trial(config=candidate, score=1.2)), incumbent, NOISE, RULES, epoch=1, known=())
    assert isinstance(step, Verdict)
    assert step.decision is Decision.DISCARDED


def test_a_promising_screening_is_confirmed_on_fresh_seeds_until_it_is_kept(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, candidate: TrialConfig
) -> None:
    """The walk ends in a kept verdict whose difference leaves the screening run out."""
    trials = [make_trial(config=candidate, score=0.5)]
    scores = dict(incumbent.scores)
    for _ in range(40):
        now = dataclasses.replace(incumbent, scores=scores)
        step = next_step(make_past(*trials), now, NOISE, RULES, epoch=1, known=())
        if isinstance(step, Verdict):
            break
        assert isinstance(step, Run)
        assert step.role is Role.REPLICATE
        if step.config == candidate:
            assert step.replicate > 0
            trials.append(make_trial(config=candidate, role=Role.REPLICATE, replicate=step.replicate, score=0.8))
        else:
            assert step.replicate not in scores
            scores[step.replicate] = 1.0
    assert isinstance(step, Verdict)
    assert step.decision is Decision.KEPT
    assert step.difference == pytest.approx(-0.2, abs=0.02)


def test_failures_in_a_row_are_counted_over_what_says_nothing(make_trial: Callable[..., Trial]) -> None:
    """Lost and interrupted trials neither add to a row of failures nor break it; a replay's failures are its own."""
    failed = TrialState.CRASHED
    trials = [make_trial(), *(make_trial(state=s) for s in (failed, TrialState.LOST, failed, TrialState.INTERRUPTED))]
    assert consecutive_failures(trials) == 2
    assert consecutive_failures([*trials, make_trial(state=failed, role=Role.FINAL)]) == 2
    assert consecutive_failures([*trials, make_trial()]) == 0


def test_the_guard_set_is_read_off_the_rows(
    make_past: Callable[..., Past], make_trial: Callable[..., Trial], incumbent: Standing, candidate: TrialConfig
) -> None:
    """A screening run that is clearly beyond the limit ends the proposal; the same rows without a limit do not."""
    quiet = Noise(standard_deviation=0.001, degrees_of_freedom=4)
    guard = Guard(reference=4.0, max_regression=0.05, noise=quiet)
    past = make_past(make_trial(config=candidate, score=0.8, guard_score=4.2))
    step = next_step(past, incumbent, NOISE, RULES, epoch=1, known=(), guard=guard)
    assert isinstance(step, Verdict)
    assert step.reason.startswith(BREAKS_GUARD)
    assert isinstance(next_step(past, incumbent, NOISE, RULES, epoch=1, known=()), Run)
    assert isinstance(
        next_step(
            make_past(make_trial(config=candidate, score=0.8, guard_score=4.05)),
            incumbent,
            NOISE,
            RULES,
            epoch=1,
            known=(),
            guard=guard,
        ),
        Run,
    )


def test_the_untouched_base_breaks_no_row_of_failures(make_trial: Callable[..., Trial]) -> None:
    """It trains nothing, so its score says nothing about the machine's training."""
    failed = [make_trial(state=TrialState.CRASHED, error_text="no") for _ in range(2)]
    base = make_trial(role=Role.REFERENCE, proposal=None)
    broken = make_trial(role=Role.REFERENCE, proposal=None, state=TrialState.CRASHED)
    assert consecutive_failures([failed[0], base, failed[1], broken]) == 2
