"""What went wrong, from what a provider said: statuses and error bodies in, a class and a clean sentence out."""

from __future__ import annotations

import datetime
import email.utils
import json
import math
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agent.asking import Trouble
from harness.records import without_control

LONGEST_TEXT = 300
"""Characters of an error that are shown."""
LONGEST_SECRET = 4_096
"""Characters, with all that JSON makes of them; no key of a provider or gateway has a third of it."""
LONGEST_RETRY_AFTER_SECONDS = 7 * 86_400.0
"""Of what a provider asks for: longer than any run, and short enough for every clock and calendar."""
SHORTEST_SECRET = 8
"""Characters. What is shorter is a placeholder for a local server, and would blot out words and digits of replies."""

_SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHAPES = (
    re.compile(r"\bsk-[\w*.-]{6,}", re.IGNORECASE),
    re.compile(r"\bBearer\s+[^\s\"',}\\]+", re.IGNORECASE),
    re.compile(r"(?<=://)[^/\s@\"]+@"),  # a proxy's user and password
)
_HIDDEN = "[key]"

_SPENDING = re.compile(r"insufficient_quota|billing_error|billing_hard_limit|billing_not_active|spend_limit")
_NO_CREDIT = "credit balance is too low"  # a plain invalid_request_error otherwise
_TOO_LONG = re.compile(
    r"prompt is too long|context[_ ](?:length|window|size)|maximum context|exceeds? the (?:available )?context"
    r"|request_too_large"
)
_FILTER = "blocked by content filtering"  # a plain invalid_request_error otherwise
_NO_MODEL = re.compile(r"model_not_found|model_not_available|does not exist or you do not have access")


_DISGUISES = (
    ("rate_limit", Trouble.RATE_LIMITED),
    ("overloaded", Trouble.OVERLOADED),
    ("server_error", Trouble.OVERLOADED),
    ("api_error", Trouble.OVERLOADED),
    ("content_filter", Trouble.FILTERED),
    ("policy", Trouble.REFUSED),
    ("invalid_prompt", Trouble.REFUSED),
)


# --- text without keys -------------------------------------------------------------------------------------------


def _secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        if name.endswith("_CUSTOM_HEADERS"):
            values = [line.partition(":")[2].strip() for line in value.splitlines()]
        elif _SECRET_NAMES.search(name):
            values = [value.strip()]
        else:
            continue
        for secret in values:
            if len(secret) >= SHORTEST_SECRET:
                yield from (secret, json.dumps(secret)[1:-1], urllib.parse.quote(secret, safe=""))


def _spelled(secret: str) -> str:
    """Return a pattern for a secret within JSON, where each character may stand behind backslashes or as its code.

    Up to three backslashes, as in JSON within JSON; without a bound, a text of nothing else would take the square of
    its length.
    """
    return "".join(rf"(?:\\{{0,3}}{re.escape(character)}|\\{{1,3}}u(?i:{ord(character):04x}))" for character in secret)


def scrubber() -> Callable[[str], str]:
    """Return what takes out of texts any secret of the environment, and what is shaped like one.

    A hostile or careless server echoes the request, key included, and what it says ends up in the ledger. JSON stays
    JSON: no quote is ever part of what is taken out.
    """
    secrets = sorted(set(_secrets()), key=len, reverse=True)
    spelled = re.compile("|".join(map(_spelled, secrets))) if secrets else None

    def scrubbed(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, _HIDDEN)
        if spelled is not None and "\\" in text:
            text = spelled.sub(_HIDDEN, text)
        for shape in _SHAPES:
            text = shape.sub(_HIDDEN, text)
        return text

    return scrubbed


def scrub(text: str) -> str:
    """Return one text without secrets."""
    return scrubber()(text)


def scrub_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed document without secrets in any of its texts: parsing undoes whatever hid them from `scrub`."""
    scrubbed = scrubber()

    def walk(part: Any) -> Any:
        match part:
            case str():
                return scrubbed(part)
            case dict():
                return {scrubbed(name): walk(each) for name, each in part.items()}
            case list():
                return [walk(each) for each in part]
            case _:
                return part

    return {scrubbed(name): walk(each) for name, each in document.items()}


def clean(text: str, *, most: int = LONGEST_TEXT) -> str:
    """Return a text that any ledger and terminal takes, cut to ``most`` characters.

    Scrubbed before it is cut: the other way round, half a key would be left. Halves of surrogate pairs, which JSON can
    spell and UTF-8 cannot, and control characters other than tab and line break become replacement characters.
    """
    is_long = len(text) > most + LONGEST_SECRET
    text = without_control(scrub(text[: most + LONGEST_SECRET].replace("\r\n", "\n")))
    if is_long:  # megabytes are not looked through for a line, and what was cut in the middle of a key is dropped
        text = text[:-LONGEST_SECRET]
    return text if len(text) <= most and not is_long else text[: most - 1] + "…"


def describe(status: int, headers: Mapping[str, str], body: object) -> str:
    """Return one line for people about an answer that is none."""
    if 300 <= status < 400:
        return clean(f"HTTP {status}: a redirect to {_host(headers.get('location', ''))}, which is not followed")
    kind, code, message = said(body)
    who = "something between here and the provider answered: " if classify(status, body) is Trouble.UNREACHABLE else ""
    detail = ", ".join(part for part in (kind, code) if part)
    return clean(
        f"{who}HTTP {status}{f' ({detail})' if detail else ''}: {' '.join(message.split()) or 'no reason given'}"
    )


def _host(address: str) -> str:
    try:
        return urllib.parse.urlsplit(address).hostname or "elsewhere"
    except ValueError:
        return "elsewhere"


# --- classes -----------------------------------------------------------------------------------------------------


def said(body: object) -> tuple[str, str, str]:
    """Return type, code and message of an error body of either provider, or of one that is neither's."""
    if isinstance(body, Mapping):
        error = body.get("error", body)
        if isinstance(error, Mapping):
            details = error.get("details")
            code = error.get("code") or (details.get("error_code") if isinstance(details, Mapping) else None)
            message = error.get("message")
            return _word(error.get("type")), _word(code), message if isinstance(message, str) else written(body)
        return "", "", error if isinstance(error, str) else written(body)
    return "", "", "" if body is None else body if isinstance(body, str) else written(body)


def written(body: object) -> str:
    """Return a body of JSON as text."""
    try:
        return json.dumps(body)
    except RecursionError:
        return "a body that is nested too deeply"


def _word(value: object) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def classify(status: int, body: object) -> Trouble:
    """Return the class of an answer with a status that is none of success."""
    kind, code, message = said(body)
    words = f"{kind} {code} {message}".lower()
    if status == 402 or (400 <= status < 500 and (_SPENDING.search(f"{kind} {code}") or _NO_CREDIT in words)):
        return Trouble.SPENDING_LIMIT
    if status == 413 or (status in (400, 422, 500) and _TOO_LONG.search(words)):
        return Trouble.TOO_LONG
    if status == 407 or (status in (403, 404, 405) and not isinstance(body, Mapping)):
        return Trouble.UNREACHABLE  # a proxy, a sign-in page, a web server before the model's: gone in an hour, perhaps
    if status == 404 or (400 <= status < 500 and _NO_MODEL.search(words)):
        return Trouble.NO_SUCH_MODEL
    if status == 429:
        return Trouble.RATE_LIMITED
    if status >= 500 or status in (408, 409, 425, 499):
        return Trouble.OVERLOADED
    if status in (401, 403) or code == "organization_on_hold":
        return Trouble.NOT_ALLOWED
    if status in (400, 422):
        if code in ("content_filter", "content_policy_violation") or _FILTER in words:
            return Trouble.FILTERED
        return Trouble.REFUSED if code == "invalid_prompt" else Trouble.BAD_REQUEST
    return Trouble.BAD_REQUEST if status >= 400 else Trouble.GARBAGE


def disguised(document: Mapping[str, object]) -> Trouble | None:
    """Return the class of an error that came with a status of success; None if the document holds none."""
    error = document.get("error")
    if not isinstance(error, Mapping):
        return None
    status = error.get("code")
    if type(status) is int and 400 <= status < 600:  # gateways pass on another server's
        return classify(status, document)
    kind, code, _ = said(document)
    for word, trouble in _DISGUISES:
        if word in f"{kind} {code}":
            return trouble
    return Trouble.GARBAGE


def retry_after_seconds(headers: Mapping[str, str], now: datetime.datetime | None = None) -> float | None:
    """Return how long a provider asks to be left alone, up to a week; None if it did not say so that it can be read."""
    for name, unit_seconds in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit_seconds
        except ValueError:
            continue
        if math.isfinite(seconds):
            return min(LONGEST_RETRY_AFTER_SECONDS, max(0.0, seconds))
    try:
        moment = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, OverflowError):  # a year or a time zone beyond what a calendar or a C integer holds
        return None
    if moment.tzinfo is None:  # "-0000": a moment of UTC whose place is not told
        moment = moment.replace(tzinfo=datetime.UTC)
    seconds = (moment - (now or datetime.datetime.now(datetime.UTC))).total_seconds()
    return min(LONGEST_RETRY_AFTER_SECONDS, max(0.0, seconds))
