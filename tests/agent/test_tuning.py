"""Proposers on policies for base models: knobs under conditions, memory, and the rules of fine-tuning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import tuning
from agent.briefing import brief
from agent.curves import Signals
from agent.frontier import frontier
from agent.idea import Situation
from agent.mixed import MixedProposer
from agent.random import RandomProposer
from agent.reply import schema
from agent.rules import RulesProposer
from agent.sampler import SamplerProposer, choose, encode, request
from agent.sampler_worker import _draw, _project
from agent.space import Space, gauge_of, queued
from agent.view import View, meaningful
from frozen.timer import Budget
from harness.config import TrialConfig, Value, apply, flatten, idle
from harness.memory import NOTHING_LEARNED
from harness.policy import Policy, find_policy
from harness.records import Proposal, Role, Trial, TrialState
from harness.sizes import RowLengths, padding_share, usual_positions
from harness.terms import Proposer
from tests.agent.doubles import Drawn
from tests.samples import llama_facts

NAMES = ("lora", "qlora", "full", "continue", "dpo")
POLICIES = {name: Policy.load(find_policy(name), ["mine", "web"], ["web"]) for name in NAMES}
CONTINUE = POLICIES["continue"]
BASE = llama_facts(layers=4, hidden=256, intermediate=704, heads=4, vocabulary=1024, tied=True)
BIG = llama_facts(layers=32, hidden=4096, intermediate=11008, heads=32)
RATE = "optim.learning_rate"
MAKERS: dict[str, Callable[[], Proposer]] = {
    "random": RandomProposer,
    "rules": RulesProposer,
    "sampler": SamplerProposer,
    "mixed": lambda: MixedProposer(Drawn),
}
EVERY = [pytest.param(name, marks=[pytest.mark.process] * (name == "sampler")) for name in sorted(MAKERS)]


def valley(config: TrialConfig) -> float | TrialState:
    """Score of a config: lowest with an adapter of rank 32 at a rate of 3e-4, or with all weights at 3e-5."""
    if config.optim.learning_rate > 1e-3:
        return TrialState.DIVERGED
    if config.method == "lora" and config.adapter is not None:
        best, more = 3e-4, 0.01 * math.log2(config.adapter.rank / 32) ** 2
    else:
        best, more = 3e-5, 0.03
    return 1.0 + 0.01 * math.log(config.optim.learning_rate / best) ** 2 + more + 0.02 * config.optim.weight_decay


@pytest.fixture
def night(make_night: Any) -> Callable[..., Any]:
    def make(policy: str | Policy = "continue", score: Any = valley, **settings: Any) -> Any:
        chosen = POLICIES[policy] if isinstance(policy, str) else policy
        return make_night(score, policy=chosen, **{"base": BASE, "budget": Budget("flops", 1e18), **settings})

    return make


@pytest.fixture(scope="module", params=EVERY)
def proposer(request: pytest.FixtureRequest) -> Iterator[Proposer]:
    made = MAKERS[request.param]()
    yield made
    made.close()


# --- knobs under conditions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NAMES)
def test_no_proposal_of_a_night_turns_what_means_nothing(proposer: Proposer, night: Any, policy: str) -> None:
    """Nothing is refused, no config comes twice, and every turned knob has a meaning in the config that it makes."""
    one = night(policy)
    made = one.search(proposer, 12)
    assert len(made) == 12
    assert one.refused == []
    assert len({past.config.digest for past in one.past}) == 12
    for past in one.past:
        quiet = idle(flatten(past.config), one.policy.knobs)
        assert not quiet & set(past.proposal.diff)
        assert past.proposal.watch.strip()


def test_the_sampler_is_told_only_what_means_something(night: Any) -> None:
    """A config without an adapter has no rank; one with it has."""
    adapted = apply(CONTINUE.baseline({}), {"method": "lora", "adapter.rank": 64})
    assert "adapter.rank" not in encode(CONTINUE.knobs, CONTINUE.baseline({}))  # type: ignore[operator]
    assert encode(CONTINUE.knobs, adapted)["adapter.rank"] == CONTINUE.knobs["adapter.rank"].choices.index(64)  # type: ignore[index]
    one = night()
    one.run(Proposal(diff={"method": "lora", "adapter.rank": 64}, source="human", rationale="", watch=""))
    asked = request(Space.of(one.history()), "tpe")  # type: ignore[arg-type]
    assert sorted("adapter.rank" in item["values"] for item in asked["observed"]) == [False, True]
    described = {item["name"]: item for item in asked["knobs"]}
    assert described["adapter.rank"]["when"] == {"method": [1]}
    assert len(described["optim.beta1"]["when"]["optim.name"]) == 6


def test_a_gate_that_is_no_knob_is_what_it_is(night: Any) -> None:
    """A condition on something fixed makes a knob neither conditional nor, where it fails, a knob at all."""
    knobs = dict(POLICIES["lora"].knobs)
    knobs["adapter.rank"] = knobs["adapter.rank"].model_copy(update={"when": {"method": "lora"}})
    knobs["adapter.dropout"] = knobs["adapter.dropout"].model_copy(update={"when": {"method": "full"}})
    one = night(POLICIES["lora"].model_copy(update={"knobs": knobs}))
    asked = request(Space.of(one.history()), "gp")  # type: ignore[arg-type]
    described = {item["name"]: item for item in asked["knobs"]}
    assert described["adapter.rank"]["when"] == {}
    assert "adapter.dropout" not in described
    assert "adapter.dropout" not in asked["incumbent"]
    assert choose(one.history(), 10) == "gp"
    assert choose(night("continue").history(), 10) == "tpe"


class Drawer:
    """Stands for an Optuna study: draws uniformly, from hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def ask(self) -> Drawer:
        return self

    def suggest_float(self, name: str, low: float, high: float) -> float:
        return self.data.draw(st.floats(low, high), label=name)

    def suggest_int(self, name: str, low: int, high: int, log: bool = False) -> int:
        return self.data.draw(st.integers(low, high), label=name)

    def suggest_categorical(self, name: str, choices: Any) -> int:
        return int(self.data.draw(st.sampled_from(list(choices)), label=name))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(data=st.data())
def test_a_draw_has_only_knobs_with_a_meaning(night: Any, data: st.DataObject) -> None:
    """TPE draws gates first; what is cut down to few changes keeps each knob together with the gates it needs."""
    from agent.sampler import decode
    from agent.sampler_worker import _distribution

    one = night()
    space = Space.of(one.history())
    assert space is not None
    asked = request(space, "tpe")
    described = {item["name"]: item for item in asked["knobs"]}
    distributions = {name: _distribution(item) for name, item in described.items()}
    drawn = _draw(Drawer(data), described, distributions)  # type: ignore[arg-type]
    flat = flatten(space.base) | decode(space.knobs, drawn)
    assert set(drawn) == set(described) - idle(flat, space.knobs)
    weights = {name: data.draw(st.floats(0.01, 1), label=f"weight of {name}") for name in described}
    kept = _project(drawn, asked["incumbent"], described, weights, 4)
    assert len(kept) <= 4
    after = flatten(space.base) | decode(space.knobs, kept)
    assert not idle(after, space.knobs) & set(kept)


def test_a_briefing_shows_no_value_without_a_meaning(night: Any) -> None:
    """An idle knob is listed with its condition and no value; changes from and to it have no old value."""
    one = night()
    one.run(Proposal(diff={"method": "lora", RATE: 3e-4, "adapter.rank": 64}, source="human", rationale="", watch=""))
    assert one.incumbent.node == 1
    view = View.of(one.history())
    assert "adapter.rank" not in view.flats[0]
    assert view.flats[1]["adapter.rank"] == 64
    said = brief(one.history())
    assert "adapter.rank = 64" in said
    back = night()
    told = next(line for line in brief(back.history()).splitlines() if line.startswith("| adapter.rank"))
    assert told.startswith("| adapter.rank | – (no meaning now) | 32 by default |")
    assert "only with method = lora" in told
    assert set(meaningful(CONTINUE.baseline({}), back.history())) == set(flatten(CONTINUE.baseline({}))) - idle(
        flatten(CONTINUE.baseline({})), CONTINUE.knobs
    )


def test_a_language_model_may_name_every_knob(night: Any) -> None:
    """The schema names them all: a reply may open a gate and turn what lies behind it in one proposal."""
    names = schema(night().history().knobs, 4, 2)["properties"]["proposals"]["items"]["properties"]["changes"]["items"]
    assert set(names["properties"]["knob"]["enum"]) == set(CONTINUE.knobs)


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random", "rules", "mixed"])
def test_no_number_is_spent_on_what_cannot_fit(night: Any, name: str) -> None:
    """On a GPU that the baseline just fits, nothing far beyond it is proposed."""
    fresh = night("lora", base=BIG, device="NVIDIA H200")
    gauge = gauge_of(fresh.history())
    assert gauge is not None
    memory = round(1.4 * gauge.estimate(fresh.incumbent.config).total_bytes)
    one = night("lora", base=BIG, device="NVIDIA H200", memory_bytes=memory)
    space = Space.of(one.history())
    assert space is not None
    assert space.step({"batch.per_device": 16, "batch.sequence_length": 4096}) is None
    bound = dataclasses.replace(gauge, memory_bytes=memory, correction=NOTHING_LEARNED)
    made = one.search(MAKERS[name](), 15)
    assert len(made) == 15
    for proposal in made:
        config = one.past[[past.proposal for past in one.past].index(proposal)].config
        assert bound.misfit(config) is None


def test_the_edge_is_ordered_by_what_is_held(night: Any) -> None:
    """Checkpointing and 4 bits fit more; tokens and parameters would not tell."""
    first = night("continue", base=BIG).baseline_trials[0]

    def trial(number: int, state: TrialState, **changes: Value) -> Trial:
        turned = apply(first.config, {name.replace("__", "."): value for name, value in changes.items()})
        score = 1.0 if state is TrialState.SCORED else None
        return dataclasses.replace(first, id=number, state=state, score=score, config=turned, device="gpu")

    some = [
        trial(1, TrialState.OUT_OF_MEMORY, batch__per_device=1),
        trial(2, TrialState.OUT_OF_MEMORY, batch__per_device=16),
        trial(3, TrialState.SCORED, method="lora", gradient_checkpointing=True),
        trial(4, TrialState.SCORED, method="lora", quantization="nf4", gradient_checkpointing=True),
    ]
    gauge = gauge_of(night("continue", base=BIG, device="gpu").history())
    found = frontier(some, 32000, gauge)
    assert [load.trial.id for load in found.failed] == [1]
    assert [load.trial.id for load in found.fit] == [3]


# --- rules -------------------------------------------------------------------------------------------------------


def first_with(night: Any, name: str, most: int = 40) -> Proposal:
    """Return the first proposal of the rules that turns a knob."""
    for _ in range(most):
        proposal = RulesProposer().propose(night.history(), 1)[0]
        if name in proposal.diff:
            return proposal
        night.run(proposal)
    raise AssertionError(f"{name} was never turned")


@pytest.mark.parametrize(("policy", "rate"), [("lora", 1e-5), ("full", 5e-4), ("continue", 2e-6)])
def test_a_rate_of_another_method_is_brought_home(night: Any, policy: str, rate: float) -> None:
    """A baseline far outside the usual range of its method starts from the near end of that range."""
    chosen = POLICIES[policy]
    knobs = dict(chosen.knobs)
    knobs[RATE] = knobs[RATE].model_copy(update={"default": rate, "low": 1e-6, "high": 1e-2})
    proposal = RulesProposer().propose(night(chosen.model_copy(update={"knobs": knobs})).history(), 1)[0]
    assert proposal.diff == {RATE: {"lora": 1e-4, "full": 1e-4, "continue": 1e-5}[policy]}
    assert "usually" in proposal.rationale
    assert "loss" in proposal.watch or "curve" in proposal.watch


def test_no_rule_speaks_of_depth_or_width(night: Any) -> None:
    """A base model has the shape it has."""
    one = night("full")
    made = one.search(RulesProposer(), 40)
    assert not [name for proposal in made for name in proposal.diff if name.startswith("model.")]
    assert one.refused == []


def guarded(one: Any, reference: float, found: float) -> None:
    """Give the night a guard score of the untouched base, and of its baseline."""
    first = one.baseline_trials[0]
    one.reference = dataclasses.replace(first, id=99, role=Role.REFERENCE, score=1.5, guard_score=reference)
    one.baseline_trials = tuple(dataclasses.replace(trial, guard_score=found) for trial in one.baseline_trials)


def test_forgetting_is_answered_before_anything_else(night: Any) -> None:
    """A guard score that rose: half the rate, general text, and an adapter, each with the guard to watch."""
    one = night("continue", score=lambda config: 1.0)
    guarded(one, 1.0, 1.1)
    seen: list[Proposal] = []
    for _ in range(3):
        seen.append(RulesProposer().propose(one.history(), 1)[0])
        one.run(seen[-1])
    assert seen[0].diff == {RATE: pytest.approx(1.5e-5)}
    assert seen[1].diff == {"sampling.general_fraction": 0.1}
    assert seen[2].diff == {"method": "lora", RATE: pytest.approx(3e-4)}
    assert all("guard" in proposal.watch for proposal in seen)
    calm = night("continue", score=lambda config: 1.0)
    guarded(calm, 1.0, 1.001)
    assert "general knowledge" not in RulesProposer().propose(calm.history(), 1)[0].rationale


def test_out_of_memory_tries_the_cheapest_remedy_first(night: Any) -> None:
    """Half the rows at twice the accumulation, then activations computed again, then 8 bits, 4 bits, shorter rows."""

    def score(config: TrialConfig) -> float | TrialState:
        return TrialState.OUT_OF_MEMORY if config.method == "lora" else 1.0

    one = night("continue", score=score)
    one.run(Proposal(diff={"method": "lora"}, source="human", rationale="", watch=""))
    answers, history = [], one.history()
    for _ in range(6):
        offered = RulesProposer().propose(history, 1)[0]
        answers.append(set(offered.diff))
        history = queued(history, offered)
    batch = {"method", "batch.per_device", "batch.accumulation"}
    assert answers[:2] == [batch, batch]
    assert answers[2:] == [
        {"method", "gradient_checkpointing"},
        {"method", "optim.name"},
        {"method", "quantization"},
        {"method", "batch.sequence_length"},
    ]


def test_an_adapter_is_let_reach_further(night: Any) -> None:
    """After rate and batch come the targets, then the rank: with what to watch."""
    one = night("lora", score=lambda config: 1.0)
    targets = first_with(one, "adapter.targets")
    assert targets.diff["adapter.targets"] == "all_linear"
    rank = first_with(one, "adapter.rank")
    assert rank.diff == {"adapter.rank": 32}
    assert "gap" in rank.watch


def test_overfitting_wants_dropout_and_a_smaller_rank(night: Any) -> None:
    """Probe up while train goes down."""
    one = night("lora", score=lambda config: 1.0)
    rising = tuple(
        dataclasses.replace(
            trial,
            curve=tuple(
                point.model_copy(
                    update={"probe_score": 1.0 + abs(point.progress - 0.4), "train_loss": 2 - point.progress}
                )
                for point in trial.curve
            ),
        )
        for trial in one.baseline_trials
    )
    one.baseline_trials = rising
    assert first_with(one, "adapter.dropout").diff["adapter.dropout"] == 0.1
    assert first_with(one, "adapter.rank").diff == {"adapter.rank": 8}


def test_padding_is_packed(night: Any) -> None:
    """Rows of one short document each are mostly padding."""
    knobs = dict(POLICIES["lora"].knobs)
    knobs["batch.packing"] = knobs["batch.packing"].model_copy(update={"default": False})
    one = night(POLICIES["lora"].model_copy(update={"knobs": knobs}), score=lambda config: 1.0)
    packed = first_with(one, "batch.packing")
    assert packed.diff == {"batch.packing": True}
    assert "tokens per second" in packed.watch


def unpacked(name: str, **batch: Value) -> Policy:
    """Return a policy whose rows are padded by default."""
    policy = POLICIES[name]
    defaults = {f"batch.{key}": value for key, value in {"packing": False, **batch}.items()}
    knobs = {
        name: knob.model_copy(update={"default": defaults[name]}) if name in defaults else knob
        for name, knob in policy.knobs.items()
    }
    return policy.model_copy(update={"knobs": knobs})


LENGTHS = RowLengths(40, 200, (60, 80, 100, 150))


def test_little_padding_is_no_reason_to_pack(night: Any) -> None:
    """The lengths tell how much it is."""
    one = night(unpacked("lora"), score=lambda config: 1.0, lengths=LENGTHS)
    packed = first_with(one, "batch.packing")
    share = padding_share(one.incumbent.config, LENGTHS)
    assert f"{share:.0%} of the positions are padding" in packed.rationale
    equal = RowLengths(100, 104, (100, 104))
    full = night(unpacked("lora"), score=lambda config: 1.0, lengths=equal)
    situation = Situation(Space.of(full.history()), (), Signals(), frozenset())  # type: ignore[arg-type]
    assert not [idea for idea in tuning.reach(situation) if "batch.packing" in idea.values]


def test_steps_of_padded_rows_are_counted_by_their_lengths(night: Any) -> None:
    """Neither full rows nor the shortest: a proposal that usually gets too few steps is not made, nor refused."""
    one = night(unpacked("lora"), budget=Budget("tokens", 2e6), lengths=LENGTHS)
    space = Space.of(one.history())
    assert space is not None
    positions = usual_positions(space.base, LENGTHS)
    assert positions is not None
    assert space.steps(space.base) == 2e6 / positions
    full = space.base.batch.per_step * space.base.batch.sequence_length
    assert positions < full / 2
    assert Space.of(night(unpacked("lora"), budget=Budget("tokens", 2e6)).history()).steps(space.base) is None  # type: ignore[union-attr]
    tight = night(unpacked("lora"), budget=Budget("tokens", 45 * positions), lengths=LENGTHS)
    around = Space.of(tight.history())
    assert around is not None
    diff: dict[str, Value] = {RATE: 3e-4}
    assert around.step(diff) is None  # 45 of 50 steps, usually
    proposal = Proposal(diff=diff, source="human", rationale="", watch="")
    assert isinstance(tight.admit(proposal), TrialConfig)


def test_a_length_that_changes_nothing_is_no_proposal(night: Any) -> None:
    """Rows of at most 200 tokens are the same under every longer limit; packed ones are not."""
    diff: dict[str, Value] = {"batch.sequence_length": 2048}
    assert Space.of(night(unpacked("lora"), lengths=LENGTHS).history()).step(diff) is None  # type: ignore[union-attr]
    assert Space.of(night("lora", lengths=LENGTHS).history()).step(diff) is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["lora", "dpo"])
def test_a_briefing_says_what_rows_cost(night: Any, policy: str) -> None:
    """A model that sees no data learns how long its documents are, and what a step of the incumbent takes."""
    one = night(unpacked(policy) if policy == "lora" else policy, lengths=LENGTHS, budget=Budget("tokens", 1e8))
    history = one.history()
    if policy == "dpo":
        history = dataclasses.replace(history, metric="bits_per_pair")
    text = brief(history)
    what = "document" if policy == "lora" else "pair, by its longer answer,"
    assert f"A training {what} takes 40 to 200 tokens, 97.5 on average" in text
    assert "of them padding" in text
    assert "up to 200" in text  # the widest row of a pass, among the largest that fit
    assert "of them padding" not in brief(night("lora", lengths=LENGTHS).history())


def test_a_whole_night_of_rules_finds_the_adapter(night: Any) -> None:
    """From a full fine-tune whose adapter would be better, with rates that have to move together."""
    one = night("continue")
    guarded(one, 1.0, 1.2)
    made = one.search(RulesProposer(), 25)
    assert len(made) == 25
    assert one.refused == []
    assert one.incumbent.config.method == "lora"
