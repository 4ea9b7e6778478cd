"""When a knob means anything: what a policy's ``when`` may say, and what it must say.

A knob that is turned where it changes nothing costs a trial and passes for an experiment. So a policy has to state a
condition for every knob that some value of another makes idle, and no condition may be one that can never hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError, create_model

from harness.config import (
    Knob,
    Optimizer,
    TrialConfig,
    Value,
    explain,
    flatten,
    hyperparameters,
    idle,
    nearest,
    settled,
    unflatten,
)
from harness.errors import BadInput, BadValue

_READ_BY_NONE_OF: Mapping[str, tuple[Optimizer, ...]] = {
    "optim.beta1": ("adafactor",),
    "optim.beta2": ("adafactor",),
    "optim.epsilon": ("adafactor", "lion"),
}
"""Adafactor has decay exponents of its own, Lion no root to keep from zero; Muon hands what is no matrix of a block to
AdamW, which reads them all."""
MEANINGS: Mapping[str, tuple[str, tuple[Value, ...]]] = {
    "adapter.": ("method", ("lora",)),
    "quantization": ("method", ("lora",)),
    "regularization.label_smoothing": ("preference.loss", ("robust", "exo_pair")),
    **{
        name: ("optim.name", tuple(each for each in get_args(Optimizer) if each not in ignorant))
        for name, ignorant in _READ_BY_NONE_OF.items()
    },
}
"""Values of another hyperparameter under which one (or a section, with a dot at its end) changes the training at all.
The losses of preferences that read the smoothing are those that TRL's DPO trainer gives it to."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a policy's knobs, beside what it fixes."""

    knobs: Mapping[str, Knob]
    fixed: Mapping[str, Value]

    def check(self) -> None:
        """Refuse a condition that can never hold, one that depends on itself, and one that is missing: `BadInput`."""
        for knob in self.knobs.values():
            for gate, wanted in knob.when.items():
                self._check_gate(knob, gate, several(wanted))
        for name in self.knobs:
            self._check_circle(name, ())
        for name in self.knobs:
            for pattern, (gate, meaningful) in MEANINGS.items():
                if name == pattern or (pattern.endswith(".") and name.startswith(pattern)):
                    self._check_meaning(name, gate, meaningful)

    def check_choices(self) -> None:
        """Refuse a choice among words that makes no config at the other defaults, such as a method without an adapter.

        Numbers may exclude each other (widths and heads): a proposal can turn both.
        """
        defaults = {**self.fixed, **{name: knob.default for name, knob in self.knobs.items()}}
        for name, knob in self.knobs.items():
            for choice in knob.choices:
                flat = defaults | {name: choice}
                if not isinstance(choice, str) or name in idle(flat, self.knobs):
                    continue
                try:
                    unflatten(settled(flat, self.knobs))
                except BadValue as error:
                    said = str(error).removeprefix("not a trial config: ")
                    raise BadInput(f"{name} = {choice!r} makes no config with the other defaults: {said}") from error

    def needs(self, name: str, flat: Mapping[str, Value]) -> str:
        """Say which values of others a knob lacks to have a meaning in a config, its gates' gates included."""
        wants = {gate: several(wanted) for gate, wanted in self.knobs[name].when.items()}
        without_meaning = idle(flat, self.knobs)
        lacks = [f"{gate} = {either(values)}" for gate, values in wants.items() if flat.get(gate) not in values]
        return " and ".join(lacks + [self.needs(gate, flat) for gate in wants if gate in without_meaning])

    def _check_gate(self, knob: Knob, gate: str, wanted: Sequence[Value]) -> None:
        given = [*self.knobs, *self.fixed]
        if gate == knob.name or gate not in given:
            raise BadInput(f"knob {knob.name}: `when` names {gate!r}, no other knob{nearest(gate, given)}")
        if not wanted:
            raise BadInput(f"knob {knob.name}: `when` gives no value for {gate}")
        for value in wanted:
            try:
                if gate in self.knobs:
                    self.knobs[gate].check(value)
                elif gate in hyperparameters():
                    holder(hyperparameters()[gate]).model_validate({"value": value})
            except BadValue as error:
                raise BadInput(f"knob {knob.name}: `when` asks for what cannot be: {error}") from error
            except ValidationError as error:
                said = explain(error).removeprefix("value = ")
                raise BadInput(f"knob {knob.name}: `when` asks for what {gate} cannot be: {said}") from error
        if gate in self.fixed and self.fixed[gate] not in wanted:
            raise BadInput(
                f"knob {knob.name}: `when` needs {gate} = {either(wanted)}, but it is fixed at {self.fixed[gate]!r}:"
                " the knob could never be turned"
            )

    def _check_circle(self, name: str, above: tuple[str, ...]) -> None:
        if name in above:
            circle = " → ".join((*above[above.index(name) :], name))
            raise BadInput(f"knobs depend on each other in a circle, {circle}: take one `when` out")
        for gate in self.knobs[name].when:
            if gate in self.knobs:
                self._check_circle(gate, (*above, name))

    def _check_meaning(self, name: str, gate: str, meaningful: tuple[Value, ...]) -> None:
        possible = self._possible(gate)
        if possible is None:
            return
        fitting = [value for value in possible if value in meaningful]
        if not fitting:
            raise BadInput(
                f"knob {name} means nothing here: {gate} is {either(possible)}, and it needs {either(meaningful)}"
            )
        allowed = self._under(name).get(gate, possible)
        meaningless = [value for value in possible if value in allowed and value not in meaningful]
        if meaningless:
            condition = "{ " + f'"{gate}" = {fitting if len(fitting) > 1 else fitting[0]!r}'.replace("'", '"') + " }"
            raise BadInput(f"knob {name} means nothing with {gate} = {either(meaningless)}: give it when = {condition}")

    def _possible(self, name: str) -> tuple[Value, ...] | None:
        """Return the values that a hyperparameter of words can have; None for one that is not there at all."""
        if name in self.knobs:
            return self.knobs[name].choices
        if name in self.fixed:
            return (self.fixed[name],)
        field = hyperparameters()[name]
        return None if field.is_required() else (field.default,)

    def _under(self, name: str) -> dict[str, tuple[Value, ...]]:
        """Return the values of others under which a knob has a meaning, its gates' conditions included."""
        found: dict[str, tuple[Value, ...]] = {}
        for gate, wanted in self.knobs[name].when.items():
            inner = self._under(gate) if gate in self.knobs else {}
            for other, values in ((gate, several(wanted)), *inner.items()):
                found[other] = tuple(value for value in found.get(other, values) if value in values)
        return found


def meaningful(config: TrialConfig) -> dict[str, Value]:
    """Return a config flattened, without what changes nothing in it, whatever the policy says: for people to read."""
    flat = flatten(config)
    return {name: value for name, value in flat.items() if not _changes_nothing(name, flat)}


def _changes_nothing(name: str, flat: Mapping[str, Value]) -> bool:
    if name == "batch.packing":
        return "preference.loss" in flat  # the two halves of a pair are rows of their own
    return any(
        gate in flat and flat[gate] not in wanted
        for pattern, (gate, wanted) in MEANINGS.items()
        if name == pattern or (pattern.endswith(".") and name.startswith(pattern))
    )


def several(wanted: Value | tuple[Value, ...]) -> tuple[Value, ...]:
    """Return the values of a condition, which may name one or several."""
    return wanted if isinstance(wanted, tuple) else (wanted,)


def either(values: Sequence[Value]) -> str:
    """Return values as people write a choice of them."""
    return " or ".join(map(repr, values))


def holder(field: Any) -> type[BaseModel]:
    """Return a model of one field, ``value``, that holds a hyperparameter's bounds."""
    return create_model("Holder", value=(field.annotation, field))
