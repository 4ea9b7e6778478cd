"""``study.toml``: what the owner asks of a study, read with clear errors and written so that a person can edit it.

The sections ``[study]``, ``[baseline]`` and ``[eval]`` are sealed, because scores depend on them; ``[agent]``,
``[run]`` and ``[notify]`` may change between runs. Everything is written out, also what was a default, so that a later
version's defaults change nothing about an old study.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from frozen.formats import Format
from frozen.timer import Budget
from harness.config import Section, Task, Value, explain, nearest
from harness.errors import BadInput
from harness.toml import read_toml, refuse_unknown_keys

SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=60)]
FRESH = "fresh"
"""What stands for a new model in the place of a base model's name."""
SMALLEST_VOCABULARY = 300
"""All 256 bytes, the separator, and a few merges."""


class DataSource(Section):
    """One source of text."""

    name: SourceName
    path: str | None = None
    """As given to ``overnight init``; read once, then the encoded copy in the study counts."""
    hub: str | None = None
    """Id of a data set on the Hub, in the place of ``path``; ``subset`` and ``split`` are its own."""
    revision: str | None = None
    """Commit that was read, written by ``overnight init``."""
    subset: str | None = None
    split: str | None = None
    format: Format = "auto"
    column: str | None = None
    """Field that holds the text, where it is not the usual one."""
    general: bool = False
    """General-domain text, trained on against forgetting (``sampling.general_fraction``); no part of any score."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError(f"source {self.name}: give one of path and hub")
        return self


class Asked(Section):
    """``[study]``: the question."""

    task: Task
    model: Annotated[str, Field(min_length=1)]
    """What is trained: ``fresh``, a new model whose shape is part of the config, or a base model: a folder, a GGUF
    file, a Hub id. Read once; then the copy in the study counts."""
    revision: str | None = None
    """Commit of the base model's Hub repository, written by ``overnight init``."""
    policy: str
    """Where policy.toml was copied from."""
    budget: str
    """Canonical text of a `frozen.timer.Budget`, per trial."""
    vocabulary: Annotated[int, Field(ge=SMALLEST_VOCABULARY, le=1 << 20)]
    """Width of the logits: entries of the locally trained tokenizer, or the base model's."""
    seed: Annotated[int, Field(ge=0, lt=1 << 31)]
    data: Annotated[tuple[DataSource, ...], Field(min_length=1)]

    @field_validator("budget")
    @classmethod
    def _canonical(cls, budget: str) -> str:
        return str(Budget.parse(budget))

    @field_validator("data")
    @classmethod
    def _named_once(cls, data: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
        names = [source.name for source in data]
        if len(set(names)) != len(names):
            raise ValueError(f"two sources have the same name: {', '.join(names)}")
        return data


class GuardSet(Section):
    """``[eval.guard]``: a second set, of general-domain text, on which a kept change must not cost too much."""

    path: str | None = None
    hub: str | None = None
    revision: str | None = None
    subset: str | None = None
    split: str | None = None
    format: Format = "auto"
    column: str | None = None
    bytes: Annotated[int, Field(ge=1)]
    """Most text that is scored."""
    max_regression: Annotated[float, Field(ge=0, le=10)]
    """Bits per byte by which a config may be worse on it than the untouched base model."""


class Evaluation(Section):
    """``[eval]``: constants of every score."""

    context: Annotated[int, Field(ge=8)]
    """Tokens of a scoring window, the separator included."""
    stride: Annotated[int, Field(ge=1)]
    """New tokens that each further window of a long document scores."""
    probe_bytes: Annotated[int, Field(ge=1)]
    """Size of the split that training children may look at."""
    val_bytes: Annotated[int, Field(ge=1)]
    holdout_bytes: Annotated[int, Field(ge=1)]
    precision: Literal["fp32", "bf16"] = "fp32"
    """What weights are held in while they are scored."""
    preference_beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """Of bits per preference pair."""
    guard: GuardSet | None = None

    @model_validator(mode="after")
    def _windows_advance(self) -> Self:
        if self.stride >= self.context:
            raise ValueError(f"stride {self.stride} must be below context {self.context}, or tokens lack context")
        return self


class Agent(Section):
    """``[agent]``: who proposes. May change."""

    proposer: str = "mixed"
    llm: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Language model that proposes: ``MODEL`` or ``PROVIDER:MODEL``; absent: none is asked."""
    max_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Most that all calls of the study may cost."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens that all calls of the study may use."""


class Running(Section):
    """``[run]``: totals and devices. May change."""

    trials: Annotated[int, Field(ge=1)] | None = None
    """Total of the study, over all its runs."""
    hours: Annotated[float, Field(gt=0)] | None = None
    """Total of the driver's time."""
    until: Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")] | None = None
    """Local time, ``HH:MM``."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda:\d+)$")] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of a job; absent: every core that this process may use."""


class Notify(Section):
    """``[notify]``: who is told when a search has ended. May change."""

    urls: tuple[str, ...] = ()
    """Addresses as apprise writes them, e.g. ``ntfy://topic``. They may hold passwords: keep the file to yourself."""


class StudyFile(Section):
    """The whole file."""

    study: Asked
    baseline: dict[str, Value] = Field(default_factory=dict)
    """Knobs that differ from the policy's defaults: the owner's current config."""
    eval: Evaluation
    agent: Agent = Agent()
    run: Running = Running()
    notify: Notify = Notify()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the data sources, in order."""
        return tuple(source.name for source in self.study.data)

    @property
    def general(self) -> tuple[str, ...]:
        """Names of the data sources that are trained on against forgetting only."""
        return tuple(source.name for source in self.study.data if source.general)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a study.toml; `BadInput` names the file, the key and the nearest known name."""
        return read_toml(path, cls.parse)

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Self:
        """Check what is already read from TOML; `BadInput` names what does not fit."""
        refuse_unknown_keys(cls, table, "")
        asked = table.get("study")
        sources = asked.get("data") if isinstance(asked, Mapping) else None
        for source in sources if isinstance(sources, list) else ():
            if isinstance(source, Mapping):
                refuse_unknown_keys(DataSource, source, "study.data.")
        baseline = table.get("baseline", {})
        if isinstance(baseline, Mapping):
            table = {**table, "baseline": dict(_dotted(baseline, ""))}
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise BadInput(explain(error)) from error

    def render(self) -> str:
        """Return the file's text; `read` gives the same value back."""
        lines = [
            f"# Made by `overnight init`. Scores depend on the sections {_SEALED}: they are sealed.",
            "",
            "[study]",
            *_keys(self.study.model_dump(exclude={"data"})),
        ]
        for source in self.study.data:
            lines += ["", "[[study.data]]", *_keys(source.model_dump())]
        lines += ["", "[baseline]  # knobs that differ from the policy's defaults", *_keys(self.baseline)]
        lines += ["", "[eval]", *_keys(self.eval.model_dump(exclude={"guard"}))]
        if self.eval.guard is not None:
            lines += ["", "[eval.guard]", *_keys(self.eval.guard.model_dump())]
        lines += ["", "# What follows may change between runs.", "", "[agent]", *_keys(self.agent.model_dump())]
        lines += ["", "[run]  # trials, hours: totals; until; device; threads", *_keys(self.run.model_dump())]
        lines += ["", "[notify]  # addresses that are told when a search has ended", *_keys(self.notify.model_dump())]
        return "\n".join(lines) + "\n"


_SEALED = "[study], [baseline] and [eval]"


def _dotted(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Return a table with its tables flattened: ``optim.learning_rate`` may be written with or without quotes."""
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        found += _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return found


def _keys(values: Mapping[str, Value | tuple[str, ...] | None]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in values.items() if value is not None]


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("_", "").replace("-", "").isalnum() else _value(name)


def _value(value: Value | tuple[str, ...]) -> str:
    """Return a value in TOML: JSON's spelling, but DEL must be escaped and astral characters must not."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def named(text: str, taken: set[str]) -> tuple[str, str]:
    """Return name and path of a SRC as given on the command line: ``PATH`` or ``NAME=PATH``.

    Without a name the file's own is taken, made usable in a knob's name and unique among ``taken``.
    """
    name, equals, path = text.partition("=")
    if equals and not Path(text).exists():
        if name in taken:
            raise BadInput(f"two sources are named {name!r}")
        return name, path
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in Path(text).resolve().stem)
    base = stem.strip("-_")[:50] or "data"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name, text


def check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `BadInput` with the nearest name unless ``value`` is one of the known ones."""
    if value not in known:
        raise BadInput(f"{what} {value!r} is not known{nearest(value, known)}; there is {', '.join(known)}")
