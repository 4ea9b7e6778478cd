"""Anthropic's models over the official SDK: structured output, a prompt cache that outlives a trial, retries off."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import anthropic
from anthropic.types import MessageParam, ToolChoiceToolParam

from agent.asking import Answer, AskFailed, Question, Trouble
from agent.calling import (
    OVERHEAD_TOKENS,
    Caller,
    Tier,
    TurnedAway,
    counted,
    items,
    most_tokens,
    parse,
    system_of,
    tell,
    unbounded,
)
from agent.line import Line, disconnected, refuse_address, timeout
from agent.troubles import clean
from harness.errors import SpendingCapReached, WrongUse
from harness.terms import Desk, Usage

KEY = "ANTHROPIC_API_KEY"
ADDRESS = "ANTHROPIC_BASE_URL"
ANTHROPIC = "https://api.anthropic.com"
CHECK_SECONDS = 30.0
"""For one look at the start; a night must not begin late because a provider hangs."""
LONGEST_DATE = 100
"""Characters that are shown of what should be one."""
CACHE_TTL = "1h"
"""How long the provider keeps the system prompt: trials outlive the other choice, five minutes."""

_HELLO = Question(
    purpose="check",
    system="You are asked whether you are there.",
    text='Answer {"there": true}.',
    name="presence",
    schema={
        "type": "object",
        "properties": {"there": {"type": "boolean"}},
        "required": ["there"],
        "additionalProperties": False,
    },
    most_output_tokens=2_048,  # models that always think do so here too
)


class AnthropicProvider:
    """A `Provider` on the Messages API. Reads key and address from the environment as the SDK does."""

    name = "anthropic"

    def __init__(self, model: str) -> None:
        self.model = model
        self._caller = Caller(self.name, model)
        self._tier = Tier.SCHEMA

    # --- the protocol ----------------------------------------------------------------------------------------

    def check(self, desk: Desk) -> None:
        """Look whether key and model are there, at no cost where the list of models can tell."""
        with self._client(Line(), CHECK_SECONDS) as client:
            address = client.base_url
        if address.path.rstrip("/").endswith("/v1"):
            raise WrongUse(f"{ADDRESS} must not end in /v1, which is added to it: {clean(str(address))}")
        try:
            known = self._caller.look(self._retrieve, CHECK_SECONDS)
        except AskFailed as failed:
            is_unlisted = isinstance(failed, TurnedAway) and failed.status in (404, 405, 501)
            if not is_unlisted or address.host == "api.anthropic.com":
                tell(failed, self.model, KEY)
            self._ask_whether_it_is_there(desk)  # not every server that speaks the protocol lists its models
            return
        if known.get("lifecycle") == "retired":
            raise WrongUse(f"the language model {self.model!r} is retired. Name another one with --llm")
        if known.get("lifecycle") == "deprecated":
            retires = clean(str(known.get("retires_at") or "soon"), most=LONGEST_DATE)
            desk.event("model_deprecated", f"{self.model} is deprecated and retires {retires}")
        capabilities = known.get("capabilities")
        structured = capabilities.get("structured_outputs") if isinstance(capabilities, Mapping) else None
        if isinstance(structured, Mapping) and structured.get("supported") is False:
            self._tier = Tier.TOOL

    def ask(self, question: Question, desk: Desk, *, deadline_seconds: float) -> Answer:
        """Send one question; where the model does not take the form, again in a looser one that is remembered."""
        end = time.monotonic() + deadline_seconds
        while True:
            try:
                return self._ask(question, desk, end - time.monotonic())
            except TurnedAway as failed:
                looser = self._tier.next
                if not failed.is_about_form or looser is None:
                    raise
                desk.event("model_form", f"{self.model} does not take the form {self._tier}: {failed}")
                self._tier = looser

    def close(self) -> None:
        """Let go of the connection, a running call's included."""
        self._caller.close()

    # --- requests --------------------------------------------------------------------------------------------

    def _client(self, line: Line, deadline_seconds: float) -> anthropic.Anthropic:
        key = os.environ.get(KEY)
        if key is not None and (key != key.strip() or not key.isascii() or not key.isprintable()):
            raise WrongUse(f"{KEY} holds a blank, a line break or a character that no key has: set it anew")
        refuse_address(ADDRESS)
        try:
            client = anthropic.Anthropic(
                # None: the SDK looks for itself; a variable that is set to nothing would be an address of nothing
                base_url=ANTHROPIC if os.environ.get(ADDRESS, ANTHROPIC).strip() == "" else None,
                max_retries=0,
                timeout=timeout(deadline_seconds),
                http_client=anthropic.DefaultHttpxClient(event_hooks=line.hooks, follow_redirects=False),
            )
        except (ImportError, ValueError, anthropic.AnthropicError) as error:  # a proxy or a profile of the environment
            raise WrongUse(f"{clean(str(error))} Mend it, or set {KEY} in the environment") from error
        if client.api_key is None and client.auth_token is None and client.credentials is None:
            client.close()
            raise WrongUse(f"no key for {self.model!r}: set {KEY} in the environment")
        return client

    def _retrieve(self, line: Line) -> Mapping[str, Any]:
        return parse(self._send(line, CHECK_SECONDS, None).decode("utf-8", "replace"))

    def _ask_whether_it_is_there(self, desk: Desk) -> None:
        try:
            self.ask(_HELLO, desk, deadline_seconds=CHECK_SECONDS)
        except SpendingCapReached as error:
            raise AskFailed(Trouble.SPENDING_LIMIT, str(error)) from error
        except AskFailed as failed:
            if failed.trouble not in (Trouble.CUT_OFF, Trouble.REFUSED):  # it is there all the same
                tell(failed, self.model, KEY)

    def _ask(self, question: Question, desk: Desk, deadline_seconds: float) -> Answer:
        system = system_of(question, self._tier)
        schema = json.dumps(question.schema)
        most = Usage(
            input_tokens=most_tokens(question.text) + OVERHEAD_TOKENS,
            cache_write_tokens=most_tokens(system) + most_tokens(schema),
            output_tokens=question.most_output_tokens,
        )
        request = _request(question, system, self._tier)
        return self._caller.ask(
            question,
            most,
            desk,
            deadline_seconds,
            send=lambda line: self._send(line, deadline_seconds, request),
            usage_of=_usage,
            text_of=_text,
        )

    def _send(self, line: Line, deadline_seconds: float, request: dict[str, Any] | None) -> bytes:
        """Send a message, or ask about the model; return the body as it came: what parses it books it first."""
        try:
            with self._client(line, deadline_seconds) as client:
                if request is None:
                    return client.models.with_raw_response.retrieve(self.model).http_response.content
                return client.messages.with_raw_response.create(model=self.model, **request).http_response.content
        except anthropic.APIStatusError as error:
            raise TurnedAway(error.status_code, error.response.headers, error.body) from error
        except anthropic.APIConnectionError as error:
            raise disconnected(error.__cause__) from error
        except anthropic.AnthropicError as error:  # a profile or an identity that gives no token
            raise AskFailed(Trouble.NOT_ALLOWED, clean(str(error))) from error
        except WrongUse as error:  # the key went away since the check
            raise AskFailed(Trouble.NOT_ALLOWED, str(error)) from error


def _request(question: Question, system: str, tier: Tier) -> dict[str, Any]:
    message: MessageParam = {"role": "user", "content": question.text}
    cache = {"type": "ephemeral", "ttl": CACHE_TTL}
    request: dict[str, Any] = {
        "max_tokens": question.most_output_tokens,
        "messages": [message],
        "system": [{"type": "text", "text": system, "cache_control": cache}],
    }
    match tier:
        case Tier.SCHEMA:
            request["output_config"] = {"format": {"type": "json_schema", "schema": unbounded(question.schema)}}
        case Tier.TOOL:
            choice: ToolChoiceToolParam = {"type": "tool", "name": question.name, "disable_parallel_tool_use": True}
            request["tool_choice"] = choice
            request["tools"] = [
                {
                    "name": question.name,
                    "description": "Takes the answer.",
                    "input_schema": unbounded(question.schema),
                    "strict": True,
                }
            ]
        case Tier.TEXT:
            pass
    return request


# --- answers -----------------------------------------------------------------------------------------------------


def _usage(message: Mapping[str, Any]) -> Usage | None:
    table = message.get("usage")
    input_tokens, output_tokens = counted(table, "input_tokens"), counted(table, "output_tokens")
    if not isinstance(table, Mapping) or input_tokens is None or output_tokens is None:
        return None
    return Usage(
        input_tokens=input_tokens,
        cache_read_tokens=counted(table, "cache_read_input_tokens") or 0,
        cache_write_tokens=counted(table, "cache_creation_input_tokens") or 0,
        output_tokens=output_tokens,
        reasoning_tokens=counted(table.get("output_tokens_details"), "thinking_tokens") or 0,
    )


def _text(message: Mapping[str, Any]) -> str:
    match message.get("stop_reason"):
        case "refusal":
            details = message.get("stop_details")
            details = details if isinstance(details, Mapping) else {}
            why = details.get("explanation") or "no reason given"
            category = details.get("category") or "none named"
            raise AskFailed(Trouble.REFUSED, clean(f"the model declined (category {category}): {why}"))
        case "max_tokens":
            raise AskFailed(Trouble.CUT_OFF, "the answer reached its most output tokens")
        case "model_context_window_exceeded":
            raise AskFailed(Trouble.TOO_LONG, "briefing and answer do not fit the model's context window")
        case _:
            pass
    blocks = items(message.get("content"))
    for block in blocks:
        if block.get("type") == "tool_use":
            return json.dumps(block.get("input"))
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))
