from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.anthropic import AnthropicProvider
from agent.asking import ENDED_IN_FLIGHT, Answer, AskFailed, Question, Trouble
from agent.line import Line
from harness.errors import SpendingCapReached, WrongUse
from harness.terms import Usage
from tests.agent.wire import KEY, BookedDesk, Say, Wire, closed_port, failure, message, model_info

MODEL = "claude-test-1"
QUESTION = Question(
    purpose="proposals",
    system="You tune.",
    text="What next?",
    name="proposals",
    schema={"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    most_output_tokens=500,
)
A_HANG_SECONDS = 30.0
"""Longer than any answer takes on a busy machine: what passes it has hung."""

Ask = Callable[..., Answer]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Nothing of the machine's own: no key, no profile, no proxy."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("ANTHROPIC_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)


@pytest.fixture
def provider() -> Iterator[AnthropicProvider]:
    made = AnthropicProvider(MODEL)
    yield made
    made.close()
    made.close()


@pytest.fixture
def desk() -> BookedDesk:
    return BookedDesk()


@pytest.fixture
def ask(provider: AnthropicProvider, desk: BookedDesk, monkeypatch: pytest.MonkeyPatch) -> Ask:
    def asked(wire: Wire, deadline_seconds: float = A_HANG_SECONDS, question: Question = QUESTION) -> Answer:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", wire.address)
        return provider.ask(question, desk, deadline_seconds=deadline_seconds)

    return asked


@pytest.fixture
def fails(ask: Ask) -> Callable[..., AskFailed]:
    def failed(*script: Say, deadline_seconds: float = A_HANG_SECONDS) -> AskFailed:
        with Wire(*script) as wire, pytest.raises(AskFailed) as caught:
            ask(wire, deadline_seconds)
        return caught.value

    return failed


# --- an answer ---------------------------------------------------------------------------------------------------


def test_an_answer_and_what_was_asked(ask: Ask, desk: BookedDesk) -> None:
    """The text comes back with its usage; system prompt cached for an hour, strict schema, key as the SDK sends it."""
    with Wire(Say(body=message('{"a": 1}'))) as wire:
        answer = ask(wire)
    assert answer.text == '{"a": 1}'
    usage = Usage(input_tokens=11, cache_read_tokens=5, cache_write_tokens=7, output_tokens=13, reasoning_tokens=3)
    assert answer.usage == usage == desk.last.usage
    assert answer.cost_usd == usage.tokens / 1e6
    assert desk.last.trouble is None
    [post] = wire.posts
    assert post.path == "/v1/messages"
    assert KEY in post.headers["authorization"]
    assert post.body["model"] == MODEL
    assert post.body["system"][0]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert post.body["output_config"]["format"] == {"type": "json_schema", "schema": QUESTION.schema}
    assert post.body["max_tokens"] == 500
    assert "temperature" not in post.body


def test_prompt_and_reply_are_kept_without_the_key(ask: Ask, desk: BookedDesk) -> None:
    """For the reader, in the study's folder."""
    with Wire(Say(body=message(f'{{"key": "{KEY}"}}'))) as wire:
        assert ask(wire).text == '{"key": "[key]"}'
    assert "You tune." in desk.kept[1, "question.md"]
    assert "What next?" in desk.kept[1, "question.md"]
    assert desk.kept[1, "answer.txt"] == '{"key": "[key]"}'


def test_the_worst_case_is_reserved_before_anything_is_sent(ask: Ask, desk: BookedDesk) -> None:
    """No tokenizer makes more tokens than bytes; the answer's limit is the model's."""
    with Wire(Say(body=message("{}"))) as wire:
        ask(wire)
    most = desk.begun[1].most
    assert most.output_tokens == 500
    assert most.input_tokens > len(QUESTION.text)
    assert most.cache_write_tokens >= len(QUESTION.system) + len(json.dumps(QUESTION.schema))
    assert desk.begun[1].purpose == "proposals"


def test_what_the_desk_does_not_let_through_is_not_sent(provider: AnthropicProvider) -> None:
    """The owner's cap."""
    with Wire(Say(body=message("{}"))) as wire, pytest.raises(SpendingCapReached):
        provider.ask(QUESTION, BookedDesk(is_capped=True), deadline_seconds=1)
    assert wire.seen == []


def test_long_answers_need_no_stream(ask: Ask) -> None:
    """The SDK refuses many output tokens without a time-out of one's own."""
    question = dataclasses.replace(QUESTION, most_output_tokens=64_000)
    with Wire(Say(body=message("{}"))) as wire:
        assert ask(wire, question=question).text == "{}"


def test_usage_that_nobody_told_is_none(ask: Ask, desk: BookedDesk) -> None:
    """And a count that is none is not believed."""
    for usage in (None, {}, {"input_tokens": -1, "output_tokens": 2}, {"input_tokens": "9", "output_tokens": 2}, 7):
        with Wire(Say(body=message("{}", usage=usage))) as wire:
            assert ask(wire).usage is None
    assert desk.last.sent


# --- forms -------------------------------------------------------------------------------------------------------


def test_a_model_without_structured_output_is_asked_by_tool_and_then_in_text(ask: Ask, desk: BookedDesk) -> None:
    """Each step down is an event and a row of its own, and is remembered."""
    tool = {"content": [{"type": "tool_use", "id": "t", "name": "proposals", "input": {"a": 1}}]}
    script = [
        Say(status=400, body=failure("invalid_request_error", "output_config.format is not supported by this model")),
        Say(body=message(None, stop_reason="tool_use", **tool)),
        Say(status=400, body=failure("invalid_request_error", "tool_choice: forced tool use is not supported")),
        Say(body=message('{"a": 2}')),
    ]
    with Wire(*script) as wire:
        assert json.loads(ask(wire).text) == {"a": 1}
        assert ask(wire).text == '{"a": 2}'
    schema, tool_first, _, text = wire.posts
    assert "output_config" in schema.body
    assert tool_first.body["tools"][0]["strict"] is True
    assert tool_first.body["tool_choice"]["disable_parallel_tool_use"] is True
    assert "tools" not in text.body
    assert json.dumps(QUESTION.schema) in text.body["system"][0]["text"]
    assert [kind for kind, _ in desk.events] == ["model_form", "model_form"]
    assert [desk.ended[call].sent for call in sorted(desk.ended)] == [False, True, False, True]


def test_another_bad_request_is_not_about_the_form(fails: Callable[..., AskFailed], desk: BookedDesk) -> None:
    """Asked once, and permanent."""
    failed = fails(Say(status=400, body=failure("invalid_request_error", "messages: at least one message is required")))
    assert failed.trouble is Trouble.BAD_REQUEST
    assert failed.is_permanent
    assert len(desk.begun) == 1


# --- troubles ----------------------------------------------------------------------------------------------------

KIND = "invalid_request_error"
STATUSES = [
    (401, failure("authentication_error", "invalid x-api-key"), Trouble.NOT_ALLOWED),
    (403, failure("permission_error", "not for this key"), Trouble.NOT_ALLOWED),
    (400, failure(KIND, "disabled", code="organization_on_hold"), Trouble.NOT_ALLOWED),
    (404, failure("not_found_error", "model: claude-test-1"), Trouble.NO_SUCH_MODEL),
    (402, failure("billing_error", "no money"), Trouble.SPENDING_LIMIT),
    (400, failure(KIND, "Your credit balance is too low to access the API"), Trouble.SPENDING_LIMIT),
    (429, failure("rate_limit_error", "limit", code="enforced_spend_limit_reached"), Trouble.SPENDING_LIMIT),
    (429, failure("rate_limit_error", "limit", code="contract_spend_limit_reached"), Trouble.SPENDING_LIMIT),
    (429, failure("rate_limit_error", "too fast", code="ramp_limit_exceeded"), Trouble.RATE_LIMITED),
    (429, failure("rate_limit_error", "slow down"), Trouble.RATE_LIMITED),
    (429, "not even JSON", Trouble.RATE_LIMITED),
    (529, failure("overloaded_error", "Overloaded"), Trouble.OVERLOADED),
    (500, failure("api_error", "oops"), Trouble.OVERLOADED),
    (502, "<html>Bad gateway</html>", Trouble.OVERLOADED),
    (503, "", Trouble.OVERLOADED),
    (504, "<html>Gateway timeout</html>", Trouble.OVERLOADED),
    (408, "", Trouble.OVERLOADED),
    (413, failure("request_too_large", "too big"), Trouble.TOO_LONG),
    (400, failure(KIND, "prompt is too long: 250000 tokens > 200000 maximum"), Trouble.TOO_LONG),
    (400, failure(KIND, "Output blocked by content filtering policy"), Trouble.FILTERED),
    (403, "<html>Sign in to the network</html>", Trouble.UNREACHABLE),
    (404, "<html>nginx</html>", Trouble.UNREACHABLE),
    (405, "", Trouble.UNREACHABLE),
    (407, "<html>Proxy Authentication Required</html>", Trouble.UNREACHABLE),
    (407, {"error": "who are you?"}, Trouble.UNREACHABLE),
    (400, "null", Trouble.BAD_REQUEST),
    (422, "[]", Trouble.BAD_REQUEST),
]


@pytest.mark.parametrize(("status", "body", "trouble"), STATUSES)
def test_statuses(fails: Callable[..., AskFailed], desk: BookedDesk, status: int, body: Any, trouble: Trouble) -> None:
    """Each has its class, is asked once, and is booked with it."""
    failed = fails(Say(status=status, body=body))
    assert failed.trouble is trouble
    assert str(status) in str(failed)
    assert (desk.last.trouble, desk.last.text) == (trouble, str(failed))
    assert len(desk.begun) == 1
    assert desk.last.sent is (status == 504), "only behind a gateway that gave up may a model have gone on"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "28800"}, 28_800.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Fri, 01 Jan 2016 00:00:00 GMT"}, 0.0),
        ({"retry-after": "1e308"}, 604_800.0),
        ({"retry-after": "Sat, 01 Jan 2101 00:00:00 GMT"}, 604_800.0),
        ({"retry-after": "Mon, 01 Jan 999999999999 00:00:00 GMT"}, None),
        ({"retry-after": "Mon, 01 Jan 2024 00:00:00 +99999999999999999999"}, None),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 -2359"}, 604_800.0),
    ],
)
def test_retry_after(fails: Callable[..., AskFailed], headers: dict[str, str], seconds: float | None) -> None:
    """Told to whoever waits, up to a week; what cannot be read was not said. Nothing here sleeps."""
    for status in (429, 529):
        assert fails(Say(status=status, headers=headers)).retry_after_seconds == seconds


HALVES = {"error": {"message": "\ud800 bad \x00 \x1b[31m", "type": "\ud800"}}
DEEP = json.dumps({"error": {"message": [0]}}).replace("0", "[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "say",
    [
        Say(status=500, body=json.dumps(HALVES)),
        Say(status=400, body=DEEP),
        Say(status=500, body="<html>", headers={"content-type": "text/html; charset=hex"}),
        Say(status=500, body="<html>", headers={"content-type": "text/html; charset=undefined"}),
        Say(status=307, headers={"location": "http://[elsewhere"}),
        Say(status=429, body="not gzip", headers={"content-encoding": "gzip"}),
        Say(body=message("", stop_reason="refusal", stop_details={"category": "\ud800", "explanation": "\x1b"})),
    ],
)
def test_hostile_bytes_are_a_trouble_like_any_other(
    fails: Callable[..., AskFailed], desk: BookedDesk, say: Say
) -> None:
    """They end in the class that they have, in words that a ledger and a terminal take."""
    text = str(fails(say))
    assert desk.last.text == text
    assert text.encode().decode() == text
    assert "\x1b" not in text
    assert "\x00" not in text


@pytest.mark.parametrize(
    ("body", "trouble", "said"),
    [
        (b"<html><body>Sign in to the network</body></html>", Trouble.GARBAGE, "no JSON"),
        (b"{}", Trouble.GARBAGE, "empty"),
        (b"[]", Trouble.GARBAGE, "no JSON object"),
        (b"", Trouble.GARBAGE, "no JSON"),
        (b'{"id": "msg_1", "content": [{"ty', Trouble.GARBAGE, "no JSON"),
        (b'{"a":' * 20_000, Trouble.GARBAGE, "no JSON"),
        (b"\xff\xfe\x00", Trouble.GARBAGE, "no JSON"),
        (message(None), Trouble.GARBAGE, "empty"),
        (message("  "), Trouble.GARBAGE, "empty"),
        (message("x", content="x"), Trouble.GARBAGE, "empty"),
        (failure("overloaded_error", "busy"), Trouble.OVERLOADED, "busy"),
        (message('{"a": ', stop_reason="max_tokens"), Trouble.CUT_OFF, "most output tokens"),
        (message("", stop_reason="model_context_window_exceeded"), Trouble.TOO_LONG, "context window"),
        (message("", stop_reason="refusal"), Trouble.REFUSED, "none named"),
    ],
)
def test_answers_that_are_none(
    fails: Callable[..., AskFailed], desk: BookedDesk, body: Any, trouble: Trouble, said: str
) -> None:
    """With status 200 all the same; what was billed is booked all the same."""
    failed = fails(Say(body=body))
    assert failed.trouble is trouble
    assert said in str(failed)
    assert desk.last.trouble == trouble
    assert (desk.last.usage is not None) == (isinstance(body, dict) and "usage" in body)


@pytest.mark.parametrize(
    ("body", "is_billed"),
    [
        (b"", False),
        (b"<html>Sign in</html>", False),
        (b"{}", False),
        (b"[]", False),
        (failure("overloaded_error", "busy"), False),
        (message(None, usage=None), False),
        (b' { "id": "msg_1", "content": [{"ty', True),
        (message("  ", usage=None), True),
        (message("", stop_reason="refusal", usage=None), True),
        (message(None), True),
    ],
)
def test_only_what_can_be_a_completion_counts_against_the_caps(
    fails: Callable[..., AskFailed], desk: BookedDesk, body: Any, is_billed: bool
) -> None:
    """Providers bill completions, not errors; one that breaks off may have been billed in full."""
    fails(Say(body=body))
    assert desk.last.sent is is_billed


def test_an_answer_that_nobody_could_read_is_not_looked_through(
    fails: Callable[..., AskFailed], desk: BookedDesk
) -> None:
    """Its start is kept, without the key that the cut would have gone through."""
    failed = fails(Say(body=message("x" * 199_990 + KEY * 10_000)))
    assert failed.trouble is Trouble.GARBAGE
    assert "longer than" in str(failed)
    assert len(desk.kept[1, "answer.txt"]) <= 200_000
    assert KEY[:12] not in desk.kept[1, "answer.txt"]


def test_a_refusal_names_its_category(fails: Callable[..., AskFailed], desk: BookedDesk) -> None:
    """Model training hits one of them; the owner has to know which."""
    details = {"type": "refusal", "category": "frontier_llm", "explanation": "It may help to build a model."}
    failed = fails(Say(body=message("", stop_reason="refusal", stop_details=details)))
    assert failed.trouble is Trouble.REFUSED
    assert not failed.is_permanent
    assert "frontier_llm" in str(failed)
    assert desk.last.usage is not None


def test_nobody_listens(provider: AnthropicProvider, desk: BookedDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection refused: unreachable, and nothing was billed."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(AskFailed) as caught:
        provider.ask(QUESTION, desk, deadline_seconds=A_HANG_SECONDS)
    assert caught.value.trouble is Trouble.UNREACHABLE
    assert not desk.last.sent


def test_a_reset_in_mid_body(fails: Callable[..., AskFailed], desk: BookedDesk) -> None:
    """It may have been billed, so that the worst case counts."""
    failed = fails(Say(body=message("x" * 5_000), resets_after_bytes=2_000))
    assert failed.trouble is Trouble.UNREACHABLE
    assert desk.last.usage is None
    assert desk.last.sent


def test_redirects_are_not_followed(fails: Callable[..., AskFailed]) -> None:
    """A prompt goes where its owner sent it, and a sign-in page is no answer."""
    failed = fails(Say(status=307, headers={"location": "http://elsewhere.example/?key=" + KEY}))
    assert failed.trouble is Trouble.GARBAGE
    assert "elsewhere.example" in str(failed)


@pytest.mark.parametrize("packed", [False, True])
def test_a_body_without_end_is_given_up(fails: Callable[..., AskFailed], packed: bool) -> None:
    """Neither long nor blown up may it fill the memory."""
    body = json.dumps(message("x" * 70_000_000 if packed else "x" * 5_000_000)).encode()
    say = Say(body=gzip.compress(body), headers={"content-encoding": "gzip"}) if packed else Say(body=body)
    failed = fails(say)
    assert failed.trouble is Trouble.GARBAGE
    assert "longer than" in str(failed)


def test_a_compressed_answer_is_read(ask: Ask) -> None:
    """The SDK asks for it."""
    body = gzip.compress(json.dumps(message('{"a": 1}')).encode())
    with Wire(Say(body=body, headers={"content-encoding": "gzip"})) as wire:
        assert ask(wire).text == '{"a": 1}'


# --- the deadline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "say",
    [
        Say(hangs=True),
        Say(body=message("x" * 5_000), drips_seconds=0.05),
        Say(body=message("x"), drips_seconds=0.05, drips_head=True),
        Say(status=500, body="x" * 5_000, drips_seconds=0.05),
    ],
)
def test_hanging_and_dripping_end_at_the_deadline(
    ask: Ask, desk: BookedDesk, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the wall clock, whatever drips in; connection and thread go with the call."""
    done = threading.Event()
    with Wire(say) as wire:
        watchdog = threading.Timer(A_HANG_SECONDS, lambda: None if done.is_set() else os._exit(3))
        watchdog.start()
        with pytest.raises(AskFailed) as caught:
            ask(wire, 0.4)
        done.set()
        watchdog.cancel()
        assert caught.value.trouble is Trouble.TIMED_OUT
        assert desk.last.sent
        until(lambda: "call" not in {thread.name for thread in threading.enumerate()})
        assert len(wire.posts) == 1, "no retry of the SDK's own"


def test_a_spent_deadline_sends_nothing(ask: Ask, desk: BookedDesk) -> None:
    """A deadline of nothing is past at once, and nothing is billed."""
    with Wire(Say(hangs=True)) as wire, pytest.raises(AskFailed) as caught:
        ask(wire, 0.0)
    assert caught.value.trouble is Trouble.TIMED_OUT
    assert wire.seen == []
    assert not desk.last.sent


def test_closing_ends_a_running_call(
    provider: AnthropicProvider, desk: BookedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once and from another thread; the row is closed, and a closed provider asks nothing more."""
    with Wire(Say(hangs=True)) as wire:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", wire.address)
        troubles: list[Trouble] = []

        def asks() -> None:
            try:
                provider.ask(QUESTION, desk, deadline_seconds=600)
            except AskFailed as failed:
                troubles.append(failed.trouble)

        asking = threading.Thread(target=asks, daemon=True)
        asking.start()
        until(lambda: len(wire.posts) == 1)
        provider.close()
        asking.join(A_HANG_SECONDS)
        assert len(troubles) == 1
        assert desk.last.trouble == Trouble.RUN_ENDED
        assert desk.last.text == ENDED_IN_FLIGHT
        assert desk.last.sent
        with pytest.raises(AskFailed, match="closed"):
            provider.ask(QUESTION, desk, deadline_seconds=600)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupted_call_is_booked_as_the_runs_end(
    ask: Ask, desk: BookedDesk, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """At the check a call is waited for by the thread that takes Ctrl-C; it goes on, and the row says why it ended."""

    def interrupted(*_: object) -> Any:
        raise end

    monkeypatch.setattr(Line, "run", interrupted)
    with Wire(Say()) as wire, pytest.raises(type(end)):
        ask(wire)
    assert desk.last.trouble == Trouble.RUN_ENDED
    assert desk.last.text == ENDED_IN_FLIGHT


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + A_HANG_SECONDS
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@pytest.mark.process
def test_a_hanging_call_does_not_hold_the_process() -> None:
    """Past its deadline a call leaves nothing that an exit would wait for."""
    code = (
        "import os, sys; from agent.anthropic import AnthropicProvider; from tests.agent.test_anthropic import *\n"
        "with Wire(Say(hangs=True)) as wire:\n"
        "    os.environ['ANTHROPIC_BASE_URL'] = wire.address\n"
        "    try: AnthropicProvider('m').ask(QUESTION, BookedDesk(), deadline_seconds=0.3)\n"
        "    except AskFailed as failed: print(failed.trouble)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert done.stdout == "timed_out\n"
    assert "Traceback" not in done.stderr


# --- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "say",
    [
        Say(status=401, body=failure("authentication_error", f"invalid key {KEY} in Authorization: Bearer {KEY}")),
        Say(status=401, body=f"no such key: {KEY}"),
        Say(status=401, body=("x" * 280 + KEY)),
        Say(status=400, body=failure(KEY, "?", code=KEY)),
        Say(body=f"<html>{KEY}"),
        Say(body=message(KEY, stop_reason="refusal", stop_details={"category": KEY, "explanation": KEY})),
        Say(body=failure("api_error", "sk-ant-somebody-elses-key-0123")),
        Say(status=302, headers={"location": f"http://user:{KEY}@host.example/"}),
    ],
)
def test_no_text_holds_a_key(fails: Callable[..., AskFailed], desk: BookedDesk, say: Say) -> None:
    """Whatever a hostile server echoes; texts are short."""
    failed = fails(say)
    for text in (str(failed), desk.texts):
        assert KEY not in text
        assert KEY[:20] not in text
        assert "somebody" not in text
    assert len(str(failed)) <= 300


def test_custom_headers_are_secrets_too(
    fails: Callable[..., AskFailed], desk: BookedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways are given their own keys that way."""
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "X-Gateway: open-sesame\nX-Other: hush-hush")
    fails(Say(status=401, body="open-sesame and hush-hush are wrong"))
    assert "sesame" not in desk.texts
    assert "hush-hush" not in desk.texts


def test_a_placeholder_blots_out_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short key of a local server may well be a word, or digits of a number."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "1234")
    with Wire(Say(body=message('{"rate": 0.1234, "note": "key-value, task-oriented-things"}'))) as wire:
        assert ask(wire).text == '{"rate": 0.1234, "note": "key-value, task-oriented-things"}'


# --- the check ---------------------------------------------------------------------------------------------------


@pytest.fixture
def check(provider: AnthropicProvider, desk: BookedDesk, monkeypatch: pytest.MonkeyPatch) -> Callable[[Wire], None]:
    def checked(wire: Wire) -> None:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", wire.address)
        provider.check(desk)

    return checked


def test_a_model_that_is_there_costs_nothing(check: Callable[[Wire], None], desk: BookedDesk) -> None:
    """The list of models is free."""
    with Wire(models=Say(body=model_info(MODEL))) as wire:
        check(wire)
    assert wire.seen[0].path == f"/v1/models/{MODEL}"
    assert desk.begun == {}
    assert desk.events == []


def test_what_the_list_says_about_the_model_is_heeded(
    check: Callable[[Wire], None], ask: Ask, desk: BookedDesk
) -> None:
    """Deprecated: an event. Without structured outputs: a tool from the start."""
    info = model_info(MODEL, lifecycle="deprecated", structured=False)
    with Wire(Say(body=message("{}")), models=Say(body=info)) as wire:
        check(wire)
        ask(wire)
    assert desk.events[0][0] == "model_deprecated"
    assert "2026-12-24" in desk.events[0][1]
    assert "tools" in wire.posts[0].body


@pytest.mark.parametrize("retires", [KEY, f"{'x' * 500}", ["\ud800", "\x1b[2J"], {"at": KEY}])
def test_what_the_list_says_is_no_more_trusted_than_an_answer(
    check: Callable[[Wire], None], desk: BookedDesk, retires: Any
) -> None:
    """It stands in an event: short, without keys and with nothing that moves a terminal's cursor."""
    with Wire(models=Say(body=model_info(MODEL, lifecycle="deprecated") | {"retires_at": retires})) as wire:
        check(wire)
    [(_, text)] = desk.events
    assert KEY not in text
    assert "\x1b" not in text
    assert text.encode()
    assert len(text) < 160


def test_a_question_that_quotes_a_key_is_kept_without_it(ask: Ask, desk: BookedDesk) -> None:
    """As a repair does that quotes what a server echoed, its slashes escaped."""
    spelled = KEY.replace("_", "\\u005f")
    with Wire(Say(body=message("{}"))) as wire:
        ask(wire, question=dataclasses.replace(QUESTION, text=f"You said {spelled}"))
    assert "secret" not in desk.kept[1, "question.md"]
    assert "You said [key]" in desk.kept[1, "question.md"]


@pytest.mark.parametrize("key", [None, ""])
def test_a_missing_key_is_told(provider: AnthropicProvider, monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    """Before any training, with its name."""
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    if key is not None:
        monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    with pytest.raises(WrongUse, match="ANTHROPIC_API_KEY"):
        provider.check(BookedDesk())


@pytest.mark.parametrize("key", [KEY + "\n", f" {KEY}", "schlüssel", "a\x00b"])
def test_a_key_that_no_header_takes_is_told(
    provider: AnthropicProvider, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Copied with its line break; the value is not shown."""
    monkeypatch.setattr(os, "environ", {**os.environ, "ANTHROPIC_API_KEY": key})
    with pytest.raises(WrongUse, match="ANTHROPIC_API_KEY") as caught:
        provider.check(BookedDesk())
    assert key.strip() not in str(caught.value)


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (Say(status=401, body=failure("authentication_error", "no")), "ANTHROPIC_API_KEY"),
        (Say(body=model_info(MODEL, lifecycle="retired")), MODEL),
    ],
)
def test_what_the_owner_can_mend_is_told(check: Callable[[Wire], None], models: Say, names: str) -> None:
    """A wrong key, a retired model."""
    with Wire(models=models) as wire, pytest.raises(WrongUse, match=names):
        check(wire)


def test_an_unknown_model_is_told_also_where_models_are_not_listed(
    check: Callable[[Wire], None], desk: BookedDesk
) -> None:
    """At a server of one's own, a short question finds out."""
    with Wire(Say(status=404, body=failure("not_found_error", f"model: {MODEL}"))) as wire:
        with pytest.raises(WrongUse, match=MODEL):
            check(wire)
        wire.script = [Say(body=message('{"there": true}'))]
        check(wire)
    assert [begun.purpose for begun in desk.begun.values()] == ["check", "check"]


def test_an_address_with_the_version_in_it_is_told(
    provider: AnthropicProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be asked for /v1/v1/messages."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(WrongUse, match="ANTHROPIC_BASE_URL"):
        provider.check(BookedDesk())


@pytest.mark.parametrize(
    "address", ["localhost:9101", "localhost:9101/v1", "//host", "http://", "http://a:b", "http://["]
)
def test_what_is_no_address_is_told(provider: AnthropicProvider, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The scheme is easily left out, and what it says then is no outage."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", address)
    with pytest.raises(WrongUse, match="ANTHROPIC_BASE_URL"):
        provider.check(BookedDesk())


@pytest.mark.parametrize(
    "models",
    [
        Say(status=529),
        Say(status=429),
        Say(body=b"<html>"),
        Say(body=b"{}"),
        Say(status=403, body="<html>Sign in</html>"),
        Say(status=407, body="<html>"),
    ],
)
def test_a_provider_in_trouble_is_no_reason_not_to_start(check: Callable[[Wire], None], models: Say) -> None:
    """`AskFailed`, not `WrongUse`: it is tried again later."""
    with Wire(models=models) as wire, pytest.raises(AskFailed) as caught:
        check(wire)
    assert not caught.value.is_permanent


@pytest.mark.parametrize("address", [None, "", " "])
def test_without_an_address_it_is_anthropic(
    provider: AnthropicProvider, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """Also where the variable is set to nothing."""
    if address is not None:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", address)
    with provider._client(Line(), 1.0) as client:
        assert client.base_url.host == "api.anthropic.com"


def test_proxies_of_the_environment_are_used(
    provider: AnthropicProvider, desk: BookedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the SDK does; the deadline holds through them."""
    with Wire(Say(body=message("{}")), Say(hangs=True)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://model.example")
        assert provider.ask(QUESTION, desk, deadline_seconds=A_HANG_SECONDS).text == "{}"
        assert proxy.posts[0].path == "http://model.example/v1/messages"
        with pytest.raises(AskFailed):
            provider.ask(QUESTION, desk, deadline_seconds=0.3)
