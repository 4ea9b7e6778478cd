from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sampler import (
    SamplerFailed,
    SamplerProposer,
    Worker,
    choose,
    decode,
    encode,
    request,
)
from agent.space import Space, from_unit, queued, to_unit
from harness.config import Knob, TrialConfig, apply
from harness.policy import Policy, find_policy
from harness.records import Proposal, TrialState

POLICY = Policy.load(find_policy("demo"), ["text", "code"])
BASE = POLICY.baseline({})
REQUEST = {
    "knobs": [{"name": name, "kind": "float", "when": {}, "default": 0.5} for name in ("x", "y")],
    "observed": [
        {"values": {"x": x / 4, "y": y / 2}, "score": (x / 4 - 0.7) ** 2 + (y / 2 - 0.5) ** 2}
        for x in range(5)
        for y in range(3)
    ],
    "pending": [],
    "incumbent": {"x": 0.25, "y": 0.5},
    "max_changes": 1,
    "seed": 1,
    "method": "gp",
}


@given(name=st.sampled_from(sorted(POLICY.knobs)), position=st.floats(0, 1))
def test_values_round_trip(name: str, position: float) -> None:
    """A value that the search proposed is read back as the same position, and within the knob's bounds."""
    knob = POLICY.knobs[name]
    value = from_unit(knob, position)
    assert knob.check(value) == value
    numbers = encode(POLICY.knobs, apply(BASE, {name: value}))
    assert numbers is not None
    again = decode(POLICY.knobs, numbers)[name]
    assert again == value or again == pytest.approx(value, rel=1e-2)
    assert to_unit(knob, value) == pytest.approx(to_unit(knob, again), abs=0.01)


def test_order_is_kept_where_there_is_one() -> None:
    """Numeric choices are told as ordered, names as unordered."""
    choices = POLICY.knobs["batch.per_device"].choices
    assert encode(POLICY.knobs, BASE)["batch.per_device"] == choices.index(BASE.batch.per_device)  # type: ignore[index]
    described = {item["name"]: item["kind"] for item in request_of(BASE)["knobs"]}
    assert described["batch.per_device"] == "int"
    assert described["schedule.shape"] == "choice"
    assert described["optim.learning_rate"] == "float"


def request_of(config: TrialConfig) -> dict[str, Any]:
    """Return the request of a history in which only the baseline has a score."""
    from harness.records import History, Standing

    standing = Standing(node=0, parent=None, diff={}, config=config, scores={0: 2.0}, trial=1)
    history = History(
        study="s",
        task="pretrain",
        metric="bits_per_byte",
        budget="300s",
        seed=0,
        next_number=1,
        knobs=POLICY.knobs,
        max_changes=4,
        minimum_steps=20,
        baseline=standing,
        incumbent=standing,
        lineage=(standing,),
        noise=None,
        past=(),
    )
    space = Space.of(history)
    assert space is not None
    return request(space, "gp")


def test_failures_are_told_as_the_worst_score_seen(make_night: Any) -> None:
    """A failed config is neither dropped nor given a flat penalty."""
    night = make_night()
    for rate in (9e-4, 2e-2, 2e-4):
        night.run(Proposal(diff={"optim.learning_rate": rate}, source="human", rationale="", watch=""))
    assert night.past[1].trials[0].state is TrialState.DIVERGED
    told = request(Space.of(night.history()), "gp")["observed"]
    assert len(told) == 4
    scores = sorted(item["score"] for item in told)
    assert scores[-1] == scores[-2] == max(past.trials[0].score or 0 for past in night.past)


def edge(rate: float, model: str | None) -> Proposal:
    return Proposal(diff={"optim.learning_rate": rate}, source="anthropic", model=model, rationale="", watch="")


def test_a_language_model_does_not_stretch_the_scale(make_night: Any) -> None:
    """A wild score of its making is told as the worst of the others', and so are failures, whoever made them."""

    def score(config: TrialConfig) -> float | TrialState:
        rate = config.optim.learning_rate
        return TrialState.DIVERGED if rate > 1e-2 else 9.0 if rate > 7e-3 else 2.0 + rate

    told = {}
    for model in ("wise-1", None):
        night = make_night(score=score)
        night.run(Proposal(diff={"optim.learning_rate": 6e-3}, source="rules", rationale="", watch=""))
        night.run(edge(8e-3, model))
        night.run(edge(2e-2, model))
        night.run(edge(2e-3, model))
        found = request(Space.of(night.history()), "gp")["observed"]
        told[model] = sorted(item["score"] for item in found)
    baseline = BASE.optim.learning_rate
    assert told["wise-1"] == sorted([2.0 + baseline, 2.002, 2.006, 2.006, 2.006])
    assert told[None] == sorted([2.0 + baseline, 2.002, 2.006, 9.0, 9.0])


def test_a_run_that_its_own_condition_stopped_says_nothing(make_night: Any) -> None:
    """It has no score, and its limit was a guess: it is neither observed nor pending, and not proposed again."""
    night = make_night(score=lambda config: TrialState.STOPPED if config.optim.beta2 == 0.97 else 2.0)
    night.run(Proposal(diff={"optim.beta2": 0.97}, source="anthropic", model="wise-1", rationale="", watch=""))
    space = Space.of(night.history())
    assert space is not None
    asked = request(space, "gp")
    assert len(asked["observed"]) == 1
    assert asked["pending"] == []
    assert space.step({"optim.beta2": 0.97}) is None


def test_what_is_queued_is_told_as_running(make_night: Any) -> None:
    """A proposal that waits is known to the sampler, so that it is not made again."""
    night = make_night()
    waiting = Proposal(diff={"optim.learning_rate": 1e-3}, source="human", rationale="", watch="")
    asked = request(Space.of(queued(night.history(), waiting)), "gp")
    assert len(asked["pending"]) == 1
    assert asked["pending"][0] != asked["incumbent"]


def test_replicates_count_once_as_their_mean(make_night: Any) -> None:
    """Three seeds of the baseline are one observation."""
    night = make_night()
    told = request(Space.of(night.history()), "gp")["observed"]
    assert len(told) == 1
    assert told[0]["score"] == pytest.approx(night.lineage[0].score)


def test_a_repaired_config_outside_the_choices_is_no_obstacle(make_night: Any) -> None:
    """An incumbent whose per-device batch was halved below the policy's choices can still be improved upon."""
    night = make_night()
    odd = apply(night.lineage[0].config, {"batch.per_device": 1})
    night.lineage[0] = dataclasses.replace(night.lineage[0], config=odd)
    asked = request(Space.of(night.history()), "gp")
    assert asked["incumbent"]["batch.per_device"] == 0


def test_dependent_knobs_and_long_nights_are_asked_of_tpe(make_night: Any, policy: Policy) -> None:
    """A Gaussian process early; TPE for many configs and for knobs that depend on each other."""
    night = make_night()
    assert choose(night.history(), 10) == "gp"
    assert choose(night.history(), 60) == "tpe"
    knob: Knob = policy.knobs["optim.beta2"]
    knobs = dict(policy.knobs) | {"optim.beta2": knob.model_copy(update={"when": {"schedule.shape": "linear"}})}
    assert choose(dataclasses.replace(night.history(), knobs=knobs), 10) == "tpe"


@pytest.mark.process
def test_the_worker_looks_where_the_bowl_is_low() -> None:
    """The Gaussian process proposes near the bottom of a bowl, turning one knob as it was told; again, the same."""
    worker = Worker()
    try:
        best = worker.ask(REQUEST)[0]
        assert worker.ask(REQUEST)[0] == best
    finally:
        worker.close()
    assert best["y"] == 0.5
    assert 0.6 < best["x"] < 0.85


@pytest.mark.process
def test_a_killed_worker_is_replaced() -> None:
    """Death between two requests costs nothing but the start of another process."""
    worker = Worker()
    try:
        first = worker.ask(REQUEST)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.ask(REQUEST) == first
    finally:
        worker.close()


@pytest.mark.process
def test_a_worker_that_cannot_start_says_why() -> None:
    """After two attempts the failure carries the process's last words."""
    worker = Worker([sys.executable, "-c", "import sys; sys.exit('no sampler here')"])
    with pytest.raises(SamplerFailed, match="no sampler here"):
        worker.ask(REQUEST)
    worker.close()


@pytest.mark.process
def test_the_worker_dies_with_its_parent() -> None:
    """When the driver is killed the worker's input ends, and so does the worker, whatever it does."""
    script = (
        "from agent.sampler import Worker; import os, time\n"
        "w = Worker(); w._start(); print(w.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(600):
        try:
            with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    break
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the worker outlived its parent")


def test_closing_twice_and_before_use_is_harmless() -> None:
    """Nothing was started, nothing is left."""
    proposer = SamplerProposer()
    for _ in range(2):
        proposer.close()
        assert proposer._worker.pid is None
