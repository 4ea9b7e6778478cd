"""What changes nothing in a config is not printed as if it did."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from harness.conditions import meaningful
from harness.config import TrialConfig, Value, apply, flatten
from harness.policy import Policy, find_policy
from harness.records import Role, Standing
from harness.report import documents, words
from harness.report.table import _config, total_changes

POLICIES = {name: Policy.load(find_policy(name), ["mine"]) for name in ("continue", "lora", "dpo", "demo")}
FULL = POLICIES["continue"].baseline({})
ADAPTED = apply(FULL, {"method": "lora", "adapter.rank": 64})


def printed(config: TrialConfig) -> str:
    out = Console(width=300, file=io.StringIO())
    out.print(_config(config))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize(
    ("policy", "diff", "quiet"),
    [
        ("continue", {}, {name for name in flatten(FULL) if name.startswith("adapter.")} | {"quantization"}),
        ("continue", {"method": "lora"}, set()),
        ("lora", {"optim.name": "adafactor"}, {"optim.beta1", "optim.beta2", "optim.epsilon"}),
        ("dpo", {"preference.loss": "sigmoid"}, {"batch.packing", "regularization.label_smoothing"}),
        ("demo", {}, {"quantization"}),
    ],
)
def test_what_changes_nothing_is_told_apart(policy: str, diff: dict[str, Value], quiet: set[str]) -> None:
    """By the values that make it idle, whether a policy turns it or fixes it."""
    config = apply(POLICIES[policy].baseline({}), diff)
    flat = flatten(config)
    assert flat.keys() - meaningful(config).keys() == quiet & flat.keys()


def test_a_trial_says_what_means_nothing(make_trial: Any) -> None:
    """Names in one line, no values: a rank beside full fine-tuning was never used."""
    text = printed(FULL)
    row = next(line for line in text.splitlines() if line.startswith("no meaning here"))
    assert "adapter.rank" in row
    assert not any(line.startswith("adapter.") for line in text.splitlines())
    for config in (ADAPTED, POLICIES["demo"].baseline({})):
        assert "no meaning here" not in printed(config)
    document = documents.trial(make_trial(config=FULL))
    assert document["config"]["adapter.rank"] == flatten(FULL)["adapter.rank"]
    assert "adapter.rank" in document["config_idle"]
    json.dumps(document)


def test_changes_show_no_value_that_meant_nothing() -> None:
    """From full fine-tuning to an adapter, the rank begins; it was not turned from a default."""
    nodes = [
        Standing(node=node, parent=None, diff={}, config=config, scores={}, trial=None)
        for node, config in enumerate((FULL, ADAPTED))
    ]
    changes = total_changes(*nodes)
    assert changes["adapter.rank"] == (words.NOTHING, "64")
    assert changes["adapter.dropout"][0] == words.NOTHING
    assert words.change({"adapter.rank": 64, "method": "lora"}, FULL) == [
        "adapter.rank = 64",
        f"method {FULL.method} → lora",
    ]
    back = total_changes(nodes[1], nodes[0])
    assert back["adapter.rank"] == ("64", words.NOTHING)


def test_a_comparison_leaves_out_what_means_nothing_in_both(make_trial: Any) -> None:
    """Two full fine-tunes do not differ by a rank."""
    other = apply(FULL, {"optim.learning_rate": 1e-6}).model_copy(
        update={"adapter": FULL.adapter.model_copy(update={"rank": 64})}  # type: ignore[union-attr]
    )
    one, two = (make_trial(config=config, score=score) for config, score in ((FULL, 2.0), (other, 1.9)))
    facts: Any = type("Facts", (), {"noise": None})
    found = documents.compare(facts, one, two, [1.0, 1.0], [0.9, 1.0])
    assert set(found.diff) == {"optim.learning_rate"}
    assert documents.comparison(found)["diff"].keys() == {"optim.learning_rate"}


def test_a_base_in_four_bits_is_called_that(make_trial: Any) -> None:
    """Its score is not that of the weights as they were published."""
    in_full, coarse = (
        make_trial(role=Role.REFERENCE, config=apply(ADAPTED, {"quantization": kind})) for kind in ("none", "nf4")
    )
    assert words.purpose(in_full) == "the untouched base model"
    assert words.purpose(coarse) == "the untouched base model, its weights held as nf4"
