"""How big a config's model and its steps are: parameters, those that are trained, what a token costs, tokens of a step.

A fresh model's size follows from its shape, a base model's from `BaseFacts`, which were read off its files when the
study was made. A step's size follows from the config where rows are packed; where they are padded, also from
`RowLengths`. Pure, without torch: budgets, the memory estimate and the proposers ask before anything is built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.config import Targets, TrialConfig, explain
from harness.errors import BadInput

if TYPE_CHECKING:
    from frozen.splits import EncodedSplit

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


TRANSPOSED = frozenset({"GPT2LMHeadModel"})
"""Architectures whose linear layers store inputs before outputs."""


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

    @property
    def is_transposed(self) -> bool:
        """Whether its linear layers store inputs before outputs."""
        return self.architecture in TRANSPOSED

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


# --- steps -------------------------------------------------------------------------------------------------------


LEAST_ROW = 2
"""Positions of a row: a token to predict, and the separator before it."""
_PARTS = 128
"""Equal parts of the documents by which their lengths are told; the mean is then right within a few percent."""


@dataclass(frozen=True, slots=True)
class RowLengths:
    """How long a study's training documents are as rows of their own: facts for those who see no data.

    In positions, uncut, the separator included. A preference pair counts once, by its longer half: the two are padded
    to one width.
    """

    shortest: int
    longest: int
    usual: tuple[int, ...]
    """Rising: the middle length of each of some equal parts of the documents."""

    @classmethod
    def of(cls, split: EncodedSplit) -> Self:
        """Count the documents, or pairs, of a split."""
        import numpy as np

        lengths = np.diff(split.offsets) + 1
        if split.pairs:
            lengths = lengths.reshape(-1, 2).max(axis=1)
        lengths.sort()
        middles = lengths[((np.arange(_PARTS) + 0.5) / _PARTS * len(lengths)).astype(np.int64)]
        return cls(int(lengths[0]), int(lengths[-1]), tuple(middles.tolist()))

    @classmethod
    def read(cls, train: Path) -> Self:
        """Count those of an encoded split on the disk."""
        from frozen.splits import EncodedSplit

        return cls.of(EncodedSplit.load(train))

    def mean(self, sequence_length: int) -> float:
        """Return the mean length of rows cut at ``sequence_length``, without padding."""
        return sum(min(length, sequence_length) for length in self.usual) / len(self.usual)

    def mean_width(self, sequence_length: int, rows: int) -> float:
        """Return how wide a batch of so many rows is on average, each drawn at random: as wide as its longest.

        Of equal parts, the longest of n draws lies in the i-th of N with probability (i/N)^n - ((i-1)/N)^n.
        """
        parts = len(self.usual)
        return sum(
            _padded(length, sequence_length) * ((at / parts) ** rows - ((at - 1) / parts) ** rows)
            for at, length in enumerate(self.usual, start=1)
        )


SHORTEST_ROWS = RowLengths(LEAST_ROW, LEAST_ROW, (LEAST_ROW,))
"""What rows cost at least, before any data is read."""


def packs(config: TrialConfig) -> bool:
    """Tell whether rows are filled to their end; a half of a preference pair is always a row of its own."""
    return config.batch.packing and config.preference is None


def rows_each(config: TrialConfig) -> int:
    """Return how many rows an item of a batch has: a preference pair has two."""
    return 1 if config.preference is None else 2


def widest_row(config: TrialConfig, lengths: RowLengths | None) -> int:
    """Return the most positions that a row of a config can have, padding included."""
    length = config.batch.sequence_length
    return length if packs(config) or lengths is None else _padded(lengths.longest, length)


def narrowest_row(config: TrialConfig, lengths: RowLengths | None) -> int:
    """Return the fewest positions that a row of a config can have, padding included."""
    length = config.batch.sequence_length
    return length if packs(config) else _padded((lengths or SHORTEST_ROWS).shortest, length)


def least_positions(config: TrialConfig, lengths: RowLengths | None) -> int:
    """Return the fewest positions that an optimizer step can have: what is beyond a budget by this surely is."""
    return config.batch.per_step * rows_each(config) * narrowest_row(config, lengths)


def usual_positions(config: TrialConfig, lengths: RowLengths | None) -> float | None:
    """Return the positions of an optimizer step, padding included; of padded rows the mean, None if not known.

    Budgets in tokens, and the ``tokens`` of a trial, count these.
    """
    batch = config.batch
    if packs(config):
        return float(batch.per_step * batch.sequence_length)
    if lengths is None:
        return None
    return batch.per_step * rows_each(config) * lengths.mean_width(batch.sequence_length, batch.per_device)


def padding_share(config: TrialConfig, lengths: RowLengths) -> float:
    """Return which share of a config's positions is padding, on average; next to none where rows are packed.

    Of a pair, what the shorter half lacks is not counted: only the longer one's length is known.
    """
    batch = config.batch
    if packs(config):
        return 0.0
    return 1 - lengths.mean(batch.sequence_length) / lengths.mean_width(batch.sequence_length, batch.per_device)


def as_trained(config: TrialConfig, lengths: RowLengths | None) -> TrialConfig:
    """Return the config that trains just like this one with the shortest ``sequence_length``.

    Where rows are padded, a length that no document reaches cuts nothing and pads nothing.
    """
    widest = widest_row(config, lengths)
    if widest == config.batch.sequence_length or config.model is not None:
        return config
    return config.model_copy(update={"batch": config.batch.model_copy(update={"sequence_length": widest})})


def _padded(longest: int, sequence_length: int) -> int:
    from frozen.sampling import padded_width  # brings numpy along, which who only reads a study need not wait for

    return padded_width(longest, sequence_length)
