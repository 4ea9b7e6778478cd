"""A tiny study without a study folder: three splits of a learnable synthetic language, a config, two orders."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from frozen.tokens import ANSWER, CONTEXT, END, write_split
from harness.config import Task, TrialConfig, Value, apply, flatten, unflatten
from harness.jobs.job import EvalSettings, MergeJob, ScoreJob, TrainJob
from tests import standin
from tests.samples import BASE

VOCABULARY = 64
NAUGHTY = Path(__file__).parent / "naughty.py"


@pytest.fixture(scope="session")
def config() -> TrialConfig:
    """Two small blocks, with dropout so that random numbers matter."""
    return apply(
        BASE,
        {
            "optim.learning_rate": 1e-2,
            "batch.per_device": 4,
            "batch.accumulation": 2,
            "batch.sequence_length": 32,
            "model.width": 32,
            "model.attention_dropout": 0.1,
        },
    )


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train, probe, val and a stand-in for the tokenizer."""
    root = tmp_path_factory.mktemp("study") / "data"
    for seed, (name, documents) in enumerate({"train": 200, "probe": 12, "val": 20}.items()):
        rng = np.random.default_rng(seed)
        texts = [
            np.cumsum(rng.integers(1, 4, size=rng.integers(5, 60))) % (VOCABULARY - 1) + 1 for _ in range(documents)
        ]
        write_split(
            root / name,
            documents=texts,
            byte_counts=[3 * len(text) for text in texts],
            source_ids=[0] * documents,
            sources=("synthetic",),
            separator=0,
            vocabulary=VOCABULARY,
        )
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    (root.parent / "ledger.db").write_text("secret")
    return root


EVALUATION = EvalSettings(context=32, stride=16)


@pytest.fixture
def train_job(config: TrialConfig, data: Path, tmp_path: Path) -> TrainJob:
    """Training for 20 steps into an empty folder."""
    return TrainJob(
        config=config,
        seed=1,
        budget="5120tok",
        train=data / "train",
        probe=data / "probe",
        tokenizer=data / "tokenizer",
        folder=tmp_path / "trial",
        evaluation=EVALUATION,
        device="cpu",
        threads=1,
    )


@pytest.fixture
def score_job(config: TrialConfig, data: Path, train_job: TrainJob) -> ScoreJob:
    """Scoring of what the training order leaves."""
    return ScoreJob(
        config=config,
        weights=train_job.folder / "model",
        split=data / "val",
        tokenizer=data / "tokenizer",
        evaluation=EVALUATION,
        device="cpu",
        threads=1,
    )


# --- base models ------------------------------------------------------------------------------------------------------


TUNED: dict[str, Value] = {
    **{name: value for name, value in flatten(BASE).items() if not name.startswith("model.")},
    "optim.learning_rate": 3e-3,
    "optim.weight_decay": 0.01,
    "batch.per_device": 2,
    "batch.accumulation": 2,
    "batch.sequence_length": 48,
}
ADAPTER: dict[str, Value] = {
    "method": "lora",
    "adapter.rank": 4,
    "adapter.alpha_ratio": 2.0,
    "adapter.dropout": 0.1,
    "adapter.targets": "attention_mlp",
}
PREFERENCE: dict[str, Value] = {"preference.beta": 0.2, "preference.loss": "sigmoid"}


def tuned(task: Task = "continue", method: str = "lora", diff: Mapping[str, Value] | None = None) -> TrialConfig:
    """Return a config for a base model."""
    adapter = ADAPTER if method == "lora" else {}
    preference = PREFERENCE if task == "dpo" else {}
    return unflatten({**TUNED, **adapter, **preference, **(diff or {})})


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from kind and tying to a prepared base model."""
    root = tmp_path_factory.mktemp("bases")

    def find(kind: standin.Kind = "llama", tied: bool = True) -> Path:
        folder = root / f"{kind}-{tied}"
        if not folder.exists():
            standin.prepare(standin.make_base(folder, kind=kind, tied=tied))
        return folder

    return find


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train, probe and val of each task: a good answer counts on from its prompt, a bad one leaps."""
    root = tmp_path_factory.mktemp("material")
    standin.make_tokenizer(root / "tokenizer")
    for task in ("continue", "sft", "dpo"):
        for seed, (name, rows) in enumerate({"train": 40, "probe": 4, "val": 6}.items()):
            rng = np.random.default_rng(seed)
            documents, marks = [], []
            for _ in range(rows):
                start, length = int(rng.integers(3, 300)), int(rng.integers(2, 14))
                prompt = np.full(int(rng.integers(1, 9)), start)
                good = np.concatenate([prompt, start + np.arange(1, 1 + length), [2]])
                bad = np.concatenate([prompt, rng.integers(320, 384, size=length), [2]])
                mark = np.array([CONTEXT] * len(prompt) + [ANSWER] * length + [END])
                documents += [good, bad] if task == "dpo" else [good]
                marks += [mark, mark] if task == "dpo" else [mark]
            write_split(
                root / task / name,
                documents=documents,
                byte_counts=[3 * len(document) for document in documents],
                source_ids=[0] * len(documents),
                sources=("synthetic",),
                separator=0,
                vocabulary=standin.VOCABULARY,
                marks=None if task == "continue" else marks,
                pairs=task == "dpo",
            )
    return root


@pytest.fixture
def tune(bases: Callable[..., Path], material: Path, tmp_path: Path) -> Callable[..., TrainJob]:
    """Return a function that makes orders to train a base model for some steps."""

    def order(
        task: Task = "continue",
        method: str = "lora",
        diff: Mapping[str, Value] | None = None,
        *,
        kind: str = "llama",
        tied: bool = True,
        name: str = "trial",
        **changes: object,
    ) -> TrainJob:
        base = bases(kind, tied)
        (tmp_path / name).mkdir()
        job = TrainJob(
            task=task,
            config=tuned(task, method, diff),
            base=base,
            seed=1,
            budget="1200tok",
            train=material / task / "train",
            probe=material / task / "probe",
            tokenizer=material / "tokenizer",
            folder=tmp_path / name,
            evaluation=EVALUATION,
            probe_points=2,
            device="cpu",
            threads=1,
        )
        return job.model_copy(update=changes)

    return order


def score_of(job: TrainJob, *, untouched: bool = False) -> ScoreJob:
    """Return the order to score what a training order leaves, or its base."""
    return ScoreJob(
        task=job.task,
        config=job.config,
        base=job.base,
        weights=None if untouched else job.folder / "model",
        split=job.train.with_name("val"),
        tokenizer=job.tokenizer,
        evaluation=job.evaluation,
        device="cpu",
        threads=1,
    )


def merge_of(job: TrainJob, folder: Path) -> MergeJob:
    """Return the order to merge what a training order leaves."""
    assert job.base is not None
    folder.mkdir(exist_ok=True)
    return MergeJob(
        config=job.config,
        base=job.base,
        weights=job.folder / "model",
        split=job.train.with_name("val"),
        tokenizer=job.tokenizer,
        folder=folder,
        evaluation=job.evaluation,
        device="cpu",
        threads=1,
    )


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """Return a study's mark that no other process carries."""
    return str(tmp_path)


@pytest.fixture
def marked(mark: str) -> Callable[[], set[int]]:
    """Return the processes that carry the mark."""

    def find() -> set[int]:
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environ = (entry / "environ").read_bytes()
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
                if f"OVERNIGHT_STUDY={mark}".encode() in environ.split(b"\0"):
                    found.add(int(entry.name))
        return found - {os.getpid()}

    return find


@pytest.fixture
def naughty(request: pytest.FixtureRequest) -> list[str]:
    """Return the command line of a nursery of misbehaving jobs; ``subreaper``: without a pid namespace."""
    return [sys.executable, "-I", str(NAUGHTY), getattr(request, "param", "namespace")]
