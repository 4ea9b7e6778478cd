"""The edge of the memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from agent.frontier import frontier, other_failures
from harness.config import apply
from harness.records import Trial, TrialState


def trials(night: Any, *cases: tuple[int, int, TrialState]) -> list[Trial]:
    """Return one trial per (sequences, depth, state) of the baseline's config."""
    first = night.baseline_trials[0]
    return [
        dataclasses.replace(
            first,
            id=number,
            state=state,
            score=2.0 if state is TrialState.SCORED else None,
            parameters=None,
            config=apply(first.config, {"batch.per_device": sequences, "model.depth": depth}),
        )
        for number, (sequences, depth, state) in enumerate(cases, 1)
    ]


OOM, FIT = TrialState.OUT_OF_MEMORY, TrialState.SCORED


def test_the_edge_holds_only_what_tells_something(make_night: Any) -> None:
    """Whoever failed with more of everything, or fit with less, is not shown."""
    found = frontier(
        trials(
            make_night(),
            *((32, 8, OOM), (16, 8, OOM), (32, 6, OOM), (32, 7, OOM)),
            *((4, 2, FIT), (16, 4, FIT), (8, 4, FIT), (8, 8, FIT)),
        ),
        vocabulary=1024,
    )
    assert [(load.trial.config.batch.per_device, load.trial.config.model.depth) for load in found.failed] == [
        *((16, 8), (32, 6)),
    ]
    assert [(load.trial.config.batch.per_device, load.trial.config.model.depth) for load in found.fit] == [
        *((16, 4), (8, 8)),
    ]
    assert found.failures == 4


def test_accumulation_is_no_load(make_night: Any) -> None:
    """What a pass holds fills the memory; how many passes make a step does not."""
    one, two = trials(make_night(), (8, 4, FIT), (8, 4, FIT))
    more = dataclasses.replace(two, config=apply(two.config, {"batch.accumulation": 4}))
    found = frontier([one, more], vocabulary=1024)
    assert [load.trial.id for load in found.fit] == [1]


def test_without_a_vocabulary_only_equal_models_are_compared(make_night: Any) -> None:
    """Before any trial has finished the size of a model is not known."""
    found = frontier(trials(make_night(), (32, 8, OOM), (16, 8, OOM), (16, 2, OOM)), vocabulary=None)
    assert [load.trial.id for load in found.failed] == [2, 3]


def test_other_failures_are_the_newest_first(make_night: Any) -> None:
    """Lost and interrupted trials say nothing about a config and are not among them."""
    some = trials(
        make_night(),
        *((8, 2, TrialState.CRASHED), (8, 2, TrialState.LOST), (8, 3, TrialState.CRASHED), (8, 2, TrialState.DIVERGED)),
    )
    found = other_failures([*some, *trials(make_night(), (8, 2, OOM))])
    assert {state: [trial.id for trial in failed] for state, failed in found.items()} == {
        TrialState.DIVERGED: [4],
        TrialState.CRASHED: [3, 1],
    }
