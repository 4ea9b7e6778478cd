"""A study of a base model as `overnight init` leaves it, put together by hand: a tiny model, made-up data, sealed."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from frozen.tokens import ANSWER, CONTEXT, END, write_split
from harness.config import Task, Value
from harness.ledger import Ledger
from harness.paths import GUARD, SPLITS, StudyPaths
from harness.rows import StudyRow
from harness.seal import Seal, tool_version
from harness.study import METRICS, Study, build
from harness.studyfile import Asked, DataSource, Evaluation, GuardSet, StudyFile
from tests.standin import VOCABULARY

BYTES, TOKENS, PAIRS = 1000, 300, 10
"""What val holds: UTF-8 bytes and tokens of all that is scored, in so many documents, or pairs of them."""
BUDGET = "200000tok"
MAX_REGRESSION = 0.05
POLICY = """\
tasks = {tasks}

[proposals]
max_changes = 3
minimum_steps = 5

[judge]
max_replicates = 4

[fixed]
"method" = "{method}"
"quantization" = "none"
"optim.weight_decay" = 0.0
"optim.beta1" = 0.9
"optim.beta2" = 0.999
"optim.epsilon" = 1e-8
"optim.max_grad_norm" = 1.0
"schedule.shape" = "cosine"
"schedule.decay_fraction" = 1.0
"schedule.final_rate_fraction" = 0.0
"batch.accumulation" = 1
"batch.sequence_length" = 64
"sampling.fraction" = 1.0
"sampling.order" = "shuffled"
"precision" = "fp32"
{more}

[knobs."optim.learning_rate"]
type = "float"
low = 1e-6
high = 2e-2
scale = "log"
default = 2e-4
watch = "loss in the first fifty steps"

[knobs."schedule.warmup_fraction"]
type = "float"
low = 0.0
high = 0.3
default = 0.1
watch = "no spike at the start"

[knobs."batch.per_device"]
type = "int"
low = 1
high = 64
default = 16
watch = "memory"
"""
ADAPTER = """\
"adapter.alpha_ratio" = 2.0
"adapter.dropout" = 0.0
"adapter.targets" = "attention"
"""
RANK = """
[knobs."adapter.rank"]
type = "int"
low = 1
high = 32
default = 8
watch = "gap between probe and train loss"
"""
PREFERENCE = '"preference.beta" = 0.1\n"preference.loss" = "sigmoid"\n'


SHAPE = '"model.depth" = 2\n"model.width" = 32\n"model.heads" = 2\n"model.attention_dropout" = 0.0\n'


def policy(task: Task, method: str, *, start_from: str = "base", packing: bool = True) -> str:
    """Return a policy of a few knobs for fine-tuning, or for a tiny fresh model."""
    rows = "" if packing else '"batch.packing" = false\n'
    more = rows + (ADAPTER if method == "lora" else "") + (PREFERENCE if task == "dpo" else "")
    more += SHAPE if task == "pretrain" else ""
    if start_from == "base":
        return POLICY.format(tasks=f'["{task}"]', method=method, more=more) + (RANK if method == "lora" else "")
    more += '"adapter.rank" = 8\n' if method == "lora" else ""
    return f'start_from = "{start_from}"\n' + POLICY.format(tasks=f'["{task}"]', method=method, more=more)


def make_base_study(
    paths: StudyPaths,
    base: Path,
    *,
    task: Task = "sft",
    method: str = "lora",
    guard: bool = True,
    budget: str = BUDGET,
    baseline: dict[str, Value] | None = None,
    start_from: str = "base",
    packing: bool = True,
) -> Study:
    """Fill an empty folder with the study of a prepared base model (see `tests.standin.prepare`), and seal it."""
    paths.root.mkdir(parents=True, exist_ok=True)
    shutil.copytree(base, paths.base)
    paths.tokenizer.mkdir()
    for file in base.glob("token*"):
        shutil.copy(file, paths.tokenizer / file.name)
    for split in SPLITS:
        _write(paths.split(split), task)
    if guard:
        _write(paths.split(GUARD), "continue")
    limit = GuardSet(path="general.txt", bytes=BYTES, max_regression=MAX_REGRESSION) if guard else None
    file = StudyFile(
        study=Asked(
            task=task,
            model=str(base),
            policy="by hand",
            budget=budget,
            vocabulary=VOCABULARY,
            seed=0,
            data=(DataSource(name="text", path="text.txt"),),
        ),
        baseline=baseline or {},
        eval=Evaluation(context=64, stride=32, probe_bytes=1, val_bytes=1, holdout_bytes=1, guard=limit),
    )
    paths.study_toml.write_text(file.render())
    paths.policy_toml.write_text(policy(task, method, start_from=start_from, packing=packing))
    study = build(paths, file, Seal.take(paths))
    Ledger.create(paths.ledger, study=row_of(study)).close()
    return study


def row_of(study: Study) -> StudyRow:
    """Return the row of a study as `overnight init` writes it."""
    return StudyRow(
        name=study.name,
        task=study.file.study.task,
        model=study.file.study.model,
        metric=METRICS[study.file.study.task],
        seed=0,
        budget=str(study.budget),
        seal=study.seal.digest,
        policy=study.paths.policy_toml.read_text(),
        versions=study.seal.manifest.versions | {"overnight": tool_version()},
        git_commit=None,
        git_dirty=None,
        device="cpu",
        created=datetime.datetime.now(datetime.UTC),
    )


def _write(folder: Path, task: Task) -> None:
    """Write a split of `TOKENS` scored tokens: text, conversations, or both answers of `PAIRS` preference pairs."""
    documents = 2 * PAIRS if task == "dpo" else PAIRS
    scored = TOKENS // documents
    marked = task in ("sft", "dpo")
    write_split(
        folder,
        documents=list(_documents(documents, scored + (4 if marked else 0))),
        byte_counts=[BYTES // documents] * documents,
        source_ids=[0] * documents,
        sources=("text",),
        separator=0,
        vocabulary=VOCABULARY,
        marks=[[CONTEXT] * 3 + [ANSWER] * scored + [END]] * documents if marked else None,
        pairs=task == "dpo",
    )


def _documents(count: int, length: int) -> Iterator[np.ndarray]:
    draw = np.random.default_rng(7)
    for _ in range(count):
        yield draw.integers(3, VOCABULARY, length)
