"""A policy says what a search may turn, within what bounds, and when a change is kept.

It is data (``policies/*.toml``) so that the owner edits it, copies it and has it sealed without touching code. What a
policy lets through is decided in one place, `Policy.admit`: a proposer, a person and a coding agent all pass the same
gate, and what is turned away gets a sentence that says why, with the number or the name that would have been right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError

import policies
from frozen.timer import Budget
from harness.conditions import Conditions, holder
from harness.config import (
    MOVING,
    WEIGHT_PREFIX,
    Knob,
    Section,
    Task,
    TrialConfig,
    Value,
    active_difference,
    explain,
    flatten,
    hyperparameters,
    idle,
    nearest,
    settled,
    turned,
    unflatten,
)
from harness.errors import BadInput, BadValue, UnknownKnob
from harness.records import JudgeRules, Proposal
from harness.sizes import (
    BaseFacts,
    Linear,
    RowLengths,
    flops_per_token,
    least_positions,
    narrowest_row,
    packs,
    rows_each,
)
from harness.toml import read_toml, refuse_unknown_keys

EVERY_SOURCE = WEIGHT_PREFIX + "*"
"""A knob of this name stands for one weight per source, where a study has several sources."""
TEMPERATURE, GENERAL = "sampling.temperature", "sampling.general_fraction"
SECTIONS_OF_TASKS: Mapping[str, tuple[Task, ...]] = {"model": ("pretrain",), "preference": ("dpo",)}
"""Sections of a config that only some tasks have, and these must."""
OF_THE_STUDY = frozenset({"seed", "budget", "eval", "evaluation", "data", "task", "study", "judge"})
"""First parts of names that a person might take for hyperparameters."""
ALPHAS = frozenset({"adapter.alpha", "adapter.alpha_ratio"})


PARENT = "parent"
WHAT_WEIGHTS_ARE = (
    "method",
    "quantization",
    *("model.depth", "model.width", "model.heads"),
    *("adapter.rank", "adapter.alpha", "adapter.alpha_ratio", "adapter.targets", "adapter.rslora", "adapter.dora"),
    "adapter.initialisation",
)
"""Hyperparameters that say which weights there are and what their numbers mean: whoever turns one cannot go on from
weights that were trained under another value. An initialisation means nothing to what is initialised already."""


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

    tasks: Annotated[tuple[Task, ...], Field(min_length=1)] = ("pretrain",)
    """What the policy is for; the first is meant where a person names none."""
    knobs: dict[str, Knob]
    """What the search may turn, by dotted name."""
    fixed: dict[str, Value] = Field(default_factory=dict)
    """Hyperparameters that every trial shares."""
    start_from: Literal["base", "parent"] = "base"
    """What a trial's training starts from: the base model (or a fresh one), or its parent's checkpoint. Then every kept
    change is one more budget of training, with a schedule that anneals within it, and the lineage is a schedule of
    configs (as in population based training: Jaderberg et al., arXiv 1711.09846)."""
    proposals: ProposalRules = ProposalRules()
    judge: JudgeRules = JudgeRules()
    stopping: Stopping = Stopping()
    finals: Finals = Finals()
    _turns_nothing: dict[str, str] = PrivateAttr(default_factory=dict)
    """Why knobs (or all of a section, with a dot at its end) mean nothing on the study's sources; any policy may name
    them, and where they do nothing they are left out."""

    @classmethod
    def load(cls, path: Path, sources: Sequence[str], general: Sequence[str] = ()) -> Self:
        """Read a policy file for a study on the named data sources, of which ``general`` are against forgetting only.

        Raises `BadInput` with the file, the key and the nearest known name where something does not fit.
        """
        return read_toml(path, lambda table: cls.parse(table, sources, general))

    @classmethod
    def parse(cls, table: Mapping[str, Any], sources: Sequence[str], general: Sequence[str] = ()) -> Self:
        """Check a policy that is already read from TOML; `BadInput` names the key that does not fit."""
        refuse_unknown_keys(cls, table, "")
        knobs = table.get("knobs", {})
        if not isinstance(knobs, Mapping) or not knobs:
            raise BadInput('no knobs: a policy needs at least one table [knobs."optim.learning_rate"]')
        try:
            policy = cls.model_validate({**table, "knobs": dict(_named(knobs, sources, general))})
            policy._turns_nothing = dict(_turning_nothing(sources, general))
            policy._check_names()
            policy._check_weights(sources)
            policy._check_bounds()
            policy._check_start()
            policy.conditions.check()
            policy.baseline({})
            policy.conditions.check_choices()
        except ValidationError as error:
            raise BadInput(explain(error)) from error
        except (BadValue, UnknownKnob) as error:
            raise BadInput(str(error)) from error
        return policy

    def _check_names(self) -> None:
        """Refuse a name that does not exist, is set twice or not at all, and a condition that no knob can fulfil."""
        fields = hyperparameters()
        given = [*self.knobs, *self.fixed]
        for name in given:
            if name.partition(".")[0] in OF_THE_STUDY:
                raise BadInput(
                    f"{name!r} is no hyperparameter: seed, budget, data and evaluation are the study's, the same for"
                    " every trial, or a change of them would pass for a gain"
                )
            if name not in fields and not name.startswith(WEIGHT_PREFIX):
                raise BadInput(f"unknown knob {name!r}{nearest(name, fields)}")
        if twice := sorted(set(self.knobs) & set(self.fixed)):
            raise BadInput(f"{twice[0]} is both a knob and fixed: choose one")
        self._check_sections(given)
        used = {name.partition(".")[0] for name in given}
        needed = {
            name
            for name, field in fields.items()
            if field.is_required() and (_is_in_every_config(name) or name.partition(".")[0] in used)
        }
        if missing := sorted(needed - set(given)):
            raise BadInput(f"{', '.join(missing)}: give a value under [fixed], or make it a knob")
        if "adapter" in used and len(ALPHAS & set(given)) != 1:
            raise BadInput(
                f"{' and '.join(sorted(ALPHAS))} are two spellings of one thing: give one of them a value under"
                " [fixed], or make it a knob"
            )

    def _check_sections(self, given: Sequence[str]) -> None:
        """Refuse tasks that want different sections, a section that the tasks do not have, and one that is missing."""
        adapter = next((name for name in given if name.startswith("adapter.")), None)
        if adapter is not None and "pretrain" in self.tasks:
            raise BadInput(f"{adapter} means nothing for the task pretrain: a fresh model has nothing to keep")
        for section, tasks in SECTIONS_OF_TASKS.items():
            having = [task for task in self.tasks if task in tasks]
            there = [name for name in given if name.startswith(section + ".")]
            if having and len(having) < len(self.tasks):
                raise BadInput(
                    f"tasks {', '.join(self.tasks)} need different policies: only {having[0]} has {section}.*"
                )
            if there and not having:
                raise BadInput(f"{there[0]} means nothing for the task {self.tasks[0]}")
            if having and not there:
                needs = [name for name in hyperparameters() if name.startswith(section + ".")]
                raise BadInput(f"{', '.join(needs)}: give a value under [fixed], or make it a knob")

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
        fields = hyperparameters()
        for knob in self.knobs.values():
            if knob.name not in fields:
                continue
            held = holder(fields[knob.name])
            for value in (*knob.choices, knob.low, knob.high):
                if value is None:
                    continue
                try:
                    held.model_validate({"value": value})
                except ValidationError as error:
                    said = explain(error).removeprefix("value = ")
                    raise BadInput(f"knob {knob.name}: no config can hold {said}") from error
            if knob.type == "float" and held.model_fields["value"].annotation is int:
                raise BadInput(f"knob {knob.name} is a whole number: its type is int or choice, not float")

    def _check_start(self) -> None:
        """Refuse knobs whose turning leaves no weights to go on from, where trials do that."""
        refused = [name for name in WHAT_WEIGHTS_ARE if name in self.knobs]
        if self.continues and refused:
            raise BadInput(
                f"start_from = {PARENT!r}: {', '.join(refused)} cannot be turned, because a trial goes on with its"
                f" parent's weights and {'they say' if len(refused) > 1 else 'it says'} what these are: give"
                f" {'each of them' if len(refused) > 1 else 'it'} a value under [fixed]"
            )

    @property
    def continues(self) -> bool:
        """Whether trials go on from their parent's checkpoint."""
        return self.start_from == PARENT

    def baseline(self, overrides: Mapping[str, Value]) -> TrialConfig:
        """Return the config that the search starts from: the defaults with the owner's values in their place.

        Raises `UnknownKnob` with the nearest name, or `BadValue` with the bounds.
        """
        flat = self.fixed | {name: knob.check(knob.default) for name, knob in self.knobs.items()}
        for name, value in overrides.items():
            if name not in flat:
                raise UnknownKnob(self._unknown(name, flat))
            flat[name] = self.knobs[name].check(value) if name in self.knobs else value
        without_meaning = idle(flat, self.knobs)
        for name in overrides:
            if name in without_meaning and flat[name] != self.knobs[name].default:
                raise BadValue(f"{name} means nothing here: it needs {self.conditions.needs(name, flat)}")
        return unflatten(settled(flat, self.knobs))

    def _unknown(self, name: str, known: Collection[str]) -> str:
        """Say why there is no such knob: it would turn nothing in this study, or it is mistyped."""
        why = _reason(name, self._turns_nothing)
        return f"unknown knob {name!r}{nearest(name, known)}" if why is None else f"{name} means nothing here: {why}"

    def slow_precision(self, baseline: TrialConfig, overrides: Collection[str], device: str) -> str | None:
        """Say why a study on a CPU would crawl, and what to do; None where its owner chose the precision, or on a GPU.

        Without AVX-512 or AMX a CPU computes bf16 4 to 27 times slower than fp32, which looks like a hang. One that has
        them is its owner's to name; a search must not find out by itself, so there a knob is refused.
        """
        if device != "cpu":
            return None
        slow = "a CPU computes bf16 4 to 27 times slower than fp32"
        if "precision" in self.knobs and "bf16" in self.knobs["precision"].choices:
            return f"precision is a knob that may become 'bf16', and {slow}: write precision = \"fp32\" under [fixed]"
        if baseline.precision == "bf16" and "precision" not in overrides:
            return f"the policy's precision is 'bf16', and {slow}: add --set precision=fp32 (or bf16, to insist)"
        return None

    @property
    def conditions(self) -> Conditions:
        """When the knobs mean anything."""
        return Conditions(self.knobs, self.fixed)

    def admit(
        self,
        proposal: Proposal,
        parent: TrialConfig,
        *,
        budget: Budget,
        vocabulary: int,
        base: BaseFacts | None,
        lengths: RowLengths | None = None,
    ) -> TrialConfig | Refusal:
        """Return the config that a proposal makes of its parent's, or why it may not run.

        ``lengths`` are those of the training documents, as far as they are known. Whether that config has been tried
        before is the ledger's question, not the policy's.
        """
        diff: dict[str, Value] = {}
        for name, value in proposal.diff.items():
            if name in self.fixed:
                held = flatten(parent).get(name, self.fixed[name])  # the owner may have set it otherwise for the study
                return Refusal(f"{name} is fixed at {held!r} by the policy")
            if name not in self.knobs:
                return Refusal(self._unknown(name, self.knobs))
            try:
                diff[name] = self.knobs[name].check(value)
            except BadValue as error:
                return Refusal(str(error))
        before = flatten(parent)
        without_meaning = idle(before | diff, self.knobs)
        for name, value in diff.items():
            if name in without_meaning and before.get(name) != value:
                return Refusal(f"{name} means nothing here: it needs {self.conditions.needs(name, before | diff)}")
        try:
            config = turned(parent, diff, self.knobs)
        except BadValue as error:
            return Refusal(str(error).removeprefix("not a trial config: "))
        changed = active_difference(parent, config, self.knobs)
        if not changed:
            return Refusal("the diff changes nothing: every knob in it has that value already")
        if len(changed) > self.proposals.max_changes:
            return Refusal(
                f"{len(changed)} knobs changed ({', '.join(changed)}); the policy allows {self.proposals.max_changes}"
            )
        misfit = too_long(config, base) or cannot_begin(config, base)
        return misfit or self.too_few_steps(config, budget, vocabulary, base, lengths) or config

    def too_few_steps(
        self,
        config: TrialConfig,
        budget: Budget,
        vocabulary: int,
        base: BaseFacts | None,
        lengths: RowLengths | None = None,
    ) -> Refusal | None:
        """Return why a config gets too few optimizer steps within the budget, or None; a baseline is asked this too.

        Only what is certain counts: padded rows are taken to be as narrow as they can be.
        """
        if budget.kind == "seconds":  # how many steps fit is only known after they ran
            return None
        batch, per_step = config.batch, least_positions(config, lengths)
        cost, unit = float(per_step), f"{per_step} tokens"
        if budget.kind == "flops":
            per_token = flops_per_token(config, vocabulary=vocabulary, base=base)
            cost *= per_token
            unit += f" × {per_token:.3g} flops = {cost:.3g} flops"
        steps = budget.amount / cost
        if steps >= self.proposals.minimum_steps:
            return None
        items = "sequences" if rows_each(config) == 1 else "pairs × 2 rows"
        product = f"{batch.per_device} {items} × {batch.accumulation} passes × {narrowest_row(config, lengths)} tokens"
        least, most = ("", "") if packs(config) else ("at least ", "at most ")
        return Refusal(
            f"one optimizer step takes {least}{product} = {unit}, so the budget of {budget} gives {most}{steps:.1f}"
            f" steps; the policy asks for {self.proposals.minimum_steps}: take a smaller batch"
            + (" or model" if budget.kind == "flops" else "")
        )


def too_long(config: TrialConfig, base: BaseFacts | None) -> Refusal | None:
    """Return why a config's sequences do not fit the positions of its base model, or None."""
    length = config.batch.sequence_length
    if base is None or base.context is None or length <= base.context:
        return None
    return Refusal(
        f"batch.sequence_length {length} is longer than the {base.context} tokens that {base.name} has positions for"
    )


def cannot_begin(config: TrialConfig, base: BaseFacts | None) -> Refusal | None:
    """Return why an adapter cannot begin with the strongest directions of this base model's weights, or None.

    A matrix has no more directions than its shorter side is long, and PEFT decomposes only such as lie the usual way.
    """
    adapter = config.adapter
    if base is None or adapter is None or config.method != "lora" or adapter.initialisation not in MOVING:
        return None
    start = f"adapter.initialisation {adapter.initialisation!r}"
    if adapter.initialisation == "olora" and base.is_transposed:
        return Refusal(f"{start} cannot be computed for a {base.architecture}, whose weights lie transposed")
    thinnest = min(base.adapted(adapter.targets), key=_directions, default=None)
    if thinnest is None or adapter.rank <= _directions(thinnest):
        return None
    return Refusal(
        f"{start} takes adapter.rank directions out of every weight, and {thinnest.name} ({thinnest.outputs} ×"
        f" {thinnest.inputs}) has {_directions(thinnest)}: adapter.rank may be at most that, got {adapter.rank}"
    )


def _directions(layer: Linear) -> int:
    return min(layer.inputs, layer.outputs)


def find_policy(name: str) -> Path:
    """Return the file of a policy given by its name under ``policies/`` or by a path; `BadInput` lists the names."""
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise BadInput(f"no policy file {name}")
        return path
    names = packaged_policies()
    if name not in names:
        raise BadInput(f"no policy {name!r}{nearest(name, names)}; there are {', '.join(names)}, or give a path")
    return names[name]


def packaged_policies() -> dict[str, Path]:
    """Return the files of the policies that come with us, by name."""
    return {path.stem: path for path in sorted(_packaged().glob("*.toml")) if path != packaged_prices()}


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


def _named(
    knobs: Mapping[str, Any], sources: Sequence[str], general: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each knob's table under its name, without those that turn nothing on these sources.

    One that stands for the weight of every source becomes a knob for each.
    """
    idle_here = dict(_turning_nothing(sources, general))
    for name, table in knobs.items():
        if not isinstance(table, Mapping):
            raise BadInput(f"knob {name!r} is no table: write [knobs.{name!r}] with quotes around the dotted name")
        refuse_unknown_keys(Knob, table, f"knobs.{name}.")
        if _reason(name, idle_here) is not None:
            continue
        if not name.startswith(WEIGHT_PREFIX):
            yield name, {**table, "name": name}
        else:
            wanted = sources if name == EVERY_SOURCE else [name.removeprefix(WEIGHT_PREFIX)]
            for source in wanted:
                yield WEIGHT_PREFIX + source, {**table, "name": WEIGHT_PREFIX + source}


def _turning_nothing(sources: Sequence[str], general: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what turns nothing on these sources, names or sections with a dot at their end, and why."""
    if len(sources) < 2:
        for name in (TEMPERATURE, WEIGHT_PREFIX):
            yield name, "it says how several sources are mixed, and the study has one"
    if not general:
        yield GENERAL, "it is the share of general text, and the study has none (`overnight init --general SRC`)"


def _reason(name: str, turns_nothing: Mapping[str, str]) -> str | None:
    """Return why a knob turns nothing, or None if nothing is known against it."""
    found = (why for key, why in turns_nothing.items() if name == key or (key.endswith(".") and name.startswith(key)))
    return next(found, None)


def _is_in_every_config(name: str) -> bool:
    """Tell whether a hyperparameter lies in no section that may be left out."""
    return TrialConfig.model_fields[name.partition(".")[0]].is_required()
