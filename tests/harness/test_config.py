import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import (
    Knob,
    Sampling,
    SourceWeight,
    TrialConfig,
    Value,
    apply,
    difference,
    flatten,
    nearest,
    unflatten,
)
from harness.errors import BadValue, UnknownKnob
from harness.policy import Policy, find_policy
from tests.samples import BASE


def config(**changes: object) -> TrialConfig:
    """Return a small valid config with some knobs turned."""
    return apply(BASE, changes)  # type: ignore[arg-type]


configs = st.builds(
    lambda rate, decay, shape, warmup, per_device, depth, heads, weights: config(
        **{
            "optim.learning_rate": rate,
            "optim.weight_decay": decay,
            "schedule.shape": shape,
            "schedule.warmup_fraction": warmup,
            "batch.per_device": per_device,
            "model.depth": depth,
            "model.width": 16 * heads,
            "model.heads": heads,
        }
        | {f"sampling.weights.{name}": weight for name, weight in weights.items()}
    ),
    st.floats(1e-8, 1),
    st.floats(0, 1),
    st.sampled_from(["cosine", "linear", "sqrt"]),
    st.floats(0, 0.9),
    st.integers(1, 4096),
    st.integers(1, 256),
    st.integers(1, 64),
    st.dictionaries(st.text("abcdefgh.-_0", min_size=1, max_size=8), st.floats(0.1, 1e6), max_size=4),
)


@given(configs)
def test_flatten_round_trips(value: TrialConfig) -> None:
    """A config survives flattening, its own JSON, and keeps its identity."""
    assert unflatten(flatten(value)) == value
    assert unflatten(json.loads(value.canonical_json())).digest == value.digest


@given(configs, configs)
def test_a_difference_applied_to_the_parent_gives_the_child(parent: TrialConfig, child: TrialConfig) -> None:
    """Diffs are exact wherever the child has no fewer sources than the parent."""
    child = child.model_copy(update={"sampling": parent.sampling})
    assert apply(parent, difference(parent, child)) == child
    assert (difference(parent, child) == {}) == (parent.digest == child.digest)


def test_the_same_number_written_differently_is_the_same_config() -> None:
    """3e-4 and 0.00030, 1 and 1.0, and the order of sources do not change the identity."""
    assert config(**{"optim.learning_rate": 0.00030}).digest == config(**{"optim.learning_rate": 3e-4}).digest
    assert config(**{"optim.max_grad_norm": 1}).digest == config(**{"optim.max_grad_norm": 1.0}).digest
    a, b = SourceWeight(source="a", weight=1), SourceWeight(source="b", weight=2)
    assert Sampling(fraction=1, order="shuffled", weights=(a, b)) == Sampling(
        fraction=1, order="shuffled", weights=(b, a)
    )


def test_an_unknown_knob_is_named_with_its_nearest() -> None:
    """A typo is answered with the name that was probably meant."""
    with pytest.raises(UnknownKnob, match=r"optim\.learning_rate"):
        config(**{"optim.learning_rte": 1e-3})
    assert "optim.learning_rate" in nearest("learning_rate", flatten(config()))
    assert nearest("zzz", flatten(config())) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optim.learning_rate", float("nan")),
        ("optim.learning_rate", float("inf")),
        ("optim.learning_rate", 0),
        ("optim.learning_rate", "fast"),
        ("batch.per_device", 0),
        ("batch.per_device", 1.5),
        ("model.heads", 3),
        ("schedule.shape", "square"),
        ("precision", "fp8"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(name: str, value: object) -> None:
    """The message names the knob."""
    with pytest.raises(BadValue, match=name):
        config(**{name: value})


def test_sources_are_named_once_and_not_all_silent() -> None:
    """Weights that cannot be followed are refused."""
    with pytest.raises(BadValue, match="zero"):
        config(**{"sampling.weights.a": 0})
    with pytest.raises(ValueError, match="twice"):
        Sampling(fraction=1, order="shuffled", weights=(SourceWeight(source="a", weight=1),) * 2)


RATE = Knob(name="r", type="float", low=1e-5, high=1e-2, scale="log", default=3e-4, watch="loss")
DEPTH = Knob(name="d", type="int", low=1, high=8, default=2, watch="tokens per second")
SHAPE = Knob(name="s", type="choice", choices=("cosine", 64, 0.5), default=64, watch="end of the curve")


@given(st.floats(allow_nan=True, allow_infinity=True) | st.integers() | st.text() | st.booleans() | st.none())
def test_a_knob_returns_its_own_type_within_bounds_or_refuses(value: object) -> None:
    """Whatever comes in, what comes out lies within the bounds, in the knob's type."""
    for knob, kind in ((RATE, float), (DEPTH, int)):
        try:
            checked = knob.check(value)
        except BadValue as error:
            assert knob.name in str(error)  # noqa: PT017 - both branches are the property
        else:
            assert type(checked) is kind
            assert knob.low <= checked <= knob.high  # type: ignore[operator]


def test_a_choice_takes_equal_numbers_but_no_look_alikes() -> None:
    """64.0 is the choice 64; True and "64" are not."""
    assert SHAPE.check(64.0) == 64
    assert type(SHAPE.check(64.0)) is int
    for wrong in (True, "64", "Cosine", 63):
        with pytest.raises(BadValue):
            SHAPE.check(wrong)


@pytest.mark.parametrize(
    "fault",
    [
        {"low": 1.0, "high": 1.0},
        {"low": 0.0},
        {"choices": (1, 2)},
        {"default": 1.0},
        {"type": "choice"},
    ],
)
def test_an_inconsistent_knob_is_refused(fault: dict[str, object]) -> None:
    """A policy cannot define a knob that no value fits."""
    with pytest.raises((ValueError, BadValue), match="r"):
        Knob.model_validate(RATE.model_dump() | fault)


def test_a_knob_is_active_only_under_its_condition() -> None:
    """`when` compares with the other knobs of the config."""
    knob = RATE.model_copy(update={"when": {"schedule.shape": "cosine"}})
    assert knob.is_active(flatten(config()))
    assert not knob.is_active(flatten(config(**{"schedule.shape": "linear"})))


@pytest.mark.parametrize(
    ("policy", "knobs", "words"),
    [
        ("lora", {"adapter.initialisation": "pissa", "quantization": "nf4"}, "4-bit"),
        ("lora", {"adapter.initialisation": "olora", "adapter.dora": True}, "dora"),
        ("lora", {"adapter.initialisation": "orthogonal", "adapter.rank": 3}, "even"),
        ("lora", {"optim.name": "schedule_free", "optim.beta1": 0.0}, "beta1"),
        ("dpo", {"regularization.neftune_alpha": 5.0}, "reference"),
        ("dpo", {"adapter.initialisation": "pissa"}, "reference"),
    ],
)
def test_what_does_not_go_together_is_no_config(policy: str, knobs: dict[str, Value], words: str) -> None:
    """No trial is spent on finding it out."""
    config = Policy.load(find_policy(policy), ["data"]).baseline({})
    with pytest.raises(BadValue, match=words):
        apply(config, knobs)
