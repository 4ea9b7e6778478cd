"""A policy says what a search may turn, within what bounds, and when a change is kept.

It is data (``policies/*.toml``) so that the owner edits it, copies it and has it sealed without touching code. What a
policy lets through is decided in one place, `Policy.admit`: a proposer, a person and a coding agent all pass the same
gate, and what is turned away gets a sentence that says why, with the number or the name that would have been right.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, create_model

import policies
from frozen.timer import Budget
from harness.config import (
    WEIGHT_PREFIX,
    Knob,
    Section,
    TrialConfig,
    Value,
    apply,
    difference,
    explain,
    flatten,
    nearest,
    unflatten,
)
from harness.errors import BadInput, BadValue, UnknownKnob
from harness.records import JudgeRules, Proposal
from harness.toml import read_toml, refuse_unknown_keys

EVERY_SOURCE = WEIGHT_PREFIX + "*"
"""A knob of this name stands for one weight per source, where a study has several sources."""
FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward and backward pass of a dense transformer (Kaplan et al., arXiv 2001.08361, section 2.1)."""


class ProposalRules(Section):
    """What a single proposal may ask for."""

    max_changes: Annotated[int, Field(ge=1)] = 4
    """Most knobs that one diff may turn: what changes everything at once explains nothing."""
    minimum_steps: Annotated[int, Field(ge=1)] = 20
    """Fewest optimizer steps within the budget; checked before a run where tokens or flops make them known."""


class Stopping(Section):
    """Reserved for ending hopeless trials early; no key works yet, so none is accepted."""


class Finals(Section):
    """Reserved for the last round at the end of a night; no key works yet, so none is accepted."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a proposal does not become a config, in one sentence that names the knob and the bound."""

    reason: str


class Policy(Section):
    """What a policy file says, complete and checked: every hyperparameter is either a knob or fixed."""

    knobs: dict[str, Knob]
    """What the search may turn, by dotted name."""
    fixed: dict[str, Value] = Field(default_factory=dict)
    """Hyperparameters that every trial shares."""
    proposals: ProposalRules = ProposalRules()
    judge: JudgeRules = JudgeRules()
    stopping: Stopping = Stopping()
    finals: Finals = Finals()

    @classmethod
    def load(cls, path: Path, sources: Sequence[str]) -> Self:
        """Read a policy file for a study on the named data sources.

        Raises `BadInput` with the file, the key and the nearest known name where something does not fit.
        """
        return read_toml(path, lambda table: cls.parse(table, sources))

    @classmethod
    def parse(cls, table: Mapping[str, Any], sources: Sequence[str]) -> Self:
        """Check a policy that is already read from TOML; `BadInput` names the key that does not fit."""
        refuse_unknown_keys(cls, table, "")
        knobs = table.get("knobs", {})
        if not isinstance(knobs, Mapping) or not knobs:
            raise BadInput('no knobs: a policy needs at least one table [knobs."optim.learning_rate"]')
        try:
            policy = cls.model_validate({**table, "knobs": dict(_named(knobs, sources))})
            policy._check_names()
            policy._check_weights(sources)
            policy._check_bounds()
            policy.baseline({})
        except ValidationError as error:
            raise BadInput(explain(error)) from error
        except (BadValue, UnknownKnob) as error:
            raise BadInput(str(error)) from error
        return policy

    def _check_names(self) -> None:
        """Refuse a name that does not exist, is set twice or not at all, and a condition that no knob can fulfil."""
        fields = dict(_fields())
        given = [*self.knobs, *self.fixed]
        for name in given:
            if name not in fields and not name.startswith(WEIGHT_PREFIX):
                raise BadInput(f"unknown knob {name!r}{nearest(name, fields)}")
        if twice := sorted(set(self.knobs) & set(self.fixed)):
            raise BadInput(f"{twice[0]} is both a knob and fixed: choose one")
        if missing := sorted(set(fields) - set(given)):
            raise BadInput(f"{', '.join(missing)}: give a value under [fixed], or make it a knob")
        for knob in self.knobs.values():
            for name, value in knob.when.items():
                if name not in self.knobs or name == knob.name:
                    raise BadInput(f"knob {knob.name}: `when` names {name!r}, no other knob{nearest(name, self.knobs)}")
                self.knobs[name].check(value)

    def _check_weights(self, sources: Sequence[str]) -> None:
        """Refuse weights for some sources only: the loader mixes by shares, and a share needs all of them."""
        given = {
            name.removeprefix(WEIGHT_PREFIX) for name in (*self.knobs, *self.fixed) if name.startswith(WEIGHT_PREFIX)
        }
        if given and (missing := sorted(set(sources) - given)):
            raise BadInput(
                f"{WEIGHT_PREFIX}{missing[0]}: give every source a weight, or none (or one knob {EVERY_SOURCE!r})"
            )
        if extra := sorted(given - set(sources)):
            raise BadInput(
                f"{WEIGHT_PREFIX}{extra[0]}: the study has no source of that name{nearest(extra[0], sources)}"
            )

    def _check_bounds(self) -> None:
        """Refuse a range that no config can hold, or the search would run into refusals of our own."""
        fields = dict(_fields())
        for knob in self.knobs.values():
            if knob.name not in fields:
                continue
            holder = fields[knob.name]
            for value in (*knob.choices, knob.low, knob.high):
                if value is None:
                    continue
                try:
                    holder.model_validate({"value": value})
                except ValidationError as error:
                    said = explain(error).removeprefix("value = ")
                    raise BadInput(f"knob {knob.name}: no config can hold {said}") from error
            if knob.type == "float" and holder.model_fields["value"].annotation is int:
                raise BadInput(f"knob {knob.name} is a whole number: its type is int or choice, not float")

    def baseline(self, overrides: Mapping[str, Value]) -> TrialConfig:
        """Return the config that the search starts from: the defaults with the owner's values in their place.

        Raises `UnknownKnob` with the nearest name, or `BadValue` with the bounds.
        """
        flat = self.fixed | {name: knob.check(knob.default) for name, knob in self.knobs.items()}
        for name, value in overrides.items():
            if name not in flat:
                raise UnknownKnob(f"unknown knob {name!r}{nearest(name, flat)}")
            flat[name] = self.knobs[name].check(value) if name in self.knobs else value
        return unflatten(flat)

    def admit(
        self, proposal: Proposal, parent: TrialConfig, *, budget: Budget, vocabulary: int
    ) -> TrialConfig | Refusal:
        """Return the config that a proposal makes of its parent's, or why it may not run.

        Whether that config has been tried before is the ledger's question, not the policy's.
        """
        diff: dict[str, Value] = {}
        for name, value in proposal.diff.items():
            if name in self.fixed:
                return Refusal(f"{name} is fixed at {self.fixed[name]!r} by the policy")
            if name not in self.knobs:
                return Refusal(f"unknown knob {name!r}{nearest(name, self.knobs)}")
            try:
                diff[name] = self.knobs[name].check(value)
            except BadValue as error:
                return Refusal(str(error))
        try:
            config = apply(parent, diff)
        except BadValue as error:
            return Refusal(str(error).removeprefix("not a trial config: "))
        changed = difference(parent, config)
        if not changed:
            return Refusal("the diff changes nothing: every knob in it has that value already")
        if len(changed) > self.proposals.max_changes:
            return Refusal(
                f"{len(changed)} knobs changed ({', '.join(changed)}); the policy allows {self.proposals.max_changes}"
            )
        flat = flatten(config)
        for name in changed:
            if not self.knobs[name].is_active(flat):
                needs = " and ".join(f"{gate} = {value!r}" for gate, value in self.knobs[name].when.items())
                return Refusal(f"{name} means nothing here: it needs {needs}")
        return self.too_few_steps(config, budget, vocabulary) or config

    def too_few_steps(self, config: TrialConfig, budget: Budget, vocabulary: int) -> Refusal | None:
        """Return why a config gets too few optimizer steps within the budget, or None; a baseline is asked this too."""
        batch = config.batch
        if budget.kind == "seconds":  # how many steps fit is only known after they ran
            return None
        per_step = batch.tokens_per_step
        cost, unit = float(per_step), f"{per_step} tokens"
        if budget.kind == "flops":
            factor, parameters = FLOPS_PER_PARAMETER_AND_TOKEN, config.model.parameters(vocabulary)
            cost *= factor * parameters
            unit += f" × {factor} × {parameters} parameters = {cost:.3g} flops"
        product = f"{batch.per_device} sequences × {batch.accumulation} passes × {batch.sequence_length} tokens"
        steps = budget.amount / cost
        if steps >= self.proposals.minimum_steps:
            return None
        return Refusal(
            f"one optimizer step takes {product} = {unit}, so the budget of {budget} gives {steps:.1f} steps;"
            f" the policy asks for {self.proposals.minimum_steps}: take a smaller batch"
            + (" or model" if budget.kind == "flops" else "")
        )


def find_policy(name: str) -> Path:
    """Return the file of a policy given by its name under ``policies/`` or by a path; `BadInput` lists the names."""
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise BadInput(f"no policy file {name}")
        return path
    names = {path.stem: path for path in sorted(_packaged().glob("*.toml")) if path != packaged_prices()}
    if name not in names:
        raise BadInput(f"no policy {name!r}{nearest(name, names)}; there are {', '.join(names)}, or give a path")
    return names[name]


def find_program(policy: Path) -> Path:
    """Return what the owner tells the model: the ``program.md`` beside a policy, else the one that comes with us."""
    beside = policy.with_name("program.md")
    return beside if beside.is_file() else _packaged() / "program.md"


def packaged_prices() -> Path:
    """Return the file of prices that comes with us."""
    return _packaged() / "prices.toml"


def _packaged() -> Path:
    """Return the folder of the policies that come with us."""
    assert policies.__file__ is not None
    return Path(policies.__file__).parent


def _named(knobs: Mapping[str, Any], sources: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each knob's table under its name; a weight for every source where there are several, else none."""
    for name, table in knobs.items():
        if not isinstance(table, Mapping):
            raise BadInput(f"knob {name!r} is no table: write [knobs.{name!r}] with quotes around the dotted name")
        refuse_unknown_keys(Knob, table, f"knobs.{name}.")
        if not name.startswith(WEIGHT_PREFIX):
            yield name, {**table, "name": name}
        elif len(sources) > 1:
            wanted = sources if name == EVERY_SOURCE else [name.removeprefix(WEIGHT_PREFIX)]
            for source in wanted:
                yield WEIGHT_PREFIX + source, {**table, "name": WEIGHT_PREFIX + source}


def _fields() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted name of every hyperparameter with a model of one field, ``value``, that holds its bounds."""
    for name, field in TrialConfig.model_fields.items():
        inner = typing.cast("type", field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            for key, leaf in inner.model_fields.items():
                if name + "." + key + "." != WEIGHT_PREFIX:
                    yield f"{name}.{key}", _holder(leaf)
        else:
            yield name, _holder(field)


def _holder(field: Any) -> type[BaseModel]:
    kind = field.annotation
    assert kind is not types.NoneType
    return create_model("Holder", value=(kind, field))
