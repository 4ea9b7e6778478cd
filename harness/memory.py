"""What a trial will hold in memory, before it is started: a config that cannot fit is refused instead of tried.

Pure arithmetic over a config, the base model's facts and the device's kind. What is held is added up for the moments at
which training holds most (the end of the forward pass, the start of the backward pass, a layer that is computed again,
the optimizer's step); the fullest of them is the estimate, as a table of parts.

Sources of the formulas. Weights, gradients and states: ``TrialConfig.precision`` (trained weights stay in fp32, frozen
ones are held in the precision), and each optimizer's own description. 4 bits: Dettmers et al., arXiv 2305.14314,
section 3. Activations: what autograd keeps of a Llama block in transformers 5.24 with fused attention (Korthikanti et
al., arXiv 2205.05198, count the same way), checked tensor by tensor against hooks on saved tensors (tests). Logits: the
loss in fp32, or, under TRL's trainers, tile by tile. What is left out on purpose: fragmentation and workspaces. Where
freed memory goes back at once, measured peaks on a CPU are within a tenth of this (tests); with glibc's defaults, which
keep it, up to twice as much. The ratio of observed to estimated peaks, learned from the trials that finished, takes in
what all configs share of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from harness.config import Optimizer, Targets, TrialConfig
from harness.records import FAILURES, Trial
from harness.sizes import (
    BaseFacts,
    Linear,
    RowLengths,
    packs,
    parameters,
    rows_each,
    trained_parameters,
    widest_row,
)

FP32, BF16 = 4, 2
"""Bytes of a number."""
BLOCK, OUTER_BLOCK = 64, 256
"""Weights that share a constant in 4 bits, and constants that share one of their own with double quantization."""
STATE_BYTES: Mapping[Optimizer, float] = {
    "adamw": 2 * FP32,
    "adamw_8bit": 2 + 2 * FP32 / 256,  # a constant for each block of 256 states (Dettmers et al., arXiv 2110.02861)
    "paged_adamw": 2 * FP32,
    "paged_adamw_8bit": 2 + 2 * FP32 / 256,
    "lion": FP32,
    "schedule_free": 2 * FP32,
}
"""Of an optimizer's states per trained parameter; Adafactor's and Muon's depend on the shape."""
PAGED = ("paged_adamw", "paged_adamw_8bit")
FOREACH = ("adamw", "schedule_free", "muon")
"""Optimizers whose step on a GPU makes a copy of all that is trained ("foreach", torch.optim's documentation)."""
HEAD_BYTES = 3 * FP32
"""Per token and vocabulary entry when the backward pass begins: log-probabilities and two gradients, in fp32."""
HEAD_FORWARD_BYTES = 2 * FP32
"""The same at the end of the forward pass: logits in fp32 and log-probabilities."""
TILE_TOKENS, TILE_ENTRIES = 4096, 32768
"""Tile of logits in TRL's fused head."""
GPU_CONTEXT_BYTES = 600_000_000
"""Driver context and kernels' libraries. No allocator counts it, the device's memory holds it."""
PROCESS_BYTES = 500_000_000
"""A CPU job's interpreter with torch, transformers, peft and trl, which its peak includes."""
GPU_MARGIN, CPU_MARGIN = 1.25, 2.0
"""Estimates this far beyond the memory are refused. They are right within about a quarter, and a config that does run
out is repaired; a machine's main memory is shared, swapped and handed out page by page, so there only the absurd is."""
LEAST_RATIO, MOST_RATIO = 0.6, 1.5
"""Bounds of what is learned: the peaks of small configs say little about what a large one needs."""


class Part(NamedTuple):
    """Something that is held."""

    name: str
    size_bytes: int
    what: str
    """How it was counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a config will hold on its device at its fullest moment."""

    parts: tuple[Part, ...]
    moment: str
    host_bytes: int
    """Held in the host's memory instead: states of a paged optimizer on a GPU. In no part."""
    on_gpu: bool

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def observable_bytes(self) -> int:
        """What a job's own peak would show: on a GPU the allocator's, without the context."""
        return self.total_bytes - (self.of("context") if self.on_gpu else 0)

    def of(self, name: str) -> int:
        """Return the bytes of one part; 0 for one that is not there."""
        return sum(part.size_bytes for part in self.parts if part.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """How finished trials' peaks compare with their estimates."""

    ratio: float
    """Median of observed over estimated, within bounds; 1 before anything is known."""
    trials: int


NOTHING_LEARNED = Correction(ratio=1.0, trials=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a trial was expected to hold, and how the other trials' peaks compare with such estimates."""

    estimate: Estimate
    correction: Correction

    @property
    def expected_peak_bytes(self) -> int:
        """What its own peak should have shown."""
        return round(self.estimate.observable_bytes * self.correction.ratio)


PAGED_PREFIX = "paged_"
"""Optimizers whose states are paged; the rest of the name is that of the same one without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauge:
    """Estimates for the configs of one study on one device, corrected by what its trials showed."""

    vocabulary: int
    base: BaseFacts | None
    on_gpu: bool
    memory_bytes: int | None
    """Of the device; None where nobody knows, and then nothing is refused."""
    lengths: RowLengths | None = None
    """Of the training documents; None: rows are taken to be as long as the config lets them be."""
    correction: Correction = NOTHING_LEARNED

    @classmethod
    def learned(
        cls,
        trials: Iterable[Trial],
        *,
        vocabulary: int,
        base: BaseFacts | None,
        device: str,
        memory_bytes: int | None,
        lengths: RowLengths | None = None,
    ) -> Gauge:
        """Return the gauge of a device (``cpu``, or a GPU by any name), corrected by the trials that ran on it."""
        gauge = cls(
            vocabulary=vocabulary, base=base, on_gpu=device != "cpu", memory_bytes=memory_bytes, lengths=lengths
        )
        found = correction(
            (gauge.estimate(trial.config), trial.peak_memory_bytes)
            for trial in trials
            if trial.peak_memory_bytes is not None
            and trial.state not in FAILURES
            and trial.score is not None
            and (trial.device is None or (trial.device != "cpu") == gauge.on_gpu)
        )
        return replace(gauge, correction=found)

    def estimate(self, config: TrialConfig) -> Estimate:
        """Return what a config will hold."""
        return estimate(config, vocabulary=self.vocabulary, base=self.base, on_gpu=self.on_gpu, lengths=self.lengths)

    def misfit(self, config: TrialConfig) -> str | None:
        """Say why a config cannot run on the device; None where it may."""
        if not self.on_gpu and config.optim.name.startswith(PAGED_PREFIX):
            return (
                f"optim.name {config.optim.name!r} moves its states between GPU and host, and there is no GPU:"
                f" take {config.optim.name.removeprefix(PAGED_PREFIX)!r}"
            )
        return misfit(self.estimate(config), self.memory_bytes, self.correction)


def correction(pairs: Iterable[tuple[Estimate, int]]) -> Correction:
    """Return what pairs of an estimate and an observed peak say: a median, so that one odd trial counts for nothing."""
    ratios = [observed / estimate.observable_bytes for estimate, observed in pairs]
    if not ratios:
        return NOTHING_LEARNED
    return Correction(ratio=min(MOST_RATIO, max(LEAST_RATIO, statistics.median(ratios))), trials=len(ratios))


def corrected_bytes(estimate: Estimate, correction: Correction) -> int:
    """Return an estimate's total, with what a job can observe of it scaled by what was learned."""
    return round(estimate.observable_bytes * correction.ratio) + estimate.total_bytes - estimate.observable_bytes


def misfit(estimate: Estimate, device_memory_bytes: int | None, correction: Correction) -> str | None:
    """Say why a config clearly cannot fit a device, with its largest parts and what to do; None where it may.

    Near the limit nothing is refused: see `GPU_MARGIN`.
    """
    needed = corrected_bytes(estimate, correction)
    margin = GPU_MARGIN if estimate.on_gpu else CPU_MARGIN
    if device_memory_bytes is None or needed <= margin * device_memory_bytes:
        return None
    largest = sorted(estimate.parts, key=lambda part: -part.size_bytes)
    shown = ", ".join(f"{part.name} {gigabytes(part.size_bytes)}" for part in largest[:3])
    learned = f"; {correction.trials} finished trials: × {correction.ratio:.2f}" if correction.trials else ""
    return (
        f"it needs about {gigabytes(needed)} ({shown}{learned}), and the device has"
        f" {gigabytes(device_memory_bytes)}: {_REMEDIES[largest[0].name]}"
    )


_ACTIVATIONS = "fewer sequences per pass (and more accumulation), gradient checkpointing or shorter sequences"
_WEIGHTS = "an adapter (method lora), 4-bit weights (quantization) or a smaller model"
_REMEDIES = {
    "activations": _ACTIVATIONS,
    "logits and loss": _ACTIVATIONS,
    "weights": _WEIGHTS,
    "working copies": _WEIGHTS,
    "adapter": "a smaller rank or fewer targets",
    "reference": "an adapter (method lora), which needs no second model as its reference",
    "gradients": _WEIGHTS,
    "optimizer": "an optimizer with smaller states (8 bits, paged, Lion, Adafactor) or an adapter (method lora)",
    "step": "an optimizer in 8 bits or an adapter (method lora)",
    "context": "another device",
}


def gigabytes(size_bytes: int) -> str:
    """Return a size in powers of 1000, as devices are sold."""
    return f"{size_bytes / 1e9:.1f} GB"


# --- the estimate ------------------------------------------------------------------------------------------------


def estimate(
    config: TrialConfig,
    *,
    vocabulary: int,
    base: BaseFacts | None,
    on_gpu: bool,
    lengths: RowLengths | None = None,
) -> Estimate:
    """Return what training ``config`` holds at its fullest moment.

    That is in the pass with the longest row: where rows are padded, ``lengths`` may say that none is as long as the
    config allows.
    """
    model = _Shape.of(config, vocabulary, base)
    precision = FP32 if config.precision == "fp32" else BF16
    trains_all = base is None or config.method == "full"
    trained = trained_parameters(config, vocabulary=vocabulary, base=base)
    width = widest_row(config, lengths)
    tokens = config.batch.per_device * rows_each(config) * width
    layer = tokens * _layer_bytes_per_token(config, model, base, width, on_gpu=on_gpu)
    states, states_said = _states(config, model, base, trained)
    on_host = on_gpu and config.optim.name in PAGED
    gradients = FP32 * trained
    head_gradient = FP32 * model.embedding if trains_all else 0
    copies = BF16 * (model.linear + model.embedding) if trains_all and precision == BF16 else 0
    one_copy = BF16 * (model.linear // model.layers) if copies else 0
    residual = FP32 if trains_all else precision
    if config.gradient_checkpointing:
        kept, again = float(tokens * model.layers * model.hidden * residual), layer
        kept_copies = BF16 * model.embedding if copies else 0
    else:
        kept, again, kept_copies = model.layers * layer, 0.0, copies
    passing = tokens * 2 * (model.intermediate * precision + model.hidden * residual)
    head_forward, head_backward = _head(config, model, tokens, precision, base, on_gpu=on_gpu)
    accumulated = gradients if config.batch.accumulation > 1 else 0
    moments: dict[str, tuple[float, float, float, float, float]] = {
        "end of the forward pass": (accumulated, copies, kept, head_forward, 0),
        "start of the backward pass": (max(accumulated, head_gradient), kept_copies, kept, head_backward, 0),
        "last layer's turn in the backward pass": (
            max(accumulated, head_gradient),
            one_copy if config.gradient_checkpointing else kept_copies,
            kept + again + passing,
            0,
            0,
        ),
        "first layer's turn in the backward pass": (gradients, one_copy, layer + passing, 0, 0),
        "optimizer's step": (gradients, 0, 0, 0, _step_bytes(config, model, trained, on_gpu=on_gpu)),
    }
    moment = max(moments, key=lambda name: sum(moments[name]))
    gradient_bytes, copy_bytes, activations, head, step = moments[moment]
    weights, weights_said = _weights(config, model, base, precision, vocabulary)
    unpacked = precision * max((one.inputs * one.outputs for one in base.linears), default=0) if base is not None else 0
    parts = [
        Part("weights", weights, weights_said),
        Part("adapter", 0 if trains_all else FP32 * trained, f"{trained:,} parameters in fp32"),
        Part("reference", *_reference(config, base, precision, trains_all=trains_all)),
        Part(
            "gradients",
            round(gradient_bytes),
            f"{trained:,} trained parameters in fp32, as far as they are there by then",
        ),
        Part("optimizer", 0 if on_host else round(states), states_said),
        Part(
            "working copies",
            round(copy_bytes) + (unpacked if config.quantization != "none" else 0),
            "what autocast makes of fp32 weights, or the largest 4-bit layer unpacked",
        ),
        Part("activations", round(activations), _activations_said(config, tokens)),
        Part("logits and loss", round(head), f"{tokens:,} tokens × {model.vocabulary:,} entries"),
        Part("step", round(step), "what the optimizer's step makes besides"),
        Part(
            "context",
            GPU_CONTEXT_BYTES if on_gpu else PROCESS_BYTES,
            "driver and kernels" if on_gpu else "interpreter and libraries",
        ),
    ]
    return Estimate(
        parts=tuple(part for part in parts if part.size_bytes),
        moment=moment,
        host_bytes=round(states) if on_host else 0,
        on_gpu=on_gpu,
    )


class _Shape(NamedTuple):
    """A model's sizes, fresh or not."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    """Width of all heads together."""
    key_value: int
    heads: int
    gated: bool
    """The feed-forward multiplies two branches, as Llama's."""
    linear: int
    """Parameters of all linear layers of the blocks."""
    embedding: int
    """Parameters of the matrix between hidden size and vocabulary that gives the logits."""
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: TrialConfig, vocabulary: int, base: BaseFacts | None) -> _Shape:
        if base is None:
            model = config.shape
            block = 4 * model.width**2 + 3 * model.width * model.feedforward_width
            return cls(
                layers=model.depth,
                hidden=model.width,
                intermediate=model.feedforward_width,
                query=model.width,
                key_value=model.width,
                heads=model.heads,
                gated=True,
                linear=model.depth * block,
                embedding=vocabulary * model.width,
                vocabulary=vocabulary,
                tied=True,
            )
        into = sum("mlp" in one.parts and one.inputs == base.hidden for one in base.linears)
        return cls(
            layers=base.layers,
            hidden=base.hidden,
            intermediate=base.intermediate,
            query=base.heads * base.head_size,
            key_value=base.key_value_heads * base.head_size,
            heads=base.heads,
            gated=into >= 2 * base.layers,
            linear=sum(one.inputs * one.outputs for one in base.linears),
            embedding=base.vocabulary * base.hidden,
            vocabulary=base.vocabulary,
            tied=base.tied,
        )


def _weights(
    config: TrialConfig, model: _Shape, base: BaseFacts | None, precision: int, vocabulary: int
) -> tuple[int, str]:
    if base is None or config.method == "full":
        every = parameters(config, vocabulary=vocabulary, base=base)
        return FP32 * every, f"{every:,} parameters in fp32"
    if config.quantization == "none":
        return precision * base.parameters, f"{base.parameters:,} frozen parameters in {config.precision}"
    constants = FP32 / BLOCK if config.quantization == "nf4" else 1 / BLOCK + FP32 / BLOCK / OUTER_BLOCK
    rest = base.parameters - model.linear
    said = f"{model.linear:,} parameters in 4 bits with their constants, {rest:,} in {config.precision}"
    return round((0.5 + constants) * model.linear) + precision * rest, said


def _reference(config: TrialConfig, base: BaseFacts | None, precision: int, *, trains_all: bool) -> tuple[int, str]:
    """Return the model that preferences are measured against: with an adapter, the same one without it."""
    if config.preference is None or not trains_all or base is None:
        return 0, ""
    return precision * base.parameters, f"a second, frozen model in {config.precision}"


def _states(config: TrialConfig, model: _Shape, base: BaseFacts | None, trained: int) -> tuple[float, str]:
    """Return the bytes of the optimizer's states."""
    name = config.optim.name
    if name in STATE_BYTES:
        return STATE_BYTES[name] * trained, f"{name}: {STATE_BYTES[name]:.3g} bytes a trained parameter"
    if name == "muon":
        matrices = trained if config.method == "lora" else min(trained, model.linear)
        return FP32 * matrices + 2 * FP32 * (trained - matrices), "muon: momentum of matrices, AdamW's two of the rest"
    if base is not None and config.method == "lora":
        adapter = config.adapter
        assert adapter is not None
        sides = sum(one.inputs + one.outputs + 2 * adapter.rank for one in base.adapted(adapter.targets))
    else:
        narrow = 4 * model.hidden + 2 * model.key_value + 2 * model.query
        wide = (3 if model.gated else 2) * (model.hidden + model.intermediate)
        sides = model.layers * (narrow + wide) + (1 if model.tied else 2) * (model.vocabulary + model.hidden)
    return FP32 * sides, "adafactor: a row and a column of each matrix"


def _step_bytes(config: TrialConfig, model: _Shape, trained: int, *, on_gpu: bool) -> int:
    if on_gpu and config.optim.name in FOREACH:
        return FP32 * trained
    return 2 * FP32 * min(trained, max(model.embedding, model.hidden * model.intermediate))


def _head(
    config: TrialConfig, model: _Shape, tokens: int, precision: int, base: BaseFacts | None, *, on_gpu: bool
) -> tuple[float, float]:
    """Return what logits and loss hold at the end of the forward and at the start of the backward pass.

    A fused head keeps no logits: for preferences, and for a base model's text on a GPU. A smoothed loss needs them.
    """
    last = 3 * FP32 * model.hidden * tokens  # the last norm's input, output and the head's own input
    smoothed = config.preference is None and config.regularization.label_smoothing > 0
    if config.preference is not None or (base is not None and on_gpu and not smoothed):
        tile = min(tokens, TILE_TOKENS) * min(model.vocabulary, TILE_ENTRIES) * precision
        chunk = min(model.vocabulary, TILE_ENTRIES) * model.hidden * (precision + FP32)
        return last + tile + chunk, last + 2 * tile + chunk + FP32 * model.hidden * tokens
    cast = precision if precision == BF16 else 0
    more = FP32 if smoothed else 0
    entries = tokens * model.vocabulary
    return last + entries * (HEAD_FORWARD_BYTES + cast + more), last + entries * (HEAD_BYTES + more)


def _layer_bytes_per_token(
    config: TrialConfig, model: _Shape, base: BaseFacts | None, length: int, *, on_gpu: bool
) -> float:
    """Return what autograd keeps of one block for one token of a row of ``length`` positions.

    ``x`` is what enters a norm, in fp32; the norm's own product is kept where the norm's weight is trained. A linear
    layer keeps its input where its weight or its adapter is trained: the tensor itself in fp32, shared by those that
    read the same; under autocast a copy of each layer's own. Fused attention keeps its rotated query, key, value,
    output and one number a head; the feed-forward its branches.
    """
    precision = FP32 if config.precision == "fp32" else BF16
    attention = precision * (2 * model.query + 2 * model.key_value) + FP32 * model.heads
    branches = (3 if model.gated else 2) * model.intermediate * precision
    widened = 2 * (model.query - model.key_value) * precision  # keys and values are repeated for every head
    dropout = 0.0 if config.model is None else config.model.attention_dropout
    if dropout > 0 and not on_gpu:  # no fused kernel: probabilities, mask and product, in fp32
        attention += 3 * FP32 * model.heads * length + widened
    if not packs(config):  # padding needs a mask, which each layer converts
        attention += precision * length + widened
    norms = 2 * FP32 * model.hidden + 2 * FP32
    if base is None or config.method == "full":
        readers = 2 if precision == FP32 else 5 if model.gated else 4
        inputs = precision * (readers * model.hidden + model.intermediate)
        return attention + branches + norms + 2 * FP32 * model.hidden + inputs
    return attention + branches + norms + _adapter_bytes_per_token(config, model, base, precision, on_gpu=on_gpu)


def _adapter_bytes_per_token(
    config: TrialConfig, model: _Shape, base: BaseFacts, precision: int, *, on_gpu: bool
) -> float:
    """Return what the adapters of one block, on average, keep for one token."""
    adapter = config.adapter
    assert adapter is not None
    adapted = list(base.adapted(adapter.targets))
    mask = 0 if adapter.dropout == 0 else 1 if on_gpu else FP32
    ranks = adapter.rank * precision * len(adapted)
    outputs = 2 * precision * sum(one.outputs for one in adapted) if adapter.dora else 0
    if precision == FP32 and adapter.dropout == 0:
        inputs = FP32 * _shared_inputs(adapted, model, adapter.targets)
    else:
        inputs = (precision + mask) * sum(one.inputs for one in adapted)
    return (inputs + ranks + outputs) / model.layers


def _shared_inputs(adapted: Iterable[Linear], model: _Shape, targets: Targets) -> int:
    """Return the numbers a token has in the distinct inputs of adapted layers; attention keeps its output anyway."""
    shared = model.layers * model.hidden * (1 if targets in ("query_value", "attention") else 2)
    own = sum(one.inputs for one in adapted if "mlp" in one.parts and one.inputs != model.hidden)
    return shared + own


def _activations_said(config: TrialConfig, tokens: int) -> str:
    how = "each block's input, and one block again" if config.gradient_checkpointing else "of every block"
    return f"{tokens:,} tokens a pass, {how}" + (", of two rows a pair" if config.preference is not None else "")
