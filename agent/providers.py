"""From the owner's ``PROVIDER:MODEL`` to a provider; the SDKs are slow to import and loaded only here."""

from __future__ import annotations

from agent.asking import Provider
from harness.errors import WrongUse


def provider_of(llm: str) -> Provider:
    """Return the provider of ``anthropic:MODEL``, ``openai:MODEL`` or a bare ``MODEL``.

    A bare id that begins with ``claude`` is Anthropic's, every other goes to ``openai``, which speaks to local servers
    too. No other prefix is one: their ids hold colons (``qwen3:8b``). `WrongUse` if no model is named.
    """
    prefix, colon, rest = llm.partition(":")
    if colon and prefix in ("anthropic", "openai"):
        name, model = prefix, rest.strip()
    else:
        model = llm.strip()
        name = "anthropic" if model.startswith("claude") else "openai"
    if not model:
        raise WrongUse(f"no language model is named in {llm!r}: give an id, as in --llm PROVIDER:MODEL")
    if name == "anthropic":
        from agent.anthropic import AnthropicProvider

        return AnthropicProvider(model)
    from agent.openai import OpenAIProvider

    return OpenAIProvider(model)
