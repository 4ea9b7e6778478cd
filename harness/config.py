"""What a trial is made of: the typed config, the knobs that may turn it, and the diffs between two configs.

A config is one frozen value with one canonical JSON text, so that ``3e-4`` and ``0.00030`` are the same config and a
repeat is recognised as a replicate. Knobs carry dotted names (``optim.learning_rate``), the same in policy files,
diffs, the ledger and the command line.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import TypeIs

from harness.errors import BadValue, UnknownKnob

Task = Literal["pretrain", "continue", "sft", "dpo"]
"""A fresh model on text; a base model on text; on answers; on preference pairs."""
Value = bool | int | float | str
Diff = Mapping[str, Value]

Optimizer = Literal[
    "adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "lion", "adafactor", "schedule_free", "muon"
]
"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), with states in 8 bits (Dettmers et al., arXiv 2110.02861), paged to
the host, or both; Lion (Chen et al., arXiv 2302.06675); Adafactor (Shazeer and Stern, arXiv 1804.04235); schedule-free
AdamW (Defazio et al., arXiv 2405.15682); Muon for matrices within the blocks (Jordan et al., 2024) beside AdamW."""
Targets = Literal["query_value", "attention", "attention_mlp", "all_linear"]
PreferenceLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "apo_zero", "apo_down"
]
MOVING = ("pissa", "olora")
"""Initialisations that take the adapter's start out of the weights beside it (Meng et al., 2404.02948; Büyükakyüz,
2406.01775): the base model alone is then no longer what it was."""
Fraction = Annotated[float, Field(ge=0, le=1)]
WEIGHT_PREFIX = "sampling.weights."
SHOWN_INPUT = 80
"""Characters of an offending value in a message."""


class Section(BaseModel):
    """A group of hyperparameters; frozen, closed to unknown names, and free of NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Optim(Section):
    """The optimizer, its step, and gradient clipping."""

    name: Optimizer = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=1)]
    """Peak rate of the schedule."""
    weight_decay: Annotated[float, Field(ge=0, le=1)]
    """Decoupled decay, applied to matrices and not to norms."""
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    epsilon: Annotated[float, Field(gt=0, le=1e-2)]
    max_grad_norm: Annotated[float, Field(gt=0, le=1e4)]
    """Global norm to which gradients are clipped."""


class Schedule(Section):
    """The learning rate as a function of budget progress: ramp up, hold, decay; every budget anneals fully."""

    shape: Literal["cosine", "linear", "sqrt"]
    """Form of the decay; ``sqrt`` is 1 - sqrt(x) (Hägele et al., arXiv 2405.18392)."""
    warmup_fraction: Annotated[float, Field(ge=0, le=0.9)]
    """Share of the budget that ramps linearly from zero to the peak."""
    decay_fraction: Fraction
    """Share of what follows the warm-up that decays; 1 is the classic cosine, 0 holds to the end."""
    final_rate_fraction: Fraction
    """Rate at the end, as a share of the peak."""


class Batch(Section):
    """How tokens are grouped. What a step costs depends on the rows: `harness.sizes.usual_positions`."""

    per_device: Annotated[int, Field(ge=1, le=4096)]
    """Sequences per forward pass; of preferences, pairs of them."""
    accumulation: Annotated[int, Field(ge=1, le=4096)]
    """Forward passes per optimizer step."""
    sequence_length: Annotated[int, Field(ge=8, le=131072)]
    """Tokens per training sequence. Evaluation has its own, sealed context."""
    packing: bool = True
    """Fill every sequence to its end; else one document per row, cut at ``sequence_length`` and padded."""

    @property
    def per_step(self) -> int:
        """Sequences, or pairs, of one optimizer step."""
        return self.per_device * self.accumulation


class Model(Section):
    """Shape of a fresh Llama-architecture model; the vocabulary is the study's tokenizer's."""

    depth: Annotated[int, Field(ge=1, le=256)]
    """Transformer blocks."""
    width: Annotated[int, Field(ge=8, le=65536)]
    """Size of the residual stream."""
    heads: Annotated[int, Field(ge=1, le=512)]
    attention_dropout: Annotated[float, Field(ge=0, lt=1)]

    @property
    def feedforward_width(self) -> int:
        """Inner size of the gated feed-forward: 8/3 of the width (Shazeer, arXiv 2002.05202), rounded up to 16s."""
        return math.ceil(self.width * 8 / 3 / 16) * 16

    def parameters(self, vocabulary: int) -> int:
        """Return the parameter count with tied embeddings, without building the model: budgets in flops need it."""
        block = 4 * self.width**2 + 3 * self.width * self.feedforward_width + 2 * self.width
        return vocabulary * self.width + self.depth * block + self.width

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"model.width {self.width} does not give model.heads {self.heads} an even head size"
                " (rotary embeddings need one): choose a width that is a multiple of 2 × heads"
            )
        return self


class Adapter(Section):
    """A low-rank adapter beside frozen weights (LoRA: Hu et al., arXiv 2106.09685), as PEFT makes it."""

    rank: Annotated[int, Field(ge=1, le=4096)]
    alpha: Annotated[float, Field(gt=0, le=1e5)] | None = None
    """What the update is scaled by, before it is divided by the rank (by its root with rsLoRA)."""
    alpha_ratio: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """Alpha as a multiple of the rank, in the place of ``alpha``: then the scale stays when the rank turns."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    targets: Targets
    """Which linear layers get an adapter; ``all_linear`` is every one but the output head."""
    rslora: bool = False
    """Divide by the root of the rank (Kalajdzievski, arXiv 2312.03732)."""
    dora: bool = False
    """Learn magnitude and direction apart (Liu et al., arXiv 2402.09353)."""
    initialisation: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = "default"

    @property
    def scaled_alpha(self) -> float:
        """Alpha itself, whichever way it was given."""
        return self.alpha if self.alpha is not None else (self.alpha_ratio or 0) * self.rank

    @model_validator(mode="after")
    def _one_alpha(self) -> Self:
        if (self.alpha is None) == (self.alpha_ratio is None):
            raise ValueError("give one of adapter.alpha and adapter.alpha_ratio")
        return self


class Preference(Section):
    """Direct preference optimisation (Rafailov et al., arXiv 2305.18290)."""

    beta: Annotated[float, Field(gt=0, le=10)]
    """How closely training holds the model to its base. The evaluation has its own, sealed beta."""
    loss: PreferenceLoss


class Regularization(Section):
    """What is made harder so that less is learnt by heart."""

    neftune_alpha: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Noise on the embeddings (NEFTune: Jain et al., arXiv 2310.05914); 0: none."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Of the next token, or, with preferences, the share of pairs taken to be labelled the wrong way."""


class SourceWeight(Section):
    """Relative weight of one source in the training stream."""

    source: str
    weight: Annotated[float, Field(ge=0, le=1e6)]


class Sampling(Section):
    """Which training documents are seen, and in what order."""

    fraction: Annotated[float, Field(gt=0, le=1)]
    """Share of the training documents, nested by content hash: a smaller share is a subset of a larger one."""
    order: Literal["shuffled", "short_to_long", "easy_to_hard"]
    """``easy_to_hard``: by mean surprisal of the tokens under their own frequencies (Platanios et al., 1903.09848)."""
    temperature: Annotated[float, Field(ge=1, le=100)] = 1.0
    """A source counts by its weighted size to the power 1 / temperature: above 1 small sources come oftener."""
    general_fraction: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Share of the tokens that come from the sources marked ``general``, against forgetting."""
    weights: tuple[SourceWeight, ...] = ()
    """Empty: every source in proportion to its size."""

    @field_validator("weights")
    @classmethod
    def _sorted_and_unique(cls, weights: tuple[SourceWeight, ...]) -> tuple[SourceWeight, ...]:
        names = [weight.source for weight in weights]
        if len(set(names)) != len(names):
            raise ValueError(f"sampling.weights names a source twice: {', '.join(sorted(names))}")
        if weights and not any(weight.weight > 0 for weight in weights):
            raise ValueError("sampling.weights are all zero: at least one source must be read")
        return tuple(sorted(weights, key=lambda weight: weight.source))


class TrialConfig(Section):
    """All hyperparameters of a trial. Seed, budget and evaluation are no part of it: they belong to the study."""

    optim: Optim
    schedule: Schedule
    batch: Batch
    model: Model | None = None
    """Of a fresh model; None where a base model is trained."""
    method: Literal["full", "lora"] = "full"
    """Whether all weights are trained, or an adapter beside them."""
    quantization: Literal["none", "nf4", "nf4_double"] = "none"
    """How the frozen weights are held (QLoRA: Dettmers et al., arXiv 2305.14314); only beside an adapter."""
    adapter: Adapter | None = None
    preference: Preference | None = None
    regularization: Regularization = Regularization()
    sampling: Sampling
    precision: Literal["fp32", "bf16"]
    """Arithmetic of the forward and backward passes. Trained weights stay in fp32; frozen ones are held in it."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: about a third more time for much less memory."""

    @property
    def shape(self) -> Model:
        """The fresh model's shape; only asked for where there is one."""
        assert self.model is not None, "a base model has no shape of its own in the config"
        return self.model

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        fault = next(self._faults(), None)
        if fault is not None:
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        """Yield what does not go together, so that no trial is spent on finding it out."""
        if self.method == "lora" and self.adapter is None:
            yield "method 'lora' needs an adapter: adapter.rank and the others"
        if self.quantization != "none" and self.method != "lora":
            yield f"quantization {self.quantization!r} needs method 'lora': 4-bit weights are not trained"
        if self.model is not None and self.method == "lora":
            yield "method 'lora' adapts a base model; a fresh one has nothing to keep"
        if self.optim.name == "schedule_free" and self.optim.beta1 == 0:
            yield "optim.name 'schedule_free' needs an optim.beta1 above 0: it divides by it"
        if self.adapter is not None and self.method == "lora":
            yield from self._faults_of_start(self.adapter)
        if self.preference is None:
            return
        if self.preference.loss == "exo_pair" and not self.regularization.label_smoothing:
            yield "preference.loss 'exo_pair' needs regularization.label_smoothing above 0, such as 0.001"
        if self.regularization.neftune_alpha:
            yield (
                "regularization.neftune_alpha would put noise on the reference, too, which preferences are measured"
                " against: set it to 0"
            )

    def _faults_of_start(self, adapter: Adapter) -> Iterator[str]:
        start = f"adapter.initialisation {adapter.initialisation!r}"
        if adapter.initialisation == "orthogonal" and adapter.rank % 2:
            yield f"{start} needs an even adapter.rank, got {adapter.rank}"
        if adapter.initialisation not in MOVING:
            return
        if self.quantization != "none":
            yield f"{start} moves the base model's weights, and 4-bit ones cannot be moved: turn quantization or this"
        if self.preference is not None:
            yield f"{start} moves the base model's weights, and without the adapter they would be no reference"
        if adapter.dora:
            yield f"{start} cannot be told apart from the base again with adapter.dora: turn one of the two"

    def canonical_json(self) -> str:
        """Return the one text that stands for this config."""
        return json.dumps(told(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal: the identity of the config."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


def flatten(config: TrialConfig) -> dict[str, Value]:
    """Return the config as knob names and values, e.g. ``{"optim.learning_rate": 0.0003, ...}``, in a fixed order.

    What is None (a section that the task does not need, the other of two spellings) is left out.
    """
    flat: dict[str, Value] = {}
    for name, section in config.model_dump(exclude_none=True).items():
        if not isinstance(section, dict):
            flat[name] = section
            continue
        for key, value in section.items():
            if key == "weights":
                flat |= {WEIGHT_PREFIX + item["source"]: item["weight"] for item in value}
            else:
                flat[f"{name}.{key}"] = value
    return dict(sorted(flat.items()))


def told(config: TrialConfig) -> dict[str, Value]:
    """Return the flattened config without the values that equal their field's default.

    A default means what was done before the field was there, so configs keep their identity when hyperparameters are
    added, and a reader is not told of what nobody chose.
    """
    return {name: value for name, value in flatten(config).items() if _DEFAULTS.get(name, _TOLD) != value}


def unflatten(flat: Mapping[str, Value]) -> TrialConfig:
    """Return the config that ``flatten`` would turn into ``flat``; `BadValue` names what does not fit."""
    nested: dict[str, Any] = {}
    weights: list[dict[str, Any]] = []
    for name, value in flat.items():
        section, dot, key = name.partition(".")
        if name.startswith(WEIGHT_PREFIX):
            weights.append({"source": name.removeprefix(WEIGHT_PREFIX), "weight": value})
        elif dot:
            nested.setdefault(section, {})[key] = value
        else:
            nested[name] = value
    if weights:
        nested.setdefault("sampling", {})["weights"] = weights
    try:
        return TrialConfig.model_validate(nested)
    except ValidationError as error:
        raise BadValue(f"not a trial config: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """Say in one line what pydantic found wrong, each item with its dotted name and the offending value."""
    parts = []
    for item in error.errors(include_url=False):
        name = ".".join(str(part) for part in item["loc"])
        said = str(item["msg"]).removeprefix("Value error, ")
        scalar = isinstance(item["input"], bool | int | float | str)
        shown = repr(item["input"])[:SHOWN_INPUT]  # a long one would hide what is wrong with it
        parts.append(f"{name} = {shown}: {said}" if name and scalar else f"{name}: {said}" if name else said)
    return "; ".join(parts)


def apply(config: TrialConfig, diff: Diff) -> TrialConfig:
    """Return ``config`` with the knobs of ``diff`` turned; `UnknownKnob` or `BadValue` say what does not fit."""
    _check_known(diff)
    return unflatten(flatten(config) | dict(diff))


def _check_known(diff: Diff) -> None:
    known = hyperparameters()
    for name in diff:
        if name not in known and not name.startswith(WEIGHT_PREFIX):
            raise UnknownKnob(f"unknown knob {name!r}{nearest(name, known)}")


def idle(flat: Mapping[str, Value], knobs: Mapping[str, Knob]) -> frozenset[str]:
    """Return the knobs that have no meaning in a config, given flattened: a condition fails, or a gate is idle itself.

    Conditions in a circle make all of its knobs idle; a policy with one is refused.
    """
    known: dict[str, bool] = {}

    def means_something(name: str) -> bool:
        if name not in known:
            known[name] = False
            gates = [gate for gate in knobs[name].when if gate in knobs]
            known[name] = knobs[name].is_active(flat) and all(map(means_something, gates))
        return known[name]

    return frozenset(name for name in knobs if not means_something(name))


def turned(config: TrialConfig, diff: Diff, knobs: Mapping[str, Knob]) -> TrialConfig:
    """Return ``config`` with the knobs of ``diff`` turned, and every knob without a meaning at its default.

    So equal trainings have equal configs: a LoRA rank means nothing where all weights are trained; left at what it was,
    it would tell apart what is the same. Checked is only the result, since what no longer means anything may not fit.
    """
    _check_known(diff)
    return unflatten(settled(flatten(config) | dict(diff), knobs))


def settled(flat: Mapping[str, Value], knobs: Mapping[str, Knob]) -> dict[str, Value]:
    """Return a flattened config with every knob that has no meaning in it at its default."""
    return dict(flat) | {name: knobs[name].default for name in sorted(idle(flat, knobs)) if name in flat}


def active_difference(parent: TrialConfig, child: TrialConfig, knobs: Mapping[str, Knob]) -> dict[str, Value]:
    """Return the diff that turns ``parent`` into ``child``, without what has no meaning in the child."""
    without_meaning = idle(flatten(child), knobs)
    return {name: value for name, value in difference(parent, child).items() if name not in without_meaning}


def difference(parent: TrialConfig, child: TrialConfig) -> dict[str, Value]:
    """Return the smallest diff that turns ``parent`` into ``child``."""
    before = flatten(parent)
    return {name: value for name, value in flatten(child).items() if before.get(name) != value}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean …?`` for the known name closest to a mistyped one, or nothing."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        tails = {candidate.rpartition(".")[2]: candidate for candidate in known}
        close = [tails[tail] for tail in difflib.get_close_matches(name.rpartition(".")[2], tails, n=1, cutoff=0.6)]
    return f"; did you mean {close[0]!r}?" if close else ""


class Knob(BaseModel):
    """One hyperparameter that a policy lets the search turn: its type, bounds, scale, default and what to watch."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    name: str
    type: Literal["float", "int", "choice"]
    low: float | None = None
    high: float | None = None
    scale: Literal["linear", "log"] = "linear"
    choices: tuple[Value, ...] = ()
    """Allowed values of a ``choice``, in their natural order where they have one."""
    default: Value
    when: dict[str, Value | tuple[Value, ...]] = Field(default_factory=dict)
    """Other hyperparameters' values, one or several each, under which this one has a meaning; empty: always."""
    watch: str
    """What to look at to know whether turning it worked."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.type == "choice":
            if len(self.choices) < 2 or self.low is not None or self.high is not None:
                raise ValueError(
                    f"knob {self.name}: a choice needs at least two `choices` and neither `low` nor `high`"
                )
        else:
            if self.low is None or self.high is None or not self.low < self.high or self.choices:
                raise ValueError(f"knob {self.name}: a {self.type} needs `low` < `high` and no `choices`")
            if self.scale == "log" and self.low <= 0:
                raise ValueError(f"knob {self.name}: a log scale needs `low` above 0, not {self.low:g}")
        self.check(self.default)
        return self

    def check(self, value: object) -> Value:
        """Return ``value`` in the knob's own type, or raise `BadValue` with the bounds."""
        match self.type:
            case "choice":
                for choice in self.choices:
                    if type(choice) is type(value) and choice == value:
                        return choice
                    if _is_number(choice) and _is_number(value) and choice == value:
                        return choice
                raise BadValue(f"{self.name} = {value!r} is not one of {', '.join(map(repr, self.choices))}")
            case "int" | "float":
                return self._number(value)

    def _number(self, value: object) -> Value:
        if not _is_number(value) or not math.isfinite(value):
            raise BadValue(f"{self.name} = {value!r} is not a finite number")
        if self.type == "int" and value != int(value):
            raise BadValue(f"{self.name} = {value!r} is not a whole number")
        assert self.low is not None
        assert self.high is not None
        if not self.low <= value <= self.high:
            raise BadValue(f"{self.name} = {value!r} is outside {self.low:g} to {self.high:g}")
        return int(value) if self.type == "int" else float(value)

    def is_active(self, flat: Mapping[str, Value]) -> bool:
        """Tell whether its own condition holds in a config, given flattened; `idle` asks for its gates' too."""
        return all(
            flat.get(name) in (wanted if isinstance(wanted, tuple) else (wanted,)) for name, wanted in self.when.items()
        )


def _is_number(value: object) -> TypeIs[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def hyperparameters() -> dict[str, FieldInfo]:
    """Return every hyperparameter of a config by its dotted name, source weights aside; of optional sections too."""
    found: dict[str, FieldInfo] = {}
    for name, field in TrialConfig.model_fields.items():
        section = section_of(field)
        if section is None:
            found[name] = field
        else:
            found |= {f"{name}.{key}": leaf for key, leaf in section.model_fields.items() if key != "weights"}
    return found


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field of a config holds, also where it may be None; None for a plain value."""
    kinds = typing.get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


_TOLD = object()
"""Stands for "no default": equal to no value."""
_DEFAULTS: Mapping[str, object] = {
    name: field.default for name, field in hyperparameters().items() if not field.is_required()
}
