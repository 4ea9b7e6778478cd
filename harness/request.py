"""What `overnight init` was asked for, checked by cost: what a person can have mistyped, then what must be fetched.

`check` needs neither base model nor data, `settle` derives what was left open once the base model is known; only then
is a byte of the data read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from frozen.timer import Budget
from harness import disk, origin
from harness.base import Base, locate
from harness.config import Task, TrialConfig, Value, explain
from harness.errors import BadInput
from harness.memory import PAGED_PREFIX, Gauge
from harness.policy import Policy, cannot_begin, find_policy, packaged_policies, too_long
from harness.sizes import SHORTEST_ROWS, BaseFacts, RowLengths
from harness.sources import data_sources, guard_set, pinned, refuse_guard_options
from harness.studyfile import (
    FRESH,
    SMALLEST_VOCABULARY,
    Asked,
    DataSource,
    Evaluation,
    GuardSet,
    StudyFile,
    check_choice,
)
from harness.toml import read_toml

Say = Callable[[str], None]
KINDS: Mapping[Task, Literal["text", "conversation", "preference"]] = {
    "pretrain": "text",
    "continue": "text",
    "sft": "conversation",
    "dpo": "preference",
}
"""What a row of data is for each task."""
TASKS = tuple(KINDS)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

VOCABULARIES = ((2_000_000, 1024), (50_000_000, 2048), (1_000_000_000, 8192))
"""Bytes of text up to which a tokenizer of that size is trained; more text gets `LARGEST_VOCABULARY`."""
LARGEST_VOCABULARY = 32768
LEAST_SECONDS = 1.0
"""How many steps fit into seconds is only known when they run; into less than this no schedule fits on any machine."""
LARGEST_VAL_BYTES = 1 << 19
"""Half a megabyte of val: scoring stays short beside training, and the sample of text is the same for every config."""
LARGEST_PROBE_BYTES = 1 << 15
LARGEST_VAL_BYTES_ON_CPU = 1 << 16
"""Of a base model on a CPU, where a forward pass of a million parameters takes what a fresh demo model's whole does."""
LARGEST_GUARD_BYTES = 1 << 16
LEAST_PROBE_BYTES = 2_000
"""Or half of what val has, if that is less: a probe of two rows says nothing."""
ANSWER_CONTEXT = 1024
"""Tokens of a scoring window over conversations, at least: most of them fit as a whole."""
BIG_BASE_PARAMETERS = 10**9
"""On a GPU, a base model from this size on is scored in bf16: half the memory and time, the same for every config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What `create` was asked for, unchecked; `create` says what None means."""

    root: Path
    runs: Path
    policy: str
    data: tuple[str | DataSource, ...]
    budget: str | None
    task: str | None = None
    model: str | None = None
    revision: str | None = None
    base: Base | None = None
    general: tuple[str | DataSource, ...] = ()
    guard: str | GuardSet | None = None
    max_regression: float | None = None
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    beta: float | None = None
    baseline: Mapping[str, Value] = field(default_factory=dict)
    vocabulary: int | None = None
    evaluation: Evaluation | None = None
    eval_keys: Mapping[str, Value] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A request of which everything but the base model and the contents of the data was found usable."""

    task: Task
    model: str
    policy_file: Path
    policy: Policy
    budget: Budget
    sources: tuple[DataSource, ...]
    guard: GuardSet | None
    baseline: Mapping[str, Value]
    text_bytes: int
    """Size of the sources on the disk; on the Hub, of its files, which may be compressed."""
    general_bytes: int
    """Those of them that are of general text: no part of any split but train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A request of which everything but the contents of the data was found usable."""

    file: StudyFile
    policy_file: Path
    text_bytes: int
    base: Base | None


def check(request: Request) -> Plan:
    """Check everything but base model and data; `BadInput` says what is wrong. The Hub is asked last, of data sets."""
    check_name(request.root)
    policy_file = find_policy(request.policy)
    task = _task(request.task, policy_file)
    model = _model(request, task)
    sources = data_sources(request.data, request.general, request.options)
    policy = Policy.load(
        policy_file, [source.name for source in sources], [source.name for source in sources if source.general]
    )
    baseline = _baseline(request, policy)
    if request.budget is None:
        raise BadInput("a new study needs --budget: of each trial, e.g. 300s, 2Mtok, 5e12flop")
    try:
        budget = Budget.parse(request.budget)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if budget.kind == "seconds" and budget.amount < LEAST_SECONDS:
        raise BadInput(f"a budget of {budget} is too small: a trial needs at least {LEAST_SECONDS:g} s for its steps")
    _check_evaluation(request, task)
    if request.base is None and model != FRESH:
        locate(model, revision=request.revision)
    found = [pinned(source) for source in sources]
    text_bytes = sum(size for _, size in found)
    missing = disk.shortfall_bytes(request.root.parent, 4 * text_bytes)
    if missing:
        raise BadInput(
            f"the disk of {request.root.parent} is nearly full: {disk.readable(missing)} are missing to prepare the"
            f" data and keep {disk.readable(disk.RESERVE_BYTES)} in reserve"
        )
    guard = None
    if request.guard is not None:
        guard = guard_set(request.guard, request.max_regression, LARGEST_GUARD_BYTES, request.options)
    return Plan(
        task=task,
        model=model,
        policy_file=policy_file,
        policy=policy,
        budget=budget,
        sources=tuple(source for source, _ in found),
        guard=guard,
        baseline=baseline,
        text_bytes=text_bytes,
        general_bytes=sum(size for source, size in found if source.general),
    )


def tasks_of(policy_file: Path) -> tuple[Task, ...]:
    """Return what a policy is for, before it can be read as a whole: its weights depend on the sources."""
    tasks = read_toml(policy_file, lambda table: table.get("tasks", ["pretrain"]))
    known = tuple(task for task in TASKS if task in tasks) if isinstance(tasks, list) else ()
    if not known or len(known) != len(tasks):
        raise BadInput(f"{policy_file}: tasks = {tasks!r} is no list of {', '.join(TASKS)}")
    return tuple(tasks)


def _task(wanted: str | None, policy_file: Path) -> Task:
    """Return the task; `BadInput` names what the policy is for, and which policies are for what was wanted."""
    tasks = tasks_of(policy_file)
    if wanted is None:
        return tasks[0]
    check_choice("task", wanted, TASKS)
    for task in tasks:
        if task == wanted:
            return task
    others = [name for name, path in packaged_policies().items() if wanted in tasks_of(path)]
    raise BadInput(
        f"the policy {policy_file.stem} is not for the task {wanted} but for {', '.join(tasks)};"
        f" for {wanted} there is --policy {' or '.join(others) or 'FILE, a policy of your own'}"
    )


def _model(request: Request, task: Task) -> str:
    """Return what is trained: fresh for pretraining, a base model for all else."""
    model = request.model
    if task == "pretrain":
        if model not in (None, FRESH) or request.base is not None:
            raise BadInput(
                f"the task pretrain trains a fresh model, not {model}: to train that further on text take"
                " --policy continue (or another for the task continue)"
            )
        if request.revision is not None:
            raise BadInput(f"--revision {request.revision} names a commit of a base model, and a fresh one has none")
        return FRESH
    if model in (None, FRESH):
        raise BadInput(
            f"the task {task} trains a base model further: name it with --model (a folder, a GGUF file, or an id on"
            " the Hub such as org/name)"
        )
    assert model is not None
    return model


def _baseline(request: Request, policy: Policy) -> dict[str, Value]:
    """Return the owner's knobs, and what a CPU computes well in the place of defaults that are a GPU's.

    It computes bf16 many times slower than fp32, and has no memory besides its own to page an optimizer's states to.
    """
    knobs = dict(request.baseline)
    config = policy.baseline(knobs)
    if origin.device() != "cpu":
        return knobs
    if config.precision == "bf16" and "precision" not in knobs:
        turnable = policy.knobs.get("precision")
        if turnable is None or "fp32" in turnable.choices:
            knobs["precision"] = "fp32"
    if config.optim.name.startswith(PAGED_PREFIX) and "optim.name" not in knobs:
        unpaged = config.optim.name.removeprefix(PAGED_PREFIX)
        optimizer = policy.knobs.get("optim.name")
        if optimizer is None or unpaged in optimizer.choices:
            knobs["optim.name"] = unpaged
    return knobs


def _check_evaluation(request: Request, task: Task) -> None:
    """Refuse options of the evaluation that the task does not have."""
    if request.beta is not None and task != "dpo":
        raise BadInput(f"--beta belongs to preferences, and the task is {task}")
    if request.guard is not None and task == "pretrain":
        raise BadInput("--guard compares with the untouched base model, and a fresh model has none")
    if request.max_regression is not None and request.guard is None:
        raise BadInput("--max-regression needs --guard SRC, the set on which it is measured")
    if task == "pretrain" and request.general:
        raise BadInput("--general is text against forgetting, and a fresh model has nothing to forget: use --data")
    if request.guard is None:
        refuse_guard_options(request.options, ": --guard SRC")


def settle(request: Request, plan: Plan, base: Base | None, say: Say = lambda text: None) -> Checked:
    """Derive what was left open now that the base model is known; `BadInput` if the baseline does not fit it."""
    facts = base.facts if base is not None else None
    baseline = plan.policy.baseline(plan.baseline)
    if plan.baseline.get("precision") != request.baseline.get("precision"):
        say("Trials compute in fp32: this machine has no GPU, and a CPU computes bf16 many times slower.")
    if plan.baseline.get("optim.name") != request.baseline.get("optim.name"):
        say(f"The baseline's optimizer is {baseline.optim.name}: this machine has no GPU to page its states from.")
    if facts is not None:
        vocabulary = facts.vocabulary
    else:
        vocabulary = request.vocabulary if request.vocabulary is not None else _vocabulary(plan.text_bytes)
    if vocabulary < SMALLEST_VOCABULARY:
        raise BadInput(
            f"a vocabulary of {vocabulary} is too small: all bytes and some merges need {SMALLEST_VOCABULARY}"
        )
    longer = too_long(baseline, facts)
    if longer is not None:
        raise BadInput(f"{longer.reason}: --set batch.sequence_length to at most that")
    refusal = cannot_begin(baseline, facts)
    if refusal is not None:
        raise BadInput(f"the baseline does not fit its base model: {refusal.reason}")
    slow = plan.policy.slow_precision(baseline, plan.baseline, origin.device())
    if slow is not None:
        raise BadInput(slow)
    _refuse_misfit(plan, baseline, vocabulary, facts, SHORTEST_ROWS)
    asked = Asked(
        task=plan.task,
        model=plan.model,
        revision=facts.revision if facts is not None else None,
        policy=request.policy,
        budget=str(plan.budget),
        vocabulary=vocabulary,
        seed=request.seed,
        data=plan.sources,
    )
    evaluation = _with_keys(request, plan, request.evaluation or _evaluation(plan, baseline, facts))
    file = StudyFile.parse(
        StudyFile(study=asked, baseline=dict(plan.baseline), eval=evaluation).model_dump(mode="json")
    )
    return Checked(file=file, policy_file=plan.policy_file, text_bytes=plan.text_bytes, base=base)


def check_rows(plan: Plan, checked: Checked, train: Path) -> None:
    """Ask again whether the baseline fits budget and memory, now that the training documents are counted."""
    if checked.base is not None:
        baseline = plan.policy.baseline(plan.baseline)
        _refuse_misfit(plan, baseline, checked.base.facts.vocabulary, checked.base.facts, RowLengths.read(train))


def _refuse_misfit(
    plan: Plan, baseline: TrialConfig, vocabulary: int, base: BaseFacts | None, lengths: RowLengths
) -> None:
    """Refuse a baseline whose steps are too large for its budget, or that cannot fit this machine's device."""
    refusal = plan.policy.too_few_steps(baseline, plan.budget, vocabulary, base, lengths)
    if refusal is not None:
        raise BadInput(f"the baseline does not fit its budget: {refusal.reason}")
    device = origin.device()
    memory = origin.device_memory_bytes(device)
    gauge = Gauge(vocabulary=vocabulary, base=base, on_gpu=device != "cpu", memory_bytes=memory, lengths=lengths)
    misfit = gauge.misfit(baseline)
    if misfit is not None:
        raise BadInput(f"the baseline does not fit this machine: {misfit}")


def _with_keys(request: Request, plan: Plan, evaluation: Evaluation) -> Evaluation:
    """Return the evaluation with the keys that the owner gave; `BadInput` names one that does not exist or fit."""
    table = evaluation.model_dump()
    keys = dict(request.eval_keys)
    for key in keys:
        check_choice("--eval", key, tuple(name for name in Evaluation.model_fields if name != "guard"))
    if "context" in keys and "stride" not in keys and isinstance(keys["context"], int):
        keys["stride"] = max(1, keys["context"] // 2)
    if plan.guard is not None:
        table["guard"] = plan.guard.model_dump()
    if request.beta is not None:
        table["preference_beta"] = request.beta
    try:
        return Evaluation.model_validate(table | keys)
    except ValidationError as error:
        raise BadInput(f"[eval] {explain(error)}") from error


def check_name(root: Path) -> None:
    """Raise `BadInput` unless a study of this folder's name can be made here."""
    if not NAME.fullmatch(root.name):
        name = root.name or os.fspath(root)
        raise BadInput(f"{name!r} cannot be the name of a study: letters, digits, dot, dash and underscore")
    if root.exists() or root.is_symlink():
        raise BadInput(f"{root} is there already: choose another name, or `overnight run {root.name}` to go on with it")


def _vocabulary(text_bytes: int) -> int:
    return next((size for limit, size in VOCABULARIES if text_bytes <= limit), LARGEST_VOCABULARY)


def _evaluation(plan: Plan, baseline: TrialConfig, base: BaseFacts | None) -> Evaluation:
    """Derive the evaluation's constants: a tenth of the data for val and for holdout each, the baseline's context.

    General text is in neither, and does not count. Files on the Hub may be compressed or hold other subsets: there, a
    twentieth. Conversations get enough context to stay whole.
    """
    context = baseline.batch.sequence_length
    if KINDS[plan.task] != "text":
        context = max(context, ANSWER_CONTEXT)
    if base is not None and base.context is not None:
        context = min(context, base.context)
    on_cpu = origin.device() == "cpu"
    largest = LARGEST_VAL_BYTES_ON_CPU if base is not None and on_cpu else LARGEST_VAL_BYTES
    share = 20 if any(source.hub is not None for source in plan.sources if not source.general) else 10
    val = max(1, min((plan.text_bytes - plan.general_bytes) // share, largest))
    return Evaluation(
        context=context,
        stride=max(1, context // 2),
        probe_bytes=min(max(1, val // 4, min(LEAST_PROBE_BYTES, val // 2)), LARGEST_PROBE_BYTES),
        val_bytes=val,
        holdout_bytes=val,
        precision="bf16" if base is not None and not on_cpu and base.parameters >= BIG_BASE_PARAMETERS else "fp32",
    )
