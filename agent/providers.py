"""From the owner's ``PROVIDER:MODEL`` to a provider; the SDKs are slow to import and loaded only here."""

from __future__ import annotations

from agent.asking import Provider
from harness.errors import WrongUse
from harness.terms import provider_and_model


def provider_of(llm: str) -> Provider:
    """Return the provider of a model as the owner named it; `WrongUse` if no model is named."""
    name, model = provider_and_model(llm)
    if not model:
        raise WrongUse(f"no language model is named in {llm!r}: give an id, as in --llm PROVIDER:MODEL")
    if name == "anthropic":
        from agent.anthropic import AnthropicProvider

        return AnthropicProvider(model)
    from agent.openai import OpenAIProvider

    return OpenAIProvider(model)
