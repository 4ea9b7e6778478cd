from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.calling import unbounded
from agent.reply import LONGEST_PROSE, LONGEST_REPLY, MOST_INSIGHTS, BadReply, Reply, read, schema
from agent.troubles import scrub
from harness.config import Knob
from harness.records import History

KNOBS = {
    "optim.learning_rate": Knob(
        name="optim.learning_rate", type="float", low=1e-5, high=1e-2, scale="log", default=3e-4, watch="loss"
    ),
    "model.depth": Knob(name="model.depth", type="int", low=1, high=8, default=2, watch="steps"),
    "batch.per_device": Knob(name="batch.per_device", type="choice", choices=(8, 16), default=8, watch="memory"),
    "schedule.shape": Knob(
        name="schedule.shape", type="choice", choices=("cosine", "linear"), default="cosine", watch="end"
    ),
}
HISTORY = History(
    study="s",
    task="pretrain",
    metric="bits_per_byte",
    budget="300s",
    seed=0,
    next_number=1,
    knobs=KNOBS,
    max_changes=2,
    minimum_steps=20,
    baseline=None,
    incumbent=None,
    lineage=(),
    noise=None,
    past=(),
)


def taken(text: str, most: int = 3) -> Reply:
    return read(text, HISTORY, source="anthropic", model="m-1", most=most)


def offer(*changes: tuple[str, object], **others: object) -> dict[str, object]:
    return {
        "parent": None,
        "changes": [{"knob": name, "value": value} for name, value in changes],
        "rationale": "because",
        "watch": "the loss",
        "predicted_change": -0.01,
        "confidence": 0.6,
        "abort_if": None,
    } | others


def reply(*proposals: object, insights: object = ()) -> str:
    return json.dumps({"proposals": proposals, "insights": list(insights) if insights == () else insights})


GOOD = offer(("optim.learning_rate", 1e-3))


# --- the schema --------------------------------------------------------------------------------------------------


def objects(part: Any) -> list[dict[str, Any]]:
    if isinstance(part, list):
        return [each for item in part for each in objects(item)]
    if not isinstance(part, dict):
        return []
    return [part] * (part.get("type") == "object") + [each for item in part.values() for each in objects(item)]


def test_the_schema_keeps_to_what_both_strict_modes_take() -> None:
    """Every object is closed with all its properties required, and without bounds no word is left that is not taken."""
    made = unbounded(schema(KNOBS, 2, 3))
    assert len(objects(made)) == 4
    for each in objects(made):
        assert each["additionalProperties"] is False
        assert each["required"] == list(each["properties"]) != []
    words = json.dumps(made)
    for word in (
        "minimum",
        "maximum",
        "maxItems",
        "minItems",
        "minLength",
        "maxLength",
        "oneOf",
        "$ref",
        "default",
        "pattern",
    ):
        assert f'"{word}"' not in words
    change = made["properties"]["proposals"]["items"]["properties"]["changes"]["items"]
    assert change["properties"]["knob"]["enum"] == sorted(KNOBS)


def test_the_schema_bounds_whatever_could_run_on() -> None:
    """Under a grammar made of it a small model fills a list or a text without bound until its context is full."""

    def parts(schema: Any) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict):
            yield schema
        for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            yield from parts(each)

    made = list(parts(schema(KNOBS, 2, 3)))
    lists = [each for each in made if each.get("type") == "array"]
    texts = [each for each in made if each.get("type") == "string" and "enum" not in each]
    assert sorted(each["maxItems"] for each in lists) == [2, 3, MOST_INSIGHTS]
    assert len(texts) == 4
    assert all(0 < each["maxLength"] <= LONGEST_PROSE for each in texts)


def test_the_schema_survives_the_sdks_transformation() -> None:
    """What the SDK would send of it is what it was, but for the types beside enums."""
    from anthropic.lib._parse._transform import transform_schema

    made = unbounded(schema(KNOBS, 2, 3))
    sent = transform_schema(made)
    assert [each["required"] for each in objects(sent)] == [each["required"] for each in objects(made)]


# --- keys ----------------------------------------------------------------------------------------------------------

A_KEY = 'zq9-Canary_KEY77+x/Lm"=='


def codes(text: str) -> str:
    return "".join(f"\\u{ord(character):04X}" for character in text)


@pytest.mark.parametrize(
    "spelled",
    [A_KEY.replace('"', '\\"'), A_KEY.replace("/", "\\/").replace('"', '\\"'), codes(A_KEY), "zq" + codes(A_KEY[2:])],
)
def test_no_text_of_a_reply_holds_a_key(monkeypatch: pytest.MonkeyPatch, spelled: str) -> None:
    """However a server that echoes it spells it in JSON: neither once read, nor as it is kept and quoted."""
    monkeypatch.setenv("GATEWAY_API_KEY", A_KEY)
    text = reply(
        offer(("model.depth", 2), rationale="see KEY", watch="KEY"),
        offer(("KEY", "KEY"), rationale="why", watch="what"),
        offer(("model.depth", 2), rationale="why", watch="what", parent="KEY"),
        insights=["the KEY is KEY"],
    ).replace("KEY", spelled)
    made = taken(text)
    assert len(made.proposals) == 2
    assert len(made.faults) == 1
    assert made.insights == ("the [key] is [key]",)
    for shown in (repr(made), scrub(text), scrub(json.dumps(text))):
        assert "Canary" not in shown
        assert spelled not in shown
        assert "[key]" in shown
    assert json.loads(scrub(text))["insights"] == ["the [key] is [key]"]


def test_what_is_taken_out_leaves_json_behind() -> None:
    """A quote that went with a password would lose the reply."""
    text = json.dumps({"a": "https://host", "b": "c@d", "e": 'Bearer abc"'}, separators=(",", ":"))
    assert json.loads(scrub(text)) == {"a": "https://host", "b": "c@d", "e": '[key]"'}


# --- how long it takes ---------------------------------------------------------------------------------------------

LONG = LONGEST_REPLY - 2_000
MANY = '{"x":' * 199
HARD = {
    "thinking that never ends": "<think>" * (LONG // 7),
    "thinking that ends once": "<think>" * (LONG // 7) + "</think>",
    "many short thoughts": "<think></think>" * (LONG // 15),
    "braces": "{" * LONG,
    "a deep object": '{"a":' * (LONG // 5),
    "a list behind many braces": f"{MANY}[{'1.5e3,' * (LONG // 6 - 300)}",
    "a text behind many braces": f'{MANY}"{"a" * (LONG - 1_000)}',
    "escapes behind many braces": MANY + '"' + "\\u0041" * (LONG // 6 - 300),
    "objects behind many braces": f"{MANY}[{'{},' * (LONG // 3 - 400)}",
    "almost a number": reply(offer(("model.depth", "1" * LONG + "x"))),
    "almost an exponent": reply(offer(("model.depth", "1" * LONG + "e"))),
    "a whole number": reply(GOOD).replace("0.001", "1" * LONG),
    "a fraction": reply(GOOD).replace("0.001", "0." + "1" * LONG),
    "changes": reply(offer(*[("model.depth", 2)] * (LONG // 60))),
    "insights": reply(GOOD, insights=["ab"] * (LONG // 7)),
    "backslashes": reply(GOOD, insights=["\\" * (LONG // 2 - 500)]),
}


def processor_seconds(text: str) -> float:
    began = time.thread_time()
    with contextlib.suppress(BadReply):
        taken(text)
    return time.thread_time() - began


@pytest.mark.parametrize("name", HARD)
def test_no_reply_takes_the_square_of_its_length(name: str) -> None:
    """The reader shares the interpreter with the device's driver.

    A pattern that starts anew at each mark takes some 10,000 times what a long rationale does, and parsing again behind
    each brace 1,000 times; now all stay below 60.
    """
    assert len(HARD[name]) <= LONGEST_REPLY
    benign = min(processor_seconds(reply(offer(("model.depth", 2), rationale="so " * (LONG // 3)))) for _ in range(3))
    assert processor_seconds(HARD[name]) < 400 * benign


def test_thinking_is_no_part_of_the_reply() -> None:
    """However it is written; what comes before, between and after counts, and a thought without end is none."""
    draft = reply(offer(("model.depth", 8)))
    text = f"<think>{draft}</think> so: <THINK>{draft}<think></THINK>{reply(GOOD)}<think>{{"
    assert taken(text).proposals[0].diff == {"optim.learning_rate": 1e-3}


# --- what is taken -----------------------------------------------------------------------------------------------


def test_a_change_that_is_said_twice_alike_is_one() -> None:
    """Small models repeat themselves; only two different values for one knob leave open what is meant."""
    made = taken(reply(offer(("model.depth", 2), ("model.depth", 2.0), ("model.depth", "2"))))
    assert made.proposals[0].diff == {"model.depth": 2}
    assert made.faults == ()


def test_a_whole_reply() -> None:
    """Every field arrives, the source and the model as whoever asked says."""
    abort = {"probe_above": 3.5, "after": 0.5}
    text = reply(offer(("model.depth", 4), parent=2, abort_if=abort), insights=["depth helps"])
    made = taken(text)
    proposal = made.proposals[0]
    assert proposal.diff == {"model.depth": 4}
    assert (proposal.parent, proposal.source, proposal.model) == (2, "anthropic", "m-1")
    assert (proposal.predicted_change, proposal.confidence) == (-0.01, 0.6)
    assert proposal.abort_if is not None
    assert proposal.abort_if.after == 0.5
    assert made.insights == ("depth helps",)
    assert made.faults == ()


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "```json\n{}\n```",
        "Here is what I would try:\n\n```\n{}\n```\nGood luck!",
        '<think>Maybe {{"proposals": []}} or so {{</think>{}',
        '{{"draft": true}} and now the reply: {}',
        "\ufeff {} \x00",
    ],
)
def test_fences_prose_and_thinking_are_stripped(around: str) -> None:
    """Models without a strict mode wrap their JSON."""
    text = around.replace("{{", "\x01").replace("}}", "\x02").replace("{}", reply(GOOD))
    made = taken(text.replace("\x01", "{").replace("\x02", "}"))
    assert made.proposals[0].diff == {"optim.learning_rate": 1e-3}


def test_numbers_given_as_text_are_numbers_where_the_knob_is_one() -> None:
    """Only exactly a number, and only for a knob that takes no text."""
    made = taken(reply(offer(("optim.learning_rate", "3e-4"), ("batch.per_device", "16"), ("schedule.shape", "1"))))
    assert made.proposals[0].diff == {"optim.learning_rate": 3e-4, "batch.per_device": 16, "schedule.shape": "1"}
    assert taken(reply(offer(("model.depth", "4 blocks")))).proposals[0].diff == {"model.depth": "4 blocks"}


@pytest.mark.parametrize(
    "changes",
    [
        [("no.such.knob", 1)],
        [("optim.learning_rate", 9e9)],
        [("schedule.shape", "square")],
        [("model.depth", True)],
        [("optim.learning_rate", 1e-3), ("model.depth", 3), ("batch.per_device", 8)],
    ],
)
def test_what_is_merely_unwise_is_a_proposal(changes: list[tuple[str, object]]) -> None:
    """The harness refuses it with a row, and the model is shown the reason."""
    made = taken(reply(offer(*changes)))
    assert made.proposals[0].diff == dict(changes)
    assert made.faults == ()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (3, "no object"),
        ({}, "changes"),
        (offer(), "changes"),
        (offer(("model.depth", 2), ("model.depth", 3)), "twice"),
        (offer(("model.depth", None)), "neither"),
        (offer(("model.depth", [1])), "neither"),
        (offer(("model.depth", 2**70)), "neither"),
        (offer(("optim.learning_rate", "1e999")), "neither"),
        (offer(("x" * 500, 1)), "names no knob"),
        (offer(("a\ud800", 1)), "names no knob"),
        (GOOD | {"rationale": " "}, "rationale"),
        (GOOD | {"watch": None}, "watch"),
        (GOOD | {"parent": "incumbent"}, "parent"),
        (GOOD | {"parent": True}, "parent"),
    ],
)
def test_one_bad_proposal_does_not_lose_the_others(bad: object, why: str) -> None:
    """It goes to the faults, with a sentence that says what was wrong."""
    made = taken(reply(bad, GOOD))
    assert [proposal.diff for proposal in made.proposals] == [{"optim.learning_rate": 1e-3}]
    assert len(made.faults) == 1
    assert made.faults[0].startswith("Proposal 1: ")
    assert why in made.faults[0]
    assert len(made.faults[0]) < 400


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (GOOD | {"predicted_change": "better"}, "predicted_change"),
        (GOOD | {"predicted_change": 1e305}, "predicted_change"),
        (GOOD | {"confidence": 70}, "confidence"),
        (GOOD | {"abort_if": {"probe_above": -1, "after": 0.5}}, "probe_above"),
        (GOOD | {"abort_if": {"probe_above": 2, "after": 2}}, "after"),
        (GOOD | {"abort_if": "diverged"}, "abort_if"),
        (GOOD | {"predicted_change": float("1e999"), "confidence": -3.9}, "predicted_change"),
    ],
)
def test_what_can_be_left_out_loses_no_proposal(odd: Mapping[str, Any], why: str) -> None:
    """It is taken without, the rest of it whole, and the model is told."""
    made = taken(json.dumps({"proposals": [odd], "insights": []}).replace("Infinity", "1e999"))
    [proposal] = made.proposals
    assert proposal.diff == {"optim.learning_rate": 1e-3}
    [fault] = made.faults
    assert fault.startswith("Proposal 1 was taken without")
    assert why in fault
    assert len(fault) < 400
    fields = ("predicted_change", "confidence", "abort_if")
    assert [getattr(proposal, name) for name in fields] == [
        None if odd[name] is None or odd[name] != GOOD[name] else GOOD[name] for name in fields
    ]


def test_sizes_are_bounded() -> None:
    """A model that does not stop fills neither the ledger nor the next briefing."""
    long = offer(("model.depth", 3), rationale="r" * 9_999, watch="w" * 9_999)
    made = taken(reply(long, GOOD, GOOD, insights=["i" * 9_999, "", 3, "b\x1b[2J\ud800", "c", "d"]), most=2)
    assert len(made.proposals) == 2
    assert "2 of 3" in made.faults[0]
    assert len(made.proposals[0].rationale) == len(made.proposals[0].watch) == 2_000
    assert len(made.insights) == MOST_INSIGHTS
    assert len(made.insights[0]) == 500
    assert "\x1b" not in "".join(made.insights)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no whole JSON object"),
        ("I would rather not.", "no whole JSON object"),
        ("[]", "no whole JSON object"),
        (reply(GOOD)[:-9], "proposals"),
        ("{}", "proposals"),
        ('{"proposals": {}}', "proposals"),
        ("x" * (LONGEST_REPLY + 1), "longer"),
        ("{" * 100_000, "no whole JSON object"),
        ('{"a":' * 30_000, "no whole JSON object"),
    ],
)
def test_what_is_no_reply_explains_itself(text: str, why: str) -> None:
    """One or two sentences for the model, in bounded time whatever the text."""
    with pytest.raises(BadReply, match=why) as caught:
        taken(text)
    assert len(str(caught.value)) < 300


def test_nesting_of_any_depth_ends_well() -> None:
    """Also where the parser still manages what a later step does not."""
    for depth in range(20, 1_000, 20):
        with contextlib.suppress(BadReply):
            made = taken('{"proposals": [{"changes": [' + "[" * depth + "]" * depth + "]}]}")
            assert made.proposals == ()
            assert len(made.faults) == 1


def test_nan_and_infinity_are_refused() -> None:
    """Python's parser would take them."""
    for number in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(BadReply):
            taken(reply(GOOD).replace("-0.01", number).replace("0.001", number))


# --- whatever comes ----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "parent": JSON,
        "changes": st.lists(
            st.fixed_dictionaries({"knob": st.sampled_from(sorted(KNOBS)) | JSON, "value": JSON}), max_size=3
        )
        | JSON,
        "rationale": JSON,
        "watch": JSON | st.just("loss"),
        "predicted_change": JSON,
        "confidence": JSON,
        "abort_if": JSON | st.fixed_dictionaries({"probe_above": JSON, "after": JSON}),
    },
)


@given(text=st.text())
def test_any_text_is_a_reply_or_a_bad_one(text: str) -> None:
    """Nothing else comes out of arbitrary text."""
    with contextlib.suppress(BadReply):
        assert isinstance(taken(text), Reply)


@given(document=JSON | st.fixed_dictionaries({"proposals": JSON | st.lists(NEARLY, max_size=4), "insights": JSON}))
def test_any_json_is_a_reply_or_a_bad_one(document: object) -> None:
    """Nor out of arbitrary JSON; and what is taken can be written to the ledger."""
    with contextlib.suppress(BadReply):
        made = taken(json.dumps(document))
        for proposal in made.proposals:
            json.dumps(proposal.model_dump(mode="json"), allow_nan=False)
            proposal.model_dump_json().encode("utf-8")
        "".join([*made.insights, *made.faults]).encode("utf-8")


@given(
    rate=st.floats(1e-5, 1e-2),
    depth=st.integers(-5, 50),
    parent=st.none() | st.integers(0, 99),
    predicted=st.none() | st.floats(-9, 9),
    confidence=st.none() | st.floats(0, 1),
    rationale=st.text("abc ö×", min_size=1).filter(str.strip),
)
def test_what_was_offered_is_what_is_read(
    rate: float, depth: int, parent: int | None, predicted: float | None, confidence: float | None, rationale: str
) -> None:
    """Through JSON and back, nothing is lost or rounded."""
    item = offer(
        ("optim.learning_rate", rate),
        ("model.depth", depth),
        parent=parent,
        predicted_change=predicted,
        confidence=confidence,
        rationale=rationale,
    )
    made = taken(reply(item)).proposals[0]
    assert made.diff == {"optim.learning_rate": rate, "model.depth": depth}
    assert (made.parent, made.predicted_change, made.confidence) == (parent, predicted, confidence)
    assert made.rationale == rationale.strip()
