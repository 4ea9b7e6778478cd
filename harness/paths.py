"""The only file that knows what lies where in a study folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from harness.errors import BadInput

RUNS = Path("runs")
"""Studies lie here, in the current folder."""
DEMO = "demo"
"""Name of the study that `overnight run` makes when there is none."""
SPLITS = ("train", "probe", "val", "holdout")
GUARD = "guard"
"""The split of the guard set, beside the four."""


def cache_folder(runs: Path) -> Path:
    """Return where encoded data is shared between the studies under ``runs``."""
    return runs / ".cache"


@dataclass(frozen=True, slots=True)
class TrialPaths:
    """Files of one trial. ``train`` is all that its training child may write."""

    root: Path

    @property
    def config_json(self) -> Path:
        """The resolved config, seed and budget, written by the driver for people."""
        return self.root / "config.json"

    @property
    def curve_jsonl(self) -> Path:
        """The learning curve, written by the driver as points arrive."""
        return self.root / "curve.jsonl"

    @property
    def log(self) -> Path:
        """Output of the training child, then of the scoring child, as bytes."""
        return self.root / "log.txt"

    @property
    def train(self) -> Path:
        """Working folder of the training child."""
        return self.root / "train"

    @property
    def weights(self) -> Path:
        """Folder of the trained model in the standard layout, safetensors inside."""
        return self.train / "model"

    @property
    def score(self) -> Path:
        """Working folder of the scoring child."""
        return self.root / "score"


@dataclass(frozen=True, slots=True)
class ReplayPaths:
    """Files of one full run."""

    root: Path

    @property
    def train(self) -> Path:
        """Working folder of the training child: checkpoints while it runs, gone when it is done."""
        return self.root / "train"

    @property
    def curve_jsonl(self) -> Path:
        """The learning curve, written as points arrive: a run that is resumed has the points from before too."""
        return self.root / "curve.jsonl"

    @property
    def model(self) -> Path:
        """The trained model with its tokenizer and card."""
        return self.root / "model"

    @property
    def merged(self) -> Path:
        """The adapter and its base as one model, where that was asked for."""
        return self.root / "merged"

    @property
    def merging(self) -> Path:
        """Working folder of the merging child: what it makes becomes `merged` once it is scored."""
        return self.root / "merging"

    @property
    def log(self) -> Path:
        """Output of the children."""
        return self.root / "log.txt"


@dataclass(frozen=True, slots=True)
class StudyPaths:
    """Files of one study."""

    root: Path

    @property
    def name(self) -> str:
        """The study's name is its folder's."""
        return self.root.name

    @property
    def study_toml(self) -> Path:
        """What the owner asked for."""
        return self.root / "study.toml"

    @property
    def policy_toml(self) -> Path:
        """The policy, copied here and sealed."""
        return self.root / "policy.toml"

    @property
    def program_md(self) -> Path:
        """What the owner tells the model; may change."""
        return self.root / "program.md"

    @property
    def agents_md(self) -> Path:
        """What a coding agent is told of this folder; under the name by which such agents look for it."""
        return self.root / "AGENTS.md"

    @property
    def prices_toml(self) -> Path:
        """What language models cost, copied here; may change."""
        return self.root / "prices.toml"

    def call(self, call: int) -> Path:
        """Folder of one call to a language model: what was asked and what came back."""
        return self.root / "calls" / f"{call:05d}"

    @property
    def seal_json(self) -> Path:
        """Digests of everything a score depends on."""
        return self.root / "seal.json"

    @property
    def ledger(self) -> Path:
        """The SQLite file."""
        return self.root / "ledger.db"

    @property
    def lock(self) -> Path:
        """Held by the one driver of the study."""
        return self.root / "driver.lock"

    @property
    def bytecode(self) -> Path:
        """Bytecode cache of the children, shared by the studies of a folder: compiling torch anew takes half a minute.

        Children never run what lies beside the sources; the seal looks at our own modules in here too.
        """
        return cache_folder(self.root.parent) / "bytecode"

    @property
    def inbox(self) -> Path:
        """Requests from outside (hand proposals, pause, stop), published whole, taken in by the driver."""
        return self.root / "inbox"

    @property
    def tokenizer(self) -> Path:
        """Tokenizer folder in the transformers layout."""
        return self.root / "data" / "tokenizer"

    @property
    def base(self) -> Path:
        """The prepared base model, in the transformers layout, with its facts in base.json; absent for a fresh one."""
        return self.root / "data" / "base"

    def split(self, name: str) -> Path:
        """Folder of one split's token arrays."""
        return self.root / "data" / name

    @property
    def data_report(self) -> Path:
        """What was read, dropped and why, as JSON."""
        return self.root / "data" / "report.json"

    @property
    def trials(self) -> Path:
        """One folder per trial."""
        return self.root / "trials"

    def trial(self, trial: int) -> TrialPaths:
        """Files of one trial."""
        return TrialPaths(self.trials / f"{trial:05d}")

    @property
    def lineage(self) -> Path:
        """Published checkpoints of kept proposals and of the baseline."""
        return self.root / "lineage"

    @property
    def replay(self) -> Path:
        """Full runs of the best lineage."""
        return self.root / "replay"

    def full_run(
        self, name: str, budget: str, config_digest: str, other_seal: str | None, start: int | None = None
    ) -> ReplayPaths:
        """Files of one full run. ``other_seal`` is that of another tool than the study's: it goes on with nothing.

        ``start`` is the node before the last config of a schedule; the same config may stand at several places of one.
        """
        after = "" if start is None else f"-after-{start}"
        tool = "" if other_seal is None else f"-{other_seal[:12]}"
        return ReplayPaths(self.replay / f"{budget}-{name}-{config_digest[:12]}{after}{tool}")

    @property
    def report_html(self) -> Path:
        """The report."""
        return self.root / "report.html"


def folder_of(name_or_path: str | Path, runs: Path = RUNS) -> Path:
    """Return the folder that a study's name (below ``runs``) or path stands for, whether it exists or not.

    A `Path` is a path: it no longer shows whether a person wrote ``./night`` or ``night``.
    """
    if isinstance(name_or_path, Path):
        return name_or_path
    text = name_or_path
    if not text.strip():
        raise BadInput("a study needs a name")
    return Path(text) if os.sep in text or text in (".", "..") else runs / text


def names(runs: Path = RUNS) -> list[str]:
    """Return the names of all studies below ``runs``, sorted."""
    if not runs.is_dir():
        return []
    return sorted(p.name for p in runs.iterdir() if not p.name.startswith(".") and StudyPaths(p).study_toml.is_file())


def find(name_or_path: str | Path, runs: Path = RUNS) -> StudyPaths:
    """Return the paths of an existing study; `BadInput` gives the nearest name and how to make one."""
    paths = StudyPaths(folder_of(name_or_path, runs))
    if paths.study_toml.is_file() and paths.ledger.is_file():
        return paths
    if paths.study_toml.is_file() or paths.ledger.is_file():
        missing = paths.ledger if paths.study_toml.is_file() else paths.study_toml
        raise BadInput(f"study {paths.name} is damaged: {missing} is missing")
    from harness.config import nearest  # only on the way to an error: who knows the way must not wait for pydantic

    known = names(runs)
    there = f"; there are {', '.join(known)}" if known else f"; `overnight init {paths.name}` makes one"
    raise BadInput(f"there is no study {os.fspath(name_or_path)!r}{nearest(paths.name, known)}{there}")
