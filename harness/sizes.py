"""How big a config's model is: parameters, those of them that are trained, and what a trained token costs.

A fresh model's size follows from its shape, a base model's from `BaseFacts`, which were read off its files when the
study was made. Pure, without torch: budgets, the memory estimate and the proposers ask before anything is built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.config import Targets, TrialConfig, explain
from harness.errors import BadInput

FORWARD_FLOPS = 2
"""Per parameter and token (Kaplan et al., arXiv 2001.08361, section 2.1). The backward pass costs as much for the
activations' gradients, and as much again for the weights' where they are trained."""
LAYER_PARTS: Mapping[Targets, tuple[str, ...]] = {
    "query_value": ("query", "value"),
    "attention": ("query", "key", "value", "attention_output"),
    "attention_mlp": ("query", "key", "value", "attention_output", "mlp"),
    "all_linear": ("query", "key", "value", "attention_output", "mlp", "other"),
}
"""Which `Linear.part` each choice of ``adapter.targets`` adapts; a part that holds several (GPT-2's query, key and
value in one) is listed under each."""


class Linear(BaseModel):
    """A linear layer within the blocks of a base model."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str
    """Full module name, e.g. ``model.layers.0.self_attn.q_proj``."""
    parts: tuple[str, ...]
    """``query``, ``key``, ``value``, ``attention_output``, ``mlp`` or ``other``; several where they share a matrix."""
    inputs: Annotated[int, Field(ge=1)]
    outputs: Annotated[int, Field(ge=1)]


class BaseFacts(BaseModel):
    """What is known of a base model: ``base.json`` beside its files, sealed with them."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str
    """As the owner named it: a Hub id, a folder, a GGUF file."""
    revision: str | None
    """Commit of the Hub repository; None for local files, which their digest pins."""
    digest: str
    """SHA-256 over names and digests of the original weight files."""
    architecture: str
    """Class of the model, e.g. ``LlamaForCausalLM``."""
    parameters: Annotated[int, Field(ge=1)]
    """Tied ones counted once."""
    vocabulary: Annotated[int, Field(ge=1)]
    """Width of the logits."""
    hidden: Annotated[int, Field(ge=1)]
    layers: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    key_value_heads: Annotated[int, Field(ge=1)]
    head_size: Annotated[int, Field(ge=1)]
    intermediate: Annotated[int, Field(ge=1)]
    context: int | None
    """Longest sequence that its positions allow; None where nothing says so."""
    tied: bool
    """The output head is the embedding."""
    weight_bytes: Annotated[int, Field(ge=1)]
    """Of the saved weights."""
    linears: tuple[Linear, ...]
    """Every linear layer but the output head."""
    notes: tuple[str, ...] = ()
    """What was missing or mended, in sentences: no pad token, a resized vocabulary, …"""

    def adapted(self, targets: Targets) -> Iterator[Linear]:
        """Yield the layers that a choice of targets adapts."""
        wanted = frozenset(LAYER_PARTS[targets])
        return (linear for linear in self.linears if wanted & set(linear.parts))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read ``base.json`` of a prepared base model; `BadInput` if it is damaged."""
        path = folder / "base.json"
        try:
            return cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            raise BadInput(f"{path} does not describe a base model: {explain(error)}") from error
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from error


def parameters(config: TrialConfig, *, vocabulary: int, base: BaseFacts | None) -> int:
    """Return the parameters of a config's model, its adapter included."""
    if base is None:
        return config.shape.parameters(vocabulary)
    return base.parameters + (
        trained_parameters(config, vocabulary=vocabulary, base=base) if config.method == "lora" else 0
    )


def trained_parameters(config: TrialConfig, *, vocabulary: int, base: BaseFacts | None) -> int:
    """Return how many parameters get gradients: all, or those of the adapter (two thin matrices per layer)."""
    if base is None or config.method == "full":
        return parameters(config, vocabulary=vocabulary, base=base)
    adapter = config.adapter
    assert adapter is not None
    layers = list(base.adapted(adapter.targets))
    magnitudes = sum(layer.outputs for layer in layers) if adapter.dora else 0
    return sum(adapter.rank * (layer.inputs + layer.outputs) for layer in layers) + magnitudes


def flops_per_token(config: TrialConfig, *, vocabulary: int, base: BaseFacts | None) -> float:
    """Return what one trained token costs: 6 per trained parameter, 4 per frozen one, which gets no gradient itself."""
    every = parameters(config, vocabulary=vocabulary, base=base)
    trained = trained_parameters(config, vocabulary=vocabulary, base=base)
    cost = float(2 * FORWARD_FLOPS * every + FORWARD_FLOPS * trained)
    assert math.isfinite(cost)
    return cost
