"""Builders of records and study folders for the harness's tests."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config import TrialConfig, Value, apply
from harness.paths import StudyPaths
from harness.records import Past, Proposal, ProposalState, Role, Trial, TrialState
from harness.seal import FOLDERS, MODULES, VERDICT, Code
from tests.samples import BASE


@pytest.fixture
def base() -> TrialConfig:
    """Return a small, valid config."""
    return BASE


@pytest.fixture
def make_trial() -> Callable[..., Trial]:
    """Return a builder of trials: a screening of the base config that scored 1.0, unless told otherwise."""
    numbers = itertools.count(1)

    def build(**changes: object) -> Trial:
        state = changes.get("state", TrialState.SCORED)
        values: dict[str, object] = {
            "id": next(numbers),
            "proposal": 1,
            "role": Role.SCREEN,
            "state": state,
            "config": BASE,
            "seed": changes.get("replicate", 0),
            "replicate": 0,
            "epoch": 1,
            "budget": "1000tok",
            "score": 1.0 if state is TrialState.SCORED else None,
        }
        return Trial(**(values | changes))  # type: ignore[arg-type]

    return build


@pytest.fixture
def make_past() -> Callable[..., Past]:
    """Return a builder of running proposals, number 1, that turn the learning rate up."""

    def build(*trials: Trial, **diff: Value) -> Past:
        turned = dict(diff) or {"optim.learning_rate": 1e-3}
        return Past(
            number=1,
            proposal=Proposal(diff=turned, source="test", rationale="why", watch="what"),
            state=ProposalState.RUNNING,
            reason=None,
            parent=0,
            config=apply(BASE, turned),
            verdict=None,
            trials=trials,
        )

    return build


@pytest.fixture
def code(tmp_path: Path) -> Code:
    """Return a copy of the sealed packages that a test may damage."""
    root = tmp_path / "code"
    ours = Code().root
    for folder in FOLDERS:
        shutil.copytree(ours / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for module in (*MODULES, *VERDICT):
        shutil.copy(ours / module, root / module)
    return Code(root=root, imported=root / "frozen")


@pytest.fixture
def read_only() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command where a folder is mounted read-only; root may write anywhere else."""
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a folder read-only")

    def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"'
        return subprocess.run(
            [*unshare, "sh", "-c", mount, str(folder), *command], capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture
def bare_study(tmp_path: Path) -> StudyPaths:
    """Return a folder with the files that a seal covers, their contents made up."""
    paths = StudyPaths(tmp_path / "night")
    for split in ("train", "probe", "val", "holdout"):
        paths.split(split).mkdir(parents=True)
        (paths.split(split) / "tokens.bin").write_bytes(split.encode() * 100)
    paths.tokenizer.mkdir()
    (paths.tokenizer / "tokenizer.json").write_text("{}")
    paths.study_toml.write_text('[study]\ntask = "pretrain"\nbudget = "5s"\n\n[run]\ntrials = 3\n')
    paths.policy_toml.write_text("[proposals]\nmax_changes = 2\n")
    return paths


@pytest.fixture
def make_weights() -> Callable[[StudyPaths, int, bytes], Path]:
    """Return a function that puts a made-up model folder under a trial."""

    def make(paths: StudyPaths, trial: int, content: bytes = b"weights") -> Path:
        folder = paths.trial(trial).weights
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
        (folder / "config.json").write_text("{}")
        paths.trial(trial).config_json.write_text("{}")
        return folder

    return make
