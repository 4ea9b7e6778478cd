"""Study folders for tests, made by hand: no data is encoded and nothing is trained."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.paths import StudyPaths


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
