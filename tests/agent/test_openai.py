from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from agent.asking import Answer, AskFailed, Question, Trouble
from agent.openai import OpenAIProvider, _is_own
from agent.providers import provider_of
from harness.errors import WrongUse
from harness.terms import Usage
from tests.agent.wire import BookedDesk, Say, Wire, called, closed_port, completion, response, wrong

KEY = "sk-proj-Zq9_secret-0123456789abcdef"
MODEL = "qwen3:8b"
QUESTION = Question(
    purpose="proposals",
    system="You tune.",
    text="What next?",
    name="answer",
    schema={"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    most_output_tokens=500,
)
FORM = '{"colour": "green", "count": 3}'
A_HANG_SECONDS = 30.0

Ask = Callable[..., Answer]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("OPENAI_"):
            monkeypatch.delenv(name)


@pytest.fixture
def desk() -> BookedDesk:
    return BookedDesk()


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wire], OpenAIProvider]:
    """Make a provider at a server of the owner's own."""

    def made(wire: Wire) -> OpenAIProvider:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{wire.address}/v1")
        return OpenAIProvider(MODEL)

    return made


@pytest.fixture
def ask(local: Callable[[Wire], OpenAIProvider], desk: BookedDesk) -> Ask:
    def asked(wire: Wire, deadline_seconds: float = A_HANG_SECONDS) -> Answer:
        return local(wire).ask(QUESTION, desk, deadline_seconds=deadline_seconds)

    return asked


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wire], OpenAIProvider]:
    """Make a provider at OpenAI itself, which a proxy on the loopback plays: the address decides the protocol."""

    def made(wire: Wire) -> OpenAIProvider:
        monkeypatch.setenv("OPENAI_BASE_URL", "http://api.openai.com/v1")
        monkeypatch.setenv("HTTP_PROXY", wire.address)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        return OpenAIProvider("gpt-test-1")

    return made


@pytest.fixture
def fails(ask: Ask) -> Callable[..., AskFailed]:
    def failed(*script: Say, deadline_seconds: float = A_HANG_SECONDS) -> AskFailed:
        with Wire(*script) as wire, pytest.raises(AskFailed) as caught:
            ask(wire, deadline_seconds)
        return caught.value

    return failed


# --- an answer ---------------------------------------------------------------------------------------------------


def test_a_local_server_is_asked_by_chat_and_needs_no_key(ask: Ask, desk: BookedDesk) -> None:
    """Cached tokens are no input tokens of ours, reasoning is part of the output."""
    with Wire(Say(body=completion('{"a": 1}'))) as wire:
        answer = ask(wire)
    assert answer.text == '{"a": 1}'
    usage = Usage(input_tokens=30, cache_read_tokens=60, cache_write_tokens=10, output_tokens=20, reasoning_tokens=8)
    assert answer.usage == usage == desk.last.usage
    [post] = wire.posts
    assert post.path == "/v1/chat/completions"
    assert post.body["model"] == MODEL
    assert [message["role"] for message in post.body["messages"]] == ["system", "user"]
    form = post.body["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"] == {"name": "answer", "schema": QUESTION.schema, "strict": True}
    assert post.body["max_tokens"] == 500
    assert "prompt_cache_key" not in post.body


def test_openai_itself_is_asked_by_responses(real: Callable[[Wire], OpenAIProvider], desk: BookedDesk) -> None:
    """Stored nowhere, cached under a key of the study's own."""
    with Wire(Say(body=response({"type": "output_text", "text": '{"a": 1}', "annotations": []}))) as wire:
        answer = real(wire).ask(QUESTION, desk, deadline_seconds=A_HANG_SECONDS)
    assert answer.text == '{"a": 1}'
    assert answer.usage == Usage(input_tokens=40, cache_read_tokens=60, output_tokens=20, reasoning_tokens=8)
    [post] = wire.posts
    assert post.path.endswith("/v1/responses")
    assert post.body["store"] is False
    assert post.body["prompt_cache_key"].startswith("overnight-")
    assert post.body["text"]["format"]["strict"] is True
    assert post.body["max_output_tokens"] == 500
    assert KEY in post.headers["authorization"]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 3}, {"prompt_tokens": "3", "completion_tokens": 1}, 4])
def test_servers_that_tell_no_usage(ask: Ask, usage: Any) -> None:
    """None, so that the worst case is booked; never zero."""
    with Wire(Say(body=completion("{}", usage=usage))) as wire:
        assert ask(wire).usage is None


def test_more_cached_than_there_was(ask: Ask) -> None:
    """Counts that contradict each other do not go below zero."""
    counts = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}
    with Wire(Say(body=completion("{}", usage=counts))) as wire:
        answer = ask(wire)
    assert answer.usage == Usage(input_tokens=0, cache_read_tokens=5, output_tokens=1)


def test_a_prompt_that_was_cut_is_told_once(local: Callable[[Wire], OpenAIProvider], desk: BookedDesk) -> None:
    """Ollama cuts at its own context without a word; its count gives it away."""
    long = dataclasses.replace(QUESTION, text="word " * 10_000)
    with Wire(Say(body=completion("{}", usage={"prompt_tokens": 4_096, "completion_tokens": 1}))) as wire:
        provider = local(wire)
        provider.ask(QUESTION, desk, deadline_seconds=A_HANG_SECONDS)
        assert desk.events == []
        for _ in range(2):
            provider.ask(long, desk, deadline_seconds=A_HANG_SECONDS)
    assert [kind for kind, _ in desk.events] == ["prompt_cut"]


def test_content_in_parts(ask: Ask) -> None:
    """As some gateways send it."""
    parts = [{"type": "text", "text": '{"a"'}, {"type": "text", "text": ": 1}"}]
    with Wire(Say(body=completion(None) | {"choices": [{"message": {"content": parts}}]})) as wire:
        assert ask(wire).text == '{"a": 1}'


# --- what a server can do ----------------------------------------------------------------------------------------


def test_the_probe_settles_on_the_strictest_form_that_is_kept(
    local: Callable[[Wire], OpenAIProvider], desk: BookedDesk
) -> None:
    """A schema that is not taken, a tool that is not called, JSON in text: remembered for the questions."""
    script = [
        Say(status=400, body=wrong('Either "json_schema" or "grammar" can be specified, but not both')),
        Say(body=completion("Green, and three of them.")),
        Say(body=completion(f"```json\n{FORM}\n```")),
        Say(body=completion('{"a": 1}')),
    ]
    with Wire(*script) as wire:
        provider = local(wire)
        provider.check(desk)
        assert provider.ask(QUESTION, desk, deadline_seconds=A_HANG_SECONDS).text == '{"a": 1}'
    schema, tool, text, question = wire.posts
    assert "response_format" in schema.body
    assert tool.body["tools"][0]["function"]["strict"] is True
    for post in (text, question):
        assert "tools" not in post.body
        assert "response_format" not in post.body
    assert json.dumps(QUESTION.schema) in question.body["messages"][0]["content"]
    assert [begun.purpose for begun in desk.begun.values()] == ["probe", "probe", "probe", "proposals"]
    assert len(desk.events) == 2


def test_a_server_that_keeps_to_the_schema_is_probed_once(
    local: Callable[[Wire], OpenAIProvider], desk: BookedDesk
) -> None:
    """One toy question, booked as such."""
    with Wire(Say(body=completion(FORM))) as wire:
        local(wire).check(desk)
    assert len(wire.posts) == 1
    assert desk.events == []


@pytest.mark.parametrize(
    "body",
    [
        completion("", finish_reason="length"),
        completion("", finish_reason="content_filter"),
        completion(None, refusal="no"),
    ],
)
def test_what_comes_of_a_toy_question_does_not_matter(
    local: Callable[[Wire], OpenAIProvider], desk: BookedDesk, body: Any
) -> None:
    """The form was taken."""
    with Wire(Say(body=body)) as wire:
        local(wire).check(desk)
    assert len(wire.posts) == 1


def test_a_form_that_is_refused_later_is_stepped_down_from(ask: Ask, desk: BookedDesk) -> None:
    """Within the same question, as after a restart of the server with other options."""
    with Wire(Say(status=400, body=wrong("response_format is not supported")), Say(body=called('{"a": 1}'))) as wire:
        assert ask(wire).text == '{"a": 1}'
    assert [ended.sent for ended in desk.ended.values()] == [False, True]


@pytest.mark.parametrize("status", [500, 501])
def test_a_form_may_be_refused_as_an_error_of_the_server(
    local: Callable[[Wire], OpenAIProvider], desk: BookedDesk, status: int
) -> None:
    """llama-cpp-python's server says "Internal Server Error" to a response_format that it does not know."""
    text = (
        "1 validation error:\n  {'type': 'literal_error', 'loc': ('body', 'response_format', 'type'),"
        " 'msg': \"Input should be 'text' or 'json_object'\", 'input': 'json_schema'}"
    )
    with Wire(Say(status=status, body=wrong(text, kind="internal_server_error")), Say(body=called(FORM))) as wire:
        provider = local(wire)
        provider.check(desk)
        assert provider.ask(QUESTION, desk, deadline_seconds=A_HANG_SECONDS).text == FORM
    assert ["tools" in post.body for post in wire.posts] == [False, True, True]


BOUNDED = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}}


def test_bounds_are_left_out_for_a_server_that_does_not_take_them(
    local: Callable[[Wire], OpenAIProvider], desk: BookedDesk
) -> None:
    """A gateway to OpenAI, say: the schema stays strict, and later questions come without them at once."""
    question = dataclasses.replace(QUESTION, schema=BOUNDED)
    refusal = wrong("Invalid schema for response_format 'answer': 'maxItems' is not permitted")
    with Wire(Say(status=400, body=refusal), Say(body=completion('{"a": []}'))) as wire:
        provider = local(wire)
        for _ in range(2):
            provider.ask(question, desk, deadline_seconds=A_HANG_SECONDS)
    sent = [post.body["response_format"]["json_schema"]["schema"]["properties"]["a"] for post in wire.posts]
    assert ["maxItems" in each for each in sent] == [True, False, False]


def test_openai_itself_is_sent_no_bounds(real: Callable[[Wire], OpenAIProvider], desk: BookedDesk) -> None:
    """Its strict mode turns the schema away for those that it does not know."""
    with Wire(Say(body=response({"type": "output_text", "text": "{}"}))) as wire:
        question = dataclasses.replace(QUESTION, schema=BOUNDED)
        real(wire).ask(question, desk, deadline_seconds=A_HANG_SECONDS)
    assert "maxItems" not in json.dumps(wire.posts[0].body)


def test_the_new_name_of_the_limit(ask: Ask) -> None:
    """Reasoning models behind gateways turn the old one away."""
    text = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    with Wire(Say(status=400, body=wrong(text, code="unsupported_parameter")), Say(body=completion("{}"))) as wire:
        ask(wire)
    assert "max_tokens" not in wire.posts[1].body
    assert wire.posts[1].body["max_completion_tokens"] == 500
    assert "response_format" in wire.posts[1].body


def test_a_server_without_chat_is_asked_by_responses(local: Callable[[Wire], OpenAIProvider], desk: BookedDesk) -> None:
    """Some models have nothing else."""
    answer = Say(body=response({"type": "output_text", "text": FORM}))
    with Wire(Say(status=404, body="404 page not found"), answer) as wire:
        provider = local(wire)
        provider.check(desk)
        assert provider.ask(QUESTION, desk, deadline_seconds=A_HANG_SECONDS).text == FORM
    assert [post.path for post in wire.posts] == ["/v1/chat/completions", "/v1/responses", "/v1/responses"]


# --- troubles ----------------------------------------------------------------------------------------------------

CLASSES = [
    (401, wrong("Incorrect API key provided", code="invalid_api_key"), Trouble.NOT_ALLOWED),
    (403, wrong("Country not supported", code="unsupported_country_region_territory"), Trouble.NOT_ALLOWED),
    (403, wrong("Project does not have access to model", code="model_not_found"), Trouble.NO_SUCH_MODEL),
    (404, wrong(f"model '{MODEL}' not found, try pulling it first"), Trouble.NO_SUCH_MODEL),
    (
        429,
        wrong("You exceeded your quota", code="insufficient_quota", kind="insufficient_quota"),
        Trouble.SPENDING_LIMIT,
    ),
    (429, wrong("Slow. See account/billing for more", code="rate_limit_exceeded"), Trouble.RATE_LIMITED),
    (402, wrong("Insufficient credits"), Trouble.SPENDING_LIMIT),
    (500, wrong("oops", kind="server_error"), Trouble.OVERLOADED),
    (503, wrong("Loading model", kind="unavailable_error"), Trouble.OVERLOADED),
    (400, wrong("maximum context length is 8192 tokens", code="context_length_exceeded"), Trouble.TOO_LONG),
    (400, wrong("the request exceeds the available context size", kind="exceed_context_size_error"), Trouble.TOO_LONG),
    (400, wrong("filtered by the policy", code="content_filter"), Trouble.FILTERED),
    (400, wrong("flagged", code="invalid_prompt"), Trouble.REFUSED),
    (400, wrong("no such parameter", code="unknown_parameter"), Trouble.BAD_REQUEST),
    (422, {"detail": [{"msg": "field required"}]}, Trouble.BAD_REQUEST),
]


@pytest.mark.parametrize(("status", "body", "trouble"), CLASSES)
def test_statuses(fails: Callable[..., AskFailed], desk: BookedDesk, status: int, body: Any, trouble: Trouble) -> None:
    """Each has its class, is asked once, and is booked with it."""
    failed = fails(Say(status=status, body=body))
    assert failed.trouble is trouble
    assert desk.last.trouble == trouble
    assert len(desk.begun) == 1
    assert not desk.last.sent


def test_retry_after(fails: Callable[..., AskFailed]) -> None:
    """Eight hours are told, not slept."""
    assert fails(Say(status=429, headers={"retry-after": "28800"})).retry_after_seconds == 28_800


@pytest.mark.parametrize(
    ("body", "trouble"),
    [
        (b"<html>Sign in</html>", Trouble.GARBAGE),
        (b"{}", Trouble.GARBAGE),
        (b'{"choices": [{"mess', Trouble.GARBAGE),
        (completion("{}") | {"choices": None}, Trouble.GARBAGE),
        (completion("{}") | {"choices": [{}]}, Trouble.GARBAGE),
        (completion(None), Trouble.GARBAGE),
        (completion('{"a"', finish_reason="length"), Trouble.CUT_OFF),
        (completion(None, finish_reason="content_filter"), Trouble.FILTERED),
        (completion(None, refusal="I would rather not."), Trouble.REFUSED),
        (wrong("no credit", code=402) | {"x": 1}, Trouble.SPENDING_LIMIT),  # type: ignore[arg-type]
        (wrong("provider is down", kind="server_error"), Trouble.OVERLOADED),
        (wrong("who knows"), Trouble.GARBAGE),
    ],
)
def test_answers_that_are_none(fails: Callable[..., AskFailed], desk: BookedDesk, body: Any, trouble: Trouble) -> None:
    """With status 200 all the same; what was billed is booked all the same."""
    assert fails(Say(body=body)).trouble is trouble
    assert (desk.last.usage is not None) == (isinstance(body, dict) and "usage" in body)


INCOMPLETE = {"status": "incomplete"}


@pytest.mark.parametrize(
    ("body", "trouble"),
    [
        (response(**INCOMPLETE, incomplete_details={"reason": "max_output_tokens"}), Trouble.CUT_OFF),
        (response(**INCOMPLETE, incomplete_details={"reason": "content_filter"}), Trouble.FILTERED),
        (response(**INCOMPLETE), Trouble.GARBAGE),
        (response({"type": "refusal", "refusal": "no"}), Trouble.REFUSED),
        (response(), Trouble.GARBAGE),
        (response(status="failed", error={"code": "server_error", "message": "x"}), Trouble.OVERLOADED),
        (response(status="failed", error={"code": "rate_limit_exceeded", "message": "x"}), Trouble.RATE_LIMITED),
        (response(status="failed", error={"code": "invalid_prompt", "message": "x"}), Trouble.REFUSED),
        (response(status="failed", error={"code": "bio_policy", "message": "x"}), Trouble.REFUSED),
    ],
)
def test_responses_that_are_none(
    real: Callable[[Wire], OpenAIProvider], desk: BookedDesk, body: Any, trouble: Trouble
) -> None:
    """The usage is there in each, and booked."""
    with Wire(Say(body=body)) as wire, pytest.raises(AskFailed) as caught:
        real(wire).ask(QUESTION, desk, deadline_seconds=A_HANG_SECONDS)
    assert caught.value.trouble is trouble
    assert desk.last.usage is not None


@pytest.mark.parametrize("say", [Say(hangs=True), Say(body=completion("x" * 5_000), drips_seconds=0.05)])
def test_hanging_and_dripping_end_at_the_deadline(fails: Callable[..., AskFailed], desk: BookedDesk, say: Say) -> None:
    """By the wall clock."""
    assert fails(say, deadline_seconds=0.4).trouble is Trouble.TIMED_OUT
    assert desk.last.usage is None
    assert desk.last.sent


def test_nobody_listens(desk: BookedDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the check too: the search starts without the model."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{closed_port()}/v1")
    with pytest.raises(AskFailed) as caught:
        OpenAIProvider(MODEL).check(desk)
    assert caught.value.trouble is Trouble.UNREACHABLE
    assert not desk.last.sent


# --- keys and addresses --------------------------------------------------------------------------------------------


def test_no_text_holds_a_key(
    fails: Callable[..., AskFailed], desk: BookedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a server echoes, whole or starred."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    failed = fails(Say(status=401, body=wrong(f"Incorrect API key provided: {KEY}, sk-proj-********cdef")))
    for text in (str(failed), desk.texts):
        assert KEY not in text
        assert "cdef" not in text


@pytest.mark.parametrize("address", [None, "", "https://api.openai.com/v1", "https://eu.api.openai.com/v1"])
def test_a_missing_key_is_told(desk: BookedDesk, monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    """OpenAI itself takes nobody without one."""
    if address is not None:
        monkeypatch.setenv("OPENAI_BASE_URL", address)
    with pytest.raises(WrongUse, match="OPENAI_API_KEY"):
        OpenAIProvider("gpt-test-1").check(desk)
    assert desk.begun == {}


@pytest.mark.parametrize(
    "address", ["localhost:9101/v1", "api.openai.com/v1", "http://:80/v1", "http://a:b", "http://["]
)
def test_what_is_no_address_is_told(desk: BookedDesk, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The scheme is easily left out, and what it says then is no outage."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", address)
    with pytest.raises(WrongUse, match="OPENAI_BASE_URL"):
        OpenAIProvider(MODEL).check(desk)


def test_a_page_of_somebody_between_is_no_reason_not_to_start(
    local: Callable[[Wire], OpenAIProvider], desk: BookedDesk
) -> None:
    """A web server before the model's answers while that one starts."""
    with Wire(Say(status=404, body="<html>nginx</html>")) as wire, pytest.raises(AskFailed) as caught:
        local(wire).check(desk)
    assert caught.value.trouble is Trouble.UNREACHABLE
    assert "between here and the provider" in str(caught.value)


def test_only_openai_is_openai() -> None:
    """A look-alike is a server of somebody else's own."""
    assert not _is_own(None)
    assert not _is_own("https://us.api.openai.com/v1")
    assert _is_own("https://api.openai.com.example/v1")
    assert _is_own("http://localhost:11434/v1")
    assert _is_own("https://notopenai.com/v1")


@pytest.mark.parametrize(
    ("say", "names"),
    [
        (Say(status=404, body=wrong(f"The model '{MODEL}' does not exist", code="model_not_found")), MODEL),
        (Say(status=401, body=wrong("Incorrect API key", code="invalid_api_key")), "OPENAI_API_KEY"),
    ],
)
def test_what_the_owner_can_mend_is_told(
    local: Callable[[Wire], OpenAIProvider], desk: BookedDesk, say: Say, names: str
) -> None:
    """An unknown model, a wrong key."""
    with Wire(say) as wire, pytest.raises(WrongUse, match=names):
        local(wire).check(desk)


def test_a_cap_that_is_reached_is_no_reason_not_to_start(local: Callable[[Wire], OpenAIProvider]) -> None:
    """The probe cannot be paid; the search goes on without the model."""
    with Wire(Say()) as wire, pytest.raises(AskFailed) as caught:
        local(wire).check(BookedDesk(is_capped=True))
    assert caught.value.trouble is Trouble.SPENDING_LIMIT
    assert wire.seen == []


@pytest.mark.parametrize(
    ("llm", "name", "model"),
    [
        ("anthropic:claude-opus-5-5", "anthropic", "claude-opus-5-5"),
        ("claude-opus-5-5", "anthropic", "claude-opus-5-5"),
        ("openai:claude-like:7b", "openai", "claude-like:7b"),
        ("openai:gpt-5.5", "openai", "gpt-5.5"),
        ("qwen3:8b", "openai", "qwen3:8b"),
        ("hf.co/org/model:Q4", "openai", "hf.co/org/model:Q4"),
    ],
)
def test_which_provider_a_model_has(llm: str, name: str, model: str) -> None:
    """Two prefixes and no others: the ids of local models hold colons."""
    made = provider_of(llm)
    assert (made.name, made.model) == (name, model)
    made.close()


@pytest.mark.parametrize("llm", ["", " ", "openai:", "anthropic: "])
def test_no_model_is_no_provider(llm: str) -> None:
    """There is no default."""
    with pytest.raises(WrongUse, match="--llm"):
        provider_of(llm)


def test_the_sdks_are_loaded_only_when_one_is_used() -> None:
    """They take seconds, and a night without a model needs neither."""
    code = "import agent.providers, agent.reply, sys; print({'anthropic', 'openai', 'httpx2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
