"""OpenAI's models, and every server that speaks their protocol, over the official SDK with its retries off.

OpenAI itself is asked through the Responses API; behind a base URL of the owner's own (vLLM, llama.cpp, Ollama, a
gateway) chat completions come first, which all of them have. What such a server makes of a schema only a try can tell.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
import urllib.parse
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import openai

from agent.asking import Answer, AskFailed, Question, Trouble
from agent.calling import (
    OVERHEAD_TOKENS,
    Caller,
    Tier,
    TurnedAway,
    counted,
    items,
    most_tokens,
    system_of,
    tell,
    unbounded,
)
from agent.line import Line, disconnected, refuse_address, timeout
from agent.troubles import clean, said
from harness.errors import SpendingCapReached, WrongUse
from harness.terms import Desk, Usage

KEY = "OPENAI_API_KEY"
ADDRESS = "OPENAI_BASE_URL"
OPENAI = "https://api.openai.com/v1"
NO_KEY = "none"
"""Stands for a key at a server of the owner's own; the SDK wants some text."""
MOST_BYTES_PER_TOKEN = 10
"""Of our prompts under any tokenizer; a server that counts fewer tokens than that did not read the whole prompt."""
PROBE_SECONDS = 60.0
"""For each tier that is tried; a local server may have to load the model first."""

_PROBE = Question(
    purpose="probe",
    system="You fill in forms.",
    text='Fill in "colour" with "green" and "count" with 3, as one JSON object.',
    name="form",
    schema={
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["green", "red"]}, "count": {"type": "integer"}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    },
    most_output_tokens=2_048,  # models that think first do so here too
)


class Api(StrEnum):
    """Which of the two ways to ask."""

    RESPONSES = "responses"
    CHAT = "chat"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a question is put so that this server takes it."""

    api: Api
    tier: Tier = Tier.SCHEMA
    limit: str = "max_tokens"
    """Chat's name for the most output tokens: the old one, which every server knows, until it is turned away."""
    is_bounded: bool = False
    """Whether the schema keeps its bounds. Local servers write under a grammar made of it: without them a small model
    fills a list until its context is full. OpenAI's strict mode turns some of them away."""

    def looser(self, failed: TurnedAway, question: Question) -> Form | None:
        """Return the form to try after this one was turned away, or None if the form was not the reason."""
        if self.limit == "max_tokens" and "max_completion_tokens" in said(failed.body)[2]:
            return dataclasses.replace(self, limit="max_completion_tokens")
        if not failed.is_about_form:
            return None
        if self.is_bounded and unbounded(question.schema) != question.schema:
            return dataclasses.replace(self, is_bounded=False)
        tier = self.tier.next
        return dataclasses.replace(self, tier=tier) if tier is not None else None

    def schema_of(self, question: Question) -> Mapping[str, Any]:
        """Return the schema as it is sent."""
        return question.schema if self.is_bounded else unbounded(question.schema)


CHAT = Form(api=Api.CHAT, is_bounded=True)
RESPONSES = Form(api=Api.RESPONSES)


class OpenAIProvider:
    """A `Provider` on the Responses API or on chat completions. Reads key and address from the environment."""

    name = "openai"

    def __init__(self, model: str) -> None:
        self.model = model
        self._caller = Caller(self.name, model)
        self._form = CHAT if _is_own(_address()) else RESPONSES
        self._is_cut_told = False

    # --- the protocol ----------------------------------------------------------------------------------------

    def check(self, desk: Desk) -> None:
        """Try which form the server keeps to, with a toy question: strict schema, then tool call, then text."""
        self._client(Line(), PROBE_SECONDS).close()
        try:
            self._probe(desk)
        except SpendingCapReached as error:
            raise AskFailed(Trouble.SPENDING_LIMIT, str(error)) from error
        except AskFailed as failed:
            tell(failed, self.model, KEY)

    def ask(self, question: Question, desk: Desk, *, deadline_seconds: float) -> Answer:
        """Send one question; where the server does not take the form, again in a looser one that is remembered."""
        end = time.monotonic() + deadline_seconds
        while True:
            try:
                return self._ask(question, desk, end - time.monotonic())
            except TurnedAway as failed:
                looser = self._form.looser(failed, question)
                if looser is None:
                    raise
                desk.event("model_form", f"{self.model} does not take the form {self._form.tier}: {failed}")
                self._form = looser

    def close(self) -> None:
        """Let go of the connection, a running call's included."""
        self._caller.close()

    # --- what the server can do ------------------------------------------------------------------------------

    def _probe(self, desk: Desk) -> None:
        try:
            self._probe_tiers(desk)
        except TurnedAway as failed:
            if failed.status not in (404, 405, 501) or self._form.api is Api.RESPONSES:
                raise
            self._form = RESPONSES  # some models and servers have nothing else
            try:
                self._probe_tiers(desk)
            except AskFailed:
                self._form = CHAT
                raise failed from None

    def _probe_tiers(self, desk: Desk) -> None:
        """Settle on the strictest tier whose answer fits; `AskFailed` if the server answers in none."""
        while True:
            try:
                answer = self.ask(_PROBE, desk, deadline_seconds=PROBE_SECONDS)
            except AskFailed as failed:
                if failed.trouble in (Trouble.CUT_OFF, Trouble.REFUSED, Trouble.FILTERED):
                    return  # the form was taken; what came of a toy question says nothing about a real one
                raise
            looser = self._form.tier.next
            if looser is None or _fits(answer.text):
                return
            desk.event("model_form", f"{self.model} takes the form {self._form.tier} and does not keep to it")
            self._form = dataclasses.replace(self._form, tier=looser)

    # --- requests --------------------------------------------------------------------------------------------

    def _client(self, line: Line, deadline_seconds: float) -> openai.OpenAI:
        key = os.environ.get(KEY) or (NO_KEY if _is_own(_address()) else None)
        if key is None:
            raise WrongUse(f"no key for {self.model!r}: set {KEY}, or {ADDRESS} for a server of your own")
        if key != key.strip() or not key.isascii() or not key.isprintable():
            raise WrongUse(f"{KEY} holds a blank, a line break or a character that no key has: set it anew")
        refuse_address(ADDRESS)
        try:
            return openai.OpenAI(
                api_key=key,
                base_url=_address() or OPENAI,  # a variable that is set to nothing would be an address of nothing
                max_retries=0,
                timeout=timeout(deadline_seconds),
                http_client=openai.DefaultHttpxClient(event_hooks=line.hooks, follow_redirects=False),
            )
        except (ImportError, ValueError, openai.OpenAIError) as error:  # a proxy of the environment
            raise WrongUse(
                f"no connection to {clean(_address() or OPENAI)} can be set up: {clean(str(error))}"
            ) from error

    def _ask(self, question: Question, desk: Desk, deadline_seconds: float) -> Answer:
        form = self._form
        system = system_of(question, form.tier)
        most = Usage(
            input_tokens=most_tokens(system + question.text + json.dumps(question.schema)) + OVERHEAD_TOKENS,
            output_tokens=question.most_output_tokens,
        )
        request = _chat(question, system, form) if form.api is Api.CHAT else _responses(question, system, form)
        if not _is_own(_address()):
            request["prompt_cache_key"] = _cache_key(system)
        answer = self._caller.ask(
            question,
            most,
            desk,
            deadline_seconds,
            send=lambda line: self._send(line, deadline_seconds, form.api, request),
            usage_of=_chat_usage if form.api is Api.CHAT else _responses_usage,
            text_of=_chat_text if form.api is Api.CHAT else _responses_text,
        )
        self._tell_of_a_cut_prompt(answer, most_tokens(system + question.text), desk)
        return answer

    def _tell_of_a_cut_prompt(self, answer: Answer, prompt_bytes: int, desk: Desk) -> None:
        """Say once that a server seems to have cut the prompt: Ollama does so without a word at its own ``num_ctx``."""
        if self._is_cut_told or answer.usage is None:
            return
        seen_tokens = answer.usage.tokens - answer.usage.output_tokens
        if seen_tokens * MOST_BYTES_PER_TOKEN < prompt_bytes:
            self._is_cut_told = True
            desk.event(
                "prompt_cut", f"{self.model} counted {seen_tokens} tokens of {prompt_bytes} bytes: raise its context"
            )

    def _send(self, line: Line, deadline_seconds: float, api: Api, request: dict[str, Any]) -> bytes:
        """Send a request and return the body as it came: what parses it books it first."""
        try:
            with self._client(line, deadline_seconds) as client:
                if api is Api.CHAT:
                    raw = client.chat.completions.with_raw_response.create(model=self.model, **request)
                    return raw.http_response.content
                return client.responses.with_raw_response.create(model=self.model, **request).http_response.content
        except openai.APIStatusError as error:
            raise TurnedAway(error.status_code, error.response.headers, error.body) from error
        except openai.APIConnectionError as error:
            raise disconnected(error.__cause__) from error
        except WrongUse as error:  # the key went away since the check
            raise AskFailed(Trouble.NOT_ALLOWED, str(error)) from error


def _address() -> str | None:
    return os.environ.get(ADDRESS, "").strip() or None


def _is_own(address: str | None) -> bool:
    try:
        host = urllib.parse.urlsplit(address or OPENAI).hostname or ""
    except ValueError:  # no address at all, which the check says
        return True
    return host != "openai.com" and not host.endswith(".openai.com")


def _cache_key(system: str) -> str:
    """Send the calls of one study where their common beginning is cached."""
    return f"overnight-{hashlib.sha256(system.encode('utf-8', 'replace')).hexdigest()[:16]}"


def _chat(question: Question, system: str, form: Form) -> dict[str, Any]:
    request: dict[str, Any] = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question.text}],
        form.limit: question.most_output_tokens,
    }
    schema = {"name": question.name, "schema": form.schema_of(question), "strict": True}
    match form.tier:
        case Tier.SCHEMA:
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        case Tier.TOOL:
            function = {
                "name": question.name,
                "description": "Takes the answer.",
                "parameters": form.schema_of(question),
            }
            request["tools"] = [{"type": "function", "function": {**function, "strict": True}}]
            request["tool_choice"] = {"type": "function", "function": {"name": question.name}}
        case Tier.TEXT:
            pass
    return request


def _responses(question: Question, system: str, form: Form) -> dict[str, Any]:
    request: dict[str, Any] = {
        "instructions": system,
        "input": question.text,
        "max_output_tokens": question.most_output_tokens,
        "store": False,  # the study keeps its own record; nothing of it stays there
    }
    schema = {"name": question.name, "strict": True}
    match form.tier:
        case Tier.SCHEMA:
            request["text"] = {"format": {"type": "json_schema", "schema": form.schema_of(question), **schema}}
        case Tier.TOOL:
            tool = {"type": "function", "description": "Takes the answer.", "parameters": form.schema_of(question)}
            request["tools"] = [{**tool, **schema}]
            request["tool_choice"] = {"type": "function", "name": question.name}
        case Tier.TEXT:
            pass
    return request


def _fits(text: str) -> bool:
    try:
        form = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(form, dict) and set(form) == {"colour", "count"}


# --- answers -----------------------------------------------------------------------------------------------------


def _responses_usage(response: Mapping[str, Any]) -> Usage | None:
    return _usage(response.get("usage"), "input_tokens", "output_tokens")


def _chat_usage(completion: Mapping[str, Any]) -> Usage | None:
    return _usage(completion.get("usage"), "prompt_tokens", "completion_tokens")


def _usage(table: object, inputs: str, outputs: str) -> Usage | None:
    input_tokens, output_tokens = counted(table, inputs), counted(table, outputs)
    if not isinstance(table, Mapping) or input_tokens is None or output_tokens is None:
        return None
    details = table.get(f"{inputs}_details")
    read = min(counted(details, "cached_tokens") or 0, input_tokens)
    written = min(counted(details, "cache_write_tokens") or 0, input_tokens - read)
    return Usage(
        input_tokens=input_tokens - read - written,  # they count what the cache served as input too
        cache_read_tokens=read,
        cache_write_tokens=written,
        output_tokens=output_tokens,
        reasoning_tokens=counted(table.get(f"{outputs}_details"), "reasoning_tokens") or 0,
    )


def _responses_text(response: Mapping[str, Any]) -> str:
    if response.get("status") == "incomplete":
        details = response.get("incomplete_details")
        match details.get("reason") if isinstance(details, Mapping) else None:
            case "max_output_tokens":
                raise AskFailed(Trouble.CUT_OFF, "the answer reached its most output tokens")
            case "content_filter":
                raise AskFailed(Trouble.FILTERED, "a content filter removed the answer")
            case other:
                raise AskFailed(Trouble.GARBAGE, clean(f"the answer is incomplete: {other or 'no reason given'}"))
    texts: list[str] = []
    for item in items(response.get("output")):
        if item.get("type") == "function_call":
            return str(item.get("arguments"))
        for part in items(item.get("content")) if item.get("type") == "message" else []:
            if part.get("type") == "refusal":
                raise AskFailed(Trouble.REFUSED, clean(f"the model declined: {part.get('refusal')}"))
            if isinstance(part.get("text"), str):
                texts.append(part["text"])
    return "".join(texts)


def _chat_text(completion: Mapping[str, Any]) -> str:
    choices = items(completion.get("choices"))
    message = choices[0].get("message") if choices else None
    if not isinstance(message, Mapping):
        raise AskFailed(Trouble.GARBAGE, "the answer holds no message")
    match choices[0].get("finish_reason"):
        case "length":
            raise AskFailed(Trouble.CUT_OFF, "the answer reached its most output tokens, or the server's context")
        case "content_filter":
            raise AskFailed(Trouble.FILTERED, "a content filter removed the answer")
        case _:
            pass
    if message.get("refusal"):
        raise AskFailed(Trouble.REFUSED, clean(f"the model declined: {message['refusal']}"))
    for call in items(message.get("tool_calls")):
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        return arguments if isinstance(arguments, str) else json.dumps(arguments)
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in items(content) if isinstance(part.get("text"), str))
