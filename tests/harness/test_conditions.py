"""Knobs that mean something only under conditions: what a policy may say, and what becomes of a config."""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozen.timer import Budget
from harness.config import TrialConfig, Value, active_difference, difference, flatten, idle, settled, turned, unflatten
from harness.errors import BadInput, BadValue
from harness.policy import Policy, Refusal, find_policy
from harness.records import Proposal

BUDGET = Budget("seconds", 300)
NAMES = ("lora", "qlora", "full", "continue", "dpo")
POLICIES = {name: Policy.load(find_policy(name), ["mine", "web"], ["web"]) for name in NAMES}
CONTINUE = POLICIES["continue"]


@pytest.fixture
def table() -> dict[str, Any]:
    return tomllib.loads(find_policy("continue").read_text())


def admit(policy: Policy, parent: TrialConfig, diff: dict[str, Value]) -> TrialConfig | Refusal:
    made = Proposal(diff=diff, source="human", rationale="", watch="")
    return policy.admit(made, parent, budget=BUDGET, vocabulary=2048, base=None)


def values(policy: Policy, name: str) -> st.SearchStrategy[Value]:
    """Return what a knob may be turned to."""
    knob = policy.knobs[name]
    if knob.type == "choice":
        return st.sampled_from(knob.choices)
    assert knob.low is not None
    assert knob.high is not None
    return st.floats(knob.low, knob.high) if knob.type == "float" else st.integers(int(knob.low), int(knob.high))


@st.composite
def diffs(draw: st.DrawFn, policy: Policy) -> dict[str, Value]:
    names = draw(st.lists(st.sampled_from(sorted(policy.knobs)), min_size=1, max_size=6, unique=True))
    return {name: draw(values(policy, name)) for name in names}


# --- packaged policies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_packaged_policies_say_what_to_watch(name: str) -> None:
    """Each makes a baseline, sets every hyperparameter that has no default, and every knob says what to look at."""
    policy = POLICIES[name]
    assert all(len(knob.watch) > 20 for knob in policy.knobs.values())
    assert policy.baseline({}).batch.per_device * policy.baseline({}).batch.accumulation >= 32
    assert policy.fixed["precision"] == "bf16"


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("lora", 1e-4, 3e-4), ("qlora", 1e-4, 3e-4), ("full", 5e-5, 1e-4), ("continue", 1e-5, 5e-5)],
)
def test_ranges_hold_what_engineers_begin_with(name: str, low: float, high: float) -> None:
    """The default lies in the usual range, and the search may look further on both sides."""
    knob = POLICIES[name].knobs["optim.learning_rate"]
    assert knob.low is not None
    assert knob.high is not None
    assert knob.low < low <= float(knob.default) <= high < knob.high


def test_knobs_that_turn_nothing_on_these_sources_are_left_out() -> None:
    """No temperature for one source, no share of general text without any."""
    alone = Policy.load(find_policy("lora"), ["mine"]).knobs
    assert not {"sampling.temperature", "sampling.general_fraction"} & set(alone)
    assert "sampling.temperature" in Policy.load(find_policy("lora"), ["mine", "other"]).knobs
    assert "sampling.general_fraction" in POLICIES["lora"].knobs


@pytest.mark.parametrize("name", [*NAMES, "pretrain"])
def test_a_cpu_is_not_let_crawl(name: str) -> None:
    """bf16 on a CPU has to be the owner's own word; on a GPU, and in fp32, nobody asks."""
    policy = Policy.load(find_policy(name), ["mine"])
    said = policy.slow_precision(policy.baseline({}), {}, "cpu")
    assert said is not None
    assert "--set precision=fp32" in said
    for chosen in ("fp32", "bf16"):
        assert policy.slow_precision(policy.baseline({"precision": chosen}), {"precision": chosen}, "cpu") is None
    assert policy.slow_precision(policy.baseline({}), {}, "cuda:0") is None


def test_a_search_on_a_cpu_cannot_wander_into_bf16(table: dict[str, Any]) -> None:
    """Where precision is a knob, no value of the baseline's would keep the search from it."""
    del table["fixed"]["precision"]
    watch = "tokens per second, and whether the loss is as low"
    table["knobs"]["precision"] = {"type": "choice", "choices": ["fp32", "bf16"], "default": "fp32", "watch": watch}
    policy = Policy.parse(table, ["mine"])
    said = policy.slow_precision(policy.baseline({}), {"precision": "fp32"}, "cpu")
    assert said is not None
    assert "under [fixed]" in said


# --- what a policy may say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t["knobs"]["quantization"].update(when={"methd": "lora"}), "did you mean 'method'"),
        (lambda t: t["knobs"]["quantization"].update(when={"method": "qlora"}), "'qlora' is not one of 'full', 'lora'"),
        (lambda t: t["knobs"]["quantization"].update(when={"method": ["lora", 3]}), "3 is not one of"),
        (lambda t: t["knobs"]["quantization"].update(when={"method": []}), "gives no value for method"),
        (lambda t: t["knobs"]["quantization"].update(when={"quantization": "nf4"}), "no other knob"),
        (lambda t: t["knobs"]["quantization"].pop("when"), 'give it when = { "method" = "lora" }'),
        (lambda t: t["knobs"]["adapter.rank"].pop("when"), "adapter.rank means nothing with method = 'full'"),
        (lambda t: t["knobs"]["optim.beta2"].pop("when"), "optim.beta2 means nothing with optim.name = 'adafactor'"),
        (
            lambda t: t["knobs"]["method"].update(when={"quantization": "nf4"}),
            "circle, method → quantization → method",
        ),
        (
            lambda t: t["knobs"]["sampling.order"].update(when={"precision": "fp32"}),
            "precision = 'fp32', but it is fixed at 'bf16'",
        ),
        (lambda t: t["knobs"]["sampling.order"].update(when={"precision": "fp8"}), "what precision cannot be"),
        (
            lambda t: (t["knobs"].pop("method"), t["fixed"].update(method="full")),
            "it is fixed at 'full': the knob could never be turned",
        ),
        (
            lambda t: (t["knobs"].pop("method"), t["knobs"]["quantization"].pop("when")),
            "`when` names 'method'",
        ),
        (
            lambda t: [t["knobs"].pop(name) for name in [*t["knobs"]] if name.startswith("adapter.")],
            "method = 'lora' makes no config with the other defaults: method 'lora' needs an adapter",
        ),
        (lambda t: t["knobs"].pop("adapter.targets"), "adapter.targets: give a value"),
        (lambda t: t["knobs"].pop("adapter.alpha_ratio"), "two spellings of one thing"),
        (lambda t: t["fixed"].update({"adapter.alpha": 32.0}), "two spellings of one thing"),
        (lambda t: t["knobs"].update(seed=t["knobs"]["sampling.order"]), "'seed' is no hyperparameter"),
        (lambda t: t["fixed"].update({"eval.context": 128}), "'eval.context' is no hyperparameter"),
        (lambda t: t["fixed"].update(budget="300s"), "'budget' is no hyperparameter"),
        (lambda t: t["fixed"].update({"preference.beta": 0.1}), "preference.beta means nothing for the task continue"),
        (lambda t: t["fixed"].update({"model.depth": 2}), "model.depth means nothing for the task continue"),
        (lambda t: t.update(tasks=["pretrain"]), "means nothing for the task pretrain"),
        (lambda t: t.update(tasks=["dpo", "continue"]), "need different policies"),
    ],
)
def test_faults_are_told_with_names(table: dict[str, Any], change: Any, said: str) -> None:
    """Each mistake is one sentence that names the knob, the gate and the value."""
    change(table)
    with pytest.raises(BadInput) as error:
        Policy.parse(table, ["mine"])
    assert said in str(error.value)


def test_a_condition_of_a_gate_counts_for_its_knobs(table: dict[str, Any]) -> None:
    """What hangs on 4-bit weights hangs on the adapter too, and need not say so twice."""
    table["knobs"]["adapter.dropout"]["when"] = {"quantization": ["nf4", "nf4_double"]}
    policy = Policy.parse(table, ["mine"])
    flat = flatten(policy.baseline({}))
    assert "adapter.dropout" in idle(flat | {"quantization": "nf4"}, policy.knobs)
    assert "adapter.dropout" not in idle(flat | {"quantization": "nf4", "method": "lora"}, policy.knobs)
    refused = admit(policy, policy.baseline({}), {"adapter.dropout": 0.1})
    assert isinstance(refused, Refusal)
    assert "quantization = 'nf4' or 'nf4_double' and method = 'lora'" in refused.reason


def test_a_loss_that_no_smoothing_fits_is_refused_whole() -> None:
    """EXO takes the logarithm of the smoothing."""
    flat = flatten(POLICIES["dpo"].baseline({}))
    with pytest.raises(BadValue, match="above 0"):
        unflatten(flat | {"preference.loss": "exo_pair", "regularization.label_smoothing": 0.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"quantization": "nf4"}, "4-bit"), ({"preference.beta": 0.1, "preference.loss": "sigmoid"}, "reference")],
)
def test_starts_that_move_the_base_are_refused_where_it_must_stay(changes: dict[str, Value], said: str) -> None:
    """PiSSA takes the largest directions out of the weights."""
    flat = flatten(POLICIES["lora"].baseline({"adapter.initialisation": "pissa"}))
    with pytest.raises(BadValue, match=said):
        unflatten(flat | changes)


# --- configs -------------------------------------------------------------------------------------------------------


def test_the_way_back_and_forth_is_one_config() -> None:
    """Quantized, adapted and back to all weights is the baseline again, whatever the adapter was."""
    baseline = CONTINUE.baseline({})
    adapted = admit(CONTINUE, baseline, {"method": "lora", "quantization": "nf4", "adapter.rank": 64})
    assert isinstance(adapted, TrialConfig)
    back = admit(CONTINUE, adapted, {"method": "full"})
    assert back == baseline
    assert active_difference(baseline, adapted, CONTINUE.knobs) == {
        "method": "lora",
        "quantization": "nf4",
        "adapter.rank": 64,
    }
    assert active_difference(adapted, baseline, CONTINUE.knobs) == {"method": "full"}


def test_an_owners_value_without_a_meaning_is_told() -> None:
    """A baseline with a rank but without an adapter is a mistake of somebody's."""
    with pytest.raises(BadValue, match=r"adapter\.rank means nothing here: it needs method = 'lora'"):
        CONTINUE.baseline({"adapter.rank": 8})
    assert CONTINUE.baseline({"adapter.rank": 8, "method": "lora"}).adapter.rank == 8  # type: ignore[union-attr]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_admitted_is_settled(name: str) -> None:
    """Whatever is turned, what means nothing is at its default, is no part of the diff, and counts for nothing."""
    policy = POLICIES[name]

    @given(first=diffs(policy), then=diffs(policy))
    def holds(first: dict[str, Value], then: dict[str, Value]) -> None:
        parent = admit(policy, policy.baseline({}), first)
        if isinstance(parent, Refusal):
            parent = policy.baseline({})
        child = admit(policy, parent, then)
        if isinstance(child, Refusal):
            return
        flat = flatten(child)
        quiet = idle(flat, policy.knobs)
        assert all(flat[knob] == policy.knobs[knob].default for knob in quiet if knob in flat)
        changed = active_difference(parent, child, policy.knobs)
        assert not quiet & set(changed)
        assert set(changed) <= set(then)
        assert 1 <= len(changed) <= policy.proposals.max_changes
        assert turned(parent, changed, policy.knobs) == child

    holds()


@given(choice=st.data())
def test_equal_trainings_have_equal_digests(choice: st.DataObject) -> None:
    """Configs that differ only in what means nothing become one."""
    flat = flatten(CONTINUE.baseline({}))
    gates = {
        "method": choice.draw(values(CONTINUE, "method")),
        "optim.name": choice.draw(values(CONTINUE, "optim.name")),
    }
    quiet = sorted(idle(flat | gates, CONTINUE.knobs))
    noise = {name: choice.draw(values(CONTINUE, name)) for name in quiet}
    one, other = (unflatten(settled(flat | gates | more, CONTINUE.knobs)) for more in ({}, noise))
    assert one.digest == other.digest
    assert difference(one, other) == {}


@given(diff=diffs(CONTINUE))
def test_a_knob_without_a_meaning_is_refused_with_its_condition(diff: dict[str, Value]) -> None:
    """A person who turns it is told which value of which other knob it waits for."""
    baseline = CONTINUE.baseline({})
    before = flatten(baseline)
    quiet = [name for name in diff if name in idle(before | diff, CONTINUE.knobs) and before[name] != diff[name]]
    answer = admit(CONTINUE, baseline, diff)
    if quiet:
        assert isinstance(answer, Refusal)
        assert answer.reason.startswith(f"{quiet[0]} means nothing here: it needs ")
        assert any(gate in answer.reason for gate in CONTINUE.knobs[quiet[0]].when)
    elif isinstance(answer, Refusal):
        assert "means nothing" not in answer.reason


def test_a_table_survives_its_checks(table: dict[str, Any]) -> None:
    """Checking a policy changes nothing of what was read."""
    before = copy.deepcopy(table)
    Policy.parse(table, ["mine"])
    assert table == before
