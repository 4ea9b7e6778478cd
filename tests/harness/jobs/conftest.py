"""A tiny study without a study folder: three splits of a learnable synthetic language, a config, two orders."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from frozen.tokens import write_split
from harness.config import TrialConfig, apply
from harness.jobs.job import EvalSettings, ScoreJob, TrainJob
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
