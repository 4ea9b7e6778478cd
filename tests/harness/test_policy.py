from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozen.timer import Budget
from harness.config import TrialConfig, flatten, told
from harness.errors import BadInput, BadValue, UnknownKnob
from harness.policy import Policy, Refusal, find_policy, find_program
from harness.records import Proposal

BUDGET = Budget("seconds", 300)
VOCABULARY = 2048


@pytest.fixture
def table() -> dict[str, Any]:
    return tomllib.loads(find_policy("demo").read_text())


def proposal(**diff: Any) -> Proposal:
    return Proposal(diff={k.replace("__", "."): v for k, v in diff.items()}, source="human", rationale="", watch="")


def admit(policy: Policy, made: Proposal, budget: Budget = BUDGET) -> TrialConfig | Refusal:
    return policy.admit(made, policy.baseline({}), budget=budget, vocabulary=VOCABULARY, base=None)


@pytest.mark.parametrize("name", ["demo", "pretrain"])
def test_packaged_policies_are_complete(name: str) -> None:
    """Each names every hyperparameter once, and each knob says range, scale, default and what to watch."""
    policy = Policy.load(find_policy(name), ["one", "two"])
    assert set(told(policy.baseline({}))) == set(policy.knobs) | set(policy.fixed)
    for knob in policy.knobs.values():
        assert len(knob.watch) > 20
    turned = {"optim.learning_rate", "optim.weight_decay", "optim.beta1", "optim.beta2", "optim.max_grad_norm"}
    turned |= {f"schedule.{n}" for n in ("shape", "warmup_fraction", "decay_fraction", "final_rate_fraction")}
    turned |= {f"batch.{n}" for n in ("per_device", "accumulation", "sequence_length")}
    turned |= {f"model.{n}" for n in ("depth", "width", "heads", "attention_dropout")}
    turned |= {"sampling.fraction", "sampling.order", "sampling.weights.one", "sampling.weights.two"}
    assert set(policy.knobs) == turned


@pytest.mark.parametrize("name", ["demo", "pretrain"])
def test_every_width_fits_every_number_of_heads(name: str) -> None:
    """No pair of choices in a packaged policy is a config that cannot exist."""
    policy = Policy.load(find_policy(name), ["one"])
    for width in policy.knobs["model.width"].choices:
        for heads in policy.knobs["model.heads"].choices:
            assert policy.baseline({"model.width": width, "model.heads": heads}).model.width == width


def test_weights_are_knobs_only_with_several_sources() -> None:
    """With one source there is nothing to weigh."""
    assert not [k for k in Policy.load(find_policy("demo"), ["one"]).knobs if "weights" in k]
    assert len([k for k in Policy.load(find_policy("demo"), ["b", "a", "c"]).knobs if "weights" in k]) == 3


def test_a_policy_round_trips_through_a_copy(tmp_path: Path) -> None:
    """The copy in a study folder is the same policy."""
    copied = tmp_path / "policy.toml"
    copied.write_bytes(find_policy("demo").read_bytes())
    assert Policy.load(copied, ["x", "y"]) == Policy.load(find_policy("demo"), ["x", "y"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(proposal={}), "did you mean 'proposals'"),
        (lambda t: t["proposals"].update(max_change=3), "did you mean 'max_changes'"),
        (lambda t: t["judge"].update(confidense=0.9), "did you mean 'confidence'"),
        (lambda t: t["stopping"].update(patience=3), "stopping.patience"),
        (lambda t: t["knobs"]["optim.beta1"].update(hihg=1), "did you mean 'high'"),
        (
            lambda t: t["knobs"].update({"optim.lerning_rate": t["knobs"].pop("optim.learning_rate")}),
            "optim.learning_rate",
        ),
        (lambda t: t["knobs"]["optim.beta1"].update(default=2), "outside"),
        (lambda t: t["knobs"]["optim.beta1"].update(high=1.5), "optim.beta1: no config can hold 1.5"),
        (lambda t: t["knobs"]["model.depth"].update(type="float"), "whole number"),
        (lambda t: t["knobs"]["model.width"].update(choices=[64, 4]), "model.width"),
        (lambda t: t["knobs"]["model.width"].update(default=100), "not one of"),
        (lambda t: t["knobs"]["optim.beta1"].update(when={"shape": 1}), "when"),
        (lambda t: t["knobs"]["optim.beta1"].update(when={"schedule.shape": "round"}), "not one of"),
        (lambda t: t["knobs"].pop("optim.beta1"), "optim.beta1: give a value under"),
        (lambda t: t["fixed"].update({"optim.beta1": 0.9}), "both a knob and fixed"),
        (lambda t: t["fixed"].update({"precision": "fp16"}), "precision"),
        (lambda t: t.update(knobs={}), "no knobs"),
        (
            lambda t: t["knobs"].update({"sampling.weights.elsewhere": dict(t["knobs"]["optim.beta1"])}),
            "no source of that name",
        ),
        (lambda t: t["knobs"].update({"sampling.weights.one": t["knobs"].pop("sampling.weights.*")}), "weights.two"),
        (lambda t: t["knobs"].update(optim={"beta1": {}}), "unknown key"),
    ],
)
def test_what_does_not_fit_is_named(table: dict[str, Any], change: Any, said: str) -> None:
    """Each mistake in a policy file is one sentence with the key and, where there is one, the nearest name."""
    change(table)
    with pytest.raises(BadInput, match=r"(?s).*") as error:
        Policy.parse(table, ["one", "two"])
    assert said in str(error.value)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    """Not TOML, not text, not there: the path is in the sentence."""
    path = tmp_path / "p.toml"
    for content in (b"[knobs", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(BadInput, match=r"p\.toml"):
            Policy.load(path, ["one"])
    with pytest.raises(BadInput, match=r"q\.toml"):
        Policy.load(tmp_path / "q.toml", ["one"])


def test_policies_are_found_by_name_and_path(tmp_path: Path) -> None:
    """A wrong name lists the right ones."""
    assert find_policy(str(find_policy("demo"))) == find_policy("demo")
    with pytest.raises(BadInput, match="did you mean 'demo'"):
        find_policy("deno")
    with pytest.raises(BadInput, match="no policy file"):
        find_policy(str(tmp_path / "mine.toml"))


def test_the_program_lies_beside_the_policy(tmp_path: Path) -> None:
    """An own program beside an own policy wins over the packaged one."""
    assert find_program(tmp_path / "mine.toml").read_text().startswith("# What the owner")
    (tmp_path / "program.md").write_text("mine")
    assert find_program(tmp_path / "mine.toml").read_text() == "mine"


def test_the_owners_values_are_the_baseline() -> None:
    """Overrides take the place of defaults, are checked, and may set what is fixed."""
    policy = Policy.load(find_policy("demo"), ["one"])
    config = policy.baseline({"optim.learning_rate": 1e-3, "optim.epsilon": 1e-7})
    assert config.optim.learning_rate == 1e-3
    assert config.optim.epsilon == 1e-7
    with pytest.raises(UnknownKnob, match=r"optim\.learning_rate"):
        policy.baseline({"optim.learnin_rate": 1e-3})
    with pytest.raises(BadValue, match="outside"):
        policy.baseline({"optim.learning_rate": 0.5})


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        ({"optim.learning_rte": 1e-3}, "did you mean 'optim.learning_rate'"),
        ({"seed": 3}, "unknown knob 'seed'"),
        ({"precision": "bf16"}, "fixed"),
        ({"optim.learning_rate": 1.0}, "outside 0.0001 to 0.02"),
        ({"optim.learning_rate": "fast"}, "not a finite number"),
        ({"optim.learning_rate": 3e-4}, "changes nothing"),
        ({}, "changes nothing"),
        ({"model.depth": 2.5}, "whole number"),
        ({"model.width": 100}, "not one of"),
        ({"optim.beta1": 0.85, "optim.beta2": 0.95, "model.depth": 4, "model.width": 96, "model.heads": 4}, "allows 4"),
    ],
)
def test_a_refusal_says_why(diff: dict[str, Any], said: str) -> None:
    """Each refusal names the knob and the number that it breaks."""
    verdict = admit(Policy.load(find_policy("demo"), ["one"]), Proposal(diff=diff, source="", rationale="", watch=""))
    assert isinstance(verdict, Refusal)
    assert said in verdict.reason


def test_unchanged_knobs_do_not_count_as_changes() -> None:
    """A diff that repeats the parent's values is as small as what it changes."""
    policy = Policy.load(find_policy("demo"), ["one"])
    flat = {name: value for name, value in flatten(policy.baseline({})).items() if name in policy.knobs}
    config = admit(policy, Proposal(diff=flat | {"model.depth": 3}, source="", rationale="", watch=""))
    assert isinstance(config, TrialConfig)
    assert config.model.depth == 3


def test_inactive_knobs_are_refused(table: dict[str, Any]) -> None:
    """A knob whose condition does not hold in the result cannot be turned; together with its gate it can."""
    table["knobs"]["schedule.decay_fraction"]["when"] = {"schedule.shape": "linear"}
    policy = Policy.parse(table, ["one"])
    refused = admit(policy, proposal(schedule__decay_fraction=0.5))
    assert isinstance(refused, Refusal)
    assert "needs schedule.shape = 'linear'" in refused.reason
    assert isinstance(admit(policy, proposal(schedule__decay_fraction=0.5, schedule__shape="linear")), TrialConfig)


def test_knobs_that_do_not_go_together_are_refused(table: dict[str, Any]) -> None:
    """A pair of values that no model can have is a refusal with the reason, not an exception."""
    table["knobs"]["model.heads"]["choices"] = [2, 3]
    refused = admit(Policy.parse(table, ["one"]), proposal(model__heads=3))
    assert isinstance(refused, Refusal)
    assert "multiple of 2" in refused.reason


def test_too_few_steps_come_with_the_arithmetic() -> None:
    """Tokens and flops tell how many steps fit; seconds do not."""
    policy = Policy.load(find_policy("demo"), ["one"])
    big = proposal(batch__per_device=32, batch__accumulation=4)
    refused = admit(policy, big, Budget("tokens", 200_000))
    assert isinstance(refused, Refusal)
    assert "32 sequences × 4 passes × 128 tokens = 16384 tokens" in refused.reason
    assert "12.2 steps" in refused.reason
    refused = admit(policy, big, Budget("flops", 2e11))
    assert isinstance(refused, Refusal)
    assert "flops" in refused.reason
    assert isinstance(admit(policy, big), TrialConfig)
    assert isinstance(admit(policy, proposal(batch__per_device=8), Budget("tokens", 200_000)), TrialConfig)


POLICY = Policy.load(find_policy("demo"), ["one", "two"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sampling.temperature", "it says how several sources are mixed, and the study has one"),
        ("sampling.weights.web", "it says how several sources are mixed, and the study has one"),
        ("sampling.general_fraction", "it is the share of general text, and the study has none (`overnight init --ge"),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "continue"])
def test_a_knob_that_means_nothing_on_these_sources_is_told_why(name: str, why: str, kind: str) -> None:
    """It is no mistyped name, and no other one is meant."""
    policy = Policy.load(find_policy(kind), ["one"])
    said = f"{name} means nothing here: {why}"
    with pytest.raises(UnknownKnob) as caught:
        policy.baseline({name: 0.5})
    assert str(caught.value).startswith(said)
    refused = admit(policy, Proposal(diff={name: 0.5}, source="human", rationale="", watch=""))
    assert isinstance(refused, Refusal)
    assert refused.reason.startswith(said)
    mixed = Policy.load(find_policy(kind), ["one", "web"], ["web"])
    for other in ("sampling.temperatur", "sampling.general_fractio", "sampling.weight.web"):
        with pytest.raises(UnknownKnob, match="unknown knob"):
            mixed.baseline({other: 0.5})


VALUES = st.one_of(
    st.booleans(), st.integers(-3, 300), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)
)


@given(diff=st.dictionaries(st.sampled_from([*POLICY.knobs, "seed", "precision"]), VALUES, max_size=6))
def test_admitted_configs_are_within_the_policy(diff: dict[str, Any]) -> None:
    """Whatever is proposed, what gets through differs in allowed knobs only, within bounds, and in few of them."""
    config = admit(POLICY, Proposal(diff=diff, source="", rationale="", watch=""))
    if isinstance(config, Refusal):
        assert config.reason
        return
    before, after = flatten(POLICY.baseline({})), flatten(config)
    changed = {name for name in after if after[name] != before[name]}
    assert 1 <= len(changed) <= POLICY.proposals.max_changes
    assert changed <= set(diff) & set(POLICY.knobs)
    for name in changed:
        assert POLICY.knobs[name].check(after[name]) == after[name]


@given(
    table=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["knobs", "fixed", "judge", "name", "low"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_any_table_is_a_policy_or_bad_input(table: Any) -> None:
    """No shape of TOML gets past as another kind of error."""
    with pytest.raises(BadInput):
        Policy.parse(copy.deepcopy(table) if isinstance(table, dict) else {"knobs": table}, ["one"])


def test_what_the_weights_are_cannot_be_turned_where_trials_go_on_from_them(table: dict[str, Any]) -> None:
    """The knobs are named, and how to keep the key; as fixed values they are fine."""
    assert not Policy.parse(table, ["text"]).continues
    table["start_from"] = "parent"
    with pytest.raises(BadInput, match=r"model\.depth, model\.width, model\.heads cannot be turned.*\[fixed\]"):
        Policy.parse(table, ["text"])
    for name in ("model.depth", "model.width", "model.heads"):
        table["fixed"][name] = table["knobs"].pop(name)["default"]
    assert Policy.parse(table, ["text"]).continues, "a dropout of the model's changes no weights"


def test_an_adapter_that_is_turned_cannot_go_on() -> None:
    """Its rank, what its numbers mean, and what they were at first."""
    table = tomllib.loads(find_policy("lora").read_text()) | {"start_from": "parent"}
    with pytest.raises(BadInput, match=r"adapter\.rank.*adapter\.targets"):
        Policy.parse(table, ["text"])


@pytest.mark.parametrize("value", ["root", 1, "Parent"])
def test_there_are_two_starts(table: dict[str, Any], value: object) -> None:
    """The key says what it knows."""
    with pytest.raises(BadInput, match=r"start_from.*'base' or 'parent'"):
        Policy.parse(table | {"start_from": value}, ["text"])
