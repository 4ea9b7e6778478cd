from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozen.conversations import (
    LARGEST_CONVERSATION,
    Conversation,
    Empty,
    Misshapen,
    Preference,
    Shape,
    Turn,
    canonical,
    parse,
    row_of,
    shape_of,
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def talk(*said: str, first: str | None = None, plain: bool = False) -> Conversation:
    turns = [Turn("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(said)]
    return Conversation((*((Turn("system", first),) if first else ()), *turns), plain)


def pair(prompt: str, chosen: str, rejected: str, *, plain: bool = False) -> Preference:
    return Preference((Turn("user", prompt),), chosen, rejected, plain)


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"text": "a", "meta": 1}, "text"),
        ({"instruction": "a", "input": "", "output": "b", "text": "prompt and all"}, "alpaca"),
        ({"instruction": "a", "context": "", "response": "b"}, "alpaca"),
        ({"messages": [], "prompt": "a"}, "chat"),
        ({"id": 1, "conversations": []}, "chat"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "messages": []}, "preference"),
        ({"question": "a", "answer": "b"}, None),
        ({}, None),
    ],
)
def test_shapes_are_recognised_by_their_fields(row: dict[str, Any], shape: str | None) -> None:
    """The most telling fields decide, and what has none of them has no shape."""
    found = shape_of(row)
    assert (found and found[0]) == shape


def test_a_named_column_decides_the_shape() -> None:
    """A column of texts is text, one of lists is chat, whatever else the row holds."""
    assert shape_of({"body": "a", "messages": []}, "body") == ("text", "'body', which was asked for")
    assert shape_of({"dialog": [], "text": "a"}, "dialog") == ("chat", "'dialog', which was asked for")
    assert parse({"body": "a"}, "text", "body").content == "a"
    assert parse({"dialog": [user("a"), assistant("b")]}, "chat", "dialog").content == talk("a", "b")


@pytest.mark.parametrize(
    ("shape", "row", "content"),
    [
        ("alpaca", {"instruction": "a", "output": "b"}, talk("a", "b")),
        ("alpaca", {"instruction": "a", "input": "x", "output": "b"}, talk("a\n\nx", "b")),
        ("alpaca", {"instruction": "a", "input": "", "output": "b", "system": "s"}, talk("a", "b", first="s")),
        (
            "alpaca",
            {"instruction": "c", "output": "d", "history": [["a", "b"]]},
            talk("a", "b", "c", "d"),
        ),
        ("chat", {"messages": [user("a"), assistant("b")]}, talk("a", "b")),
        ("chat", {"messages": [system("s"), user("a"), assistant("b")]}, talk("a", "b", first="s")),
        ("chat", {"messages": [system(""), user("a"), assistant("b")]}, talk("a", "b")),
        (
            "chat",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            talk("a", "b", first="s"),
        ),
        (
            "chat",
            {"messages": [user("a") | {"content": [{"type": "text", "text": "a"}]}, assistant("b")]},  # type: ignore[dict-item]
            talk("a", "b"),
        ),
        ("chat", {"messages": [user("\ufeffa\r\nb"), assistant("c\rd")]}, talk("a\nb", "c\nd")),
        ("prompt_completion", {"prompt": "a", "completion": " b"}, talk("a", " b", plain=True)),
        ("prompt_completion", {"prompt": [user("a")], "completion": [assistant("b")]}, talk("a", "b")),
        ("prompt_completion", {"prompt": "a", "completion": "b", "system": "s"}, talk("s\n\na", "b", plain=True)),
        (
            "prompt_completion",
            {"prompt": [user("a")], "completion": [assistant("b")], "system": "s"},
            talk("a", "b", first="s"),
        ),
        (
            "prompt_completion",
            {"prompt": [system("own"), user("a")], "completion": "b", "system": "s"},
            talk("a", "b", first="own"),
        ),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}, pair("a", "b", "c", plain=True)),
        (
            "preference",
            {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
            pair("a", "b", "c"),
        ),
        (
            "preference",
            {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
            pair("a", "b", "c"),
        ),
        (
            "preference",
            {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
            pair("a", "b", "c"),
        ),
        (
            "preference",
            {"chosen": "Human: a\n\nAssistant: good b", "rejected": "Human: a\n\nAssistant: good c"},
            pair("Human: a\n\nAssistant:", " good b", " good c", plain=True),
        ),
        (
            "preference",
            {"chosen": "Is it so? yesterday", "rejected": "Is it so? yesman"},
            pair("Is it so?", " yesterday", " yesman", plain=True),
        ),
    ],
)
def test_rows_are_read(shape: Shape, row: dict[str, Any], content: object) -> None:
    """Every published form of a shape gives the same values."""
    assert parse(row, shape).content == content


@pytest.mark.parametrize(
    ("shape", "row", "reason"),
    [
        ("chat", [], "expected an object with a field 'messages', found list"),
        ("chat", {"text": "a"}, r"no field 'messages' \(it has: text\)"),
        ("chat", {"messages": "a"}, "expected a list of messages, found str"),
        ("chat", {"messages": []}, "without an answer"),
        ("chat", {"messages": [user("a")]}, "without an answer"),
        ("chat", {"messages": [user("a"), assistant(" ")]}, "an empty answer"),
        ("chat", {"messages": [user(""), assistant("b")]}, "message 1 is empty"),
        ("chat", {"messages": [system("s"), user(""), assistant("b")]}, "message 2 is empty"),
        ("chat", {"messages": [assistant("b")]}, "assistant speaks first, where the user should"),
        ("chat", {"messages": [user("a"), user("b"), assistant("c")]}, "messages 1 and 2 are both the user's"),
        ("chat", {"messages": [user("a"), system("s"), assistant("c")]}, "message 2 is a system turn"),
        ("chat", {"messages": [user("a"), {"role": "tool", "content": "x"}, assistant("c")]}, "role 'tool'"),
        ("chat", {"messages": [user("a"), {"content": "x"}]}, "message 2 has no 'role'"),
        ("chat", {"messages": [user("a"), "b"]}, "message 2 is no object but str"),
        ("chat", {"messages": [user("a"), {"role": "assistant", "content": None}]}, "message 2 is no string"),
        ("chat", {"messages": [user("a"), assistant("b") | {"tool_calls": [1]}]}, "calls a tool"),  # type: ignore[dict-item]
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "holds 'image' beside text"),
        ("chat", {"messages": [user("a"), assistant("\ud83c")]}, "half of a surrogate pair"),
        ("chat", {"messages": [user("a"), assistant("b" * LARGEST_CONVERSATION)]}, "more than 1048576 characters"),
        ("alpaca", {"instruction": "a"}, "no field 'output'"),
        ("alpaca", {"instruction": "a", "output": ""}, "an empty answer"),
        ("alpaca", {"instruction": 1, "output": "b"}, "'instruction' is no string but int"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["x"]}, "no list of pairs"),
        ("prompt_completion", {"prompt": "a", "completion": "\n"}, "an empty answer"),
        ("prompt_completion", {"prompt": "", "completion": "b"}, "an empty prompt"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": " "}, "an empty answer"),
        ("preference", {"chosen": "yes", "rejected": "no"}, "no prompt"),
        ("preference", {"chosen": [assistant("b")], "rejected": [assistant("c")]}, "no prompt"),
        (
            "preference",
            {
                "chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
                "rejected": [user("a"), assistant("x"), user("c"), assistant("d")],
            },
            "differ in more than their last answer",
        ),
        (
            "preference",
            {"prompt": "z", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
            "do not begin with the prompt",
        ),
        ("text", {"text": "\udc80"}, "not UTF-8"),
    ],
)
def test_rows_that_do_not_fit_have_a_reason(shape: Shape, row: Any, reason: str) -> None:
    """Each fault is said, with the message's number where there is one."""
    with pytest.raises(Misshapen, match=reason):
        parse(row, shape)


def test_an_empty_text_is_nothing_malformed() -> None:
    """It is told apart from a fault."""
    with pytest.raises(Empty):
        parse({"text": " \n"}, "text")


def test_a_question_that_nobody_answered_is_cut_and_counted() -> None:
    """What is after the last answer teaches nothing."""
    parsed = parse({"messages": [user("a"), assistant("b"), user("c")]}, "chat")
    assert parsed.content == talk("a", "b")
    assert parsed.note == "a last question without an answer was cut"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "from", "value", "type", "text", "messages", "prompt", "chosen", "rejected"]
            ),
            inner | st.sampled_from(["user", "assistant", "system"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
ROWS = st.dictionaries(
    st.sampled_from(
        ["messages", "conversations", "prompt", "completion", "chosen", "rejected", "instruction", "output"]
    ),
    JSON,
)


@given(row=ROWS, shape=st.sampled_from(["text", "alpaca", "chat", "prompt_completion", "preference"]))
def test_any_row_is_read_or_refused(row: dict[str, Any], shape: Shape) -> None:
    """Whatever a row holds, it becomes a content that reads back to itself, or a reason."""
    try:
        content = parse(row, shape).content
    except Misshapen:
        return
    published = row_of(content)
    again = shape_of(published)
    assert again is not None
    assert parse(published, again[0]).content == content
    assert canonical(content)
