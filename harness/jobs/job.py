"""What a job is told: the two orders that the driver hands to a child. No torch here, both sides import it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from harness.config import TrialConfig
from harness.records import AbortIf, Record


class EvalSettings(Record):
    """Constants of the study's evaluation; no config can touch them."""

    context: Annotated[int, Field(ge=8)]
    """Tokens of context in a scoring window, the separator included."""
    stride: Annotated[int, Field(ge=1)]
    """New tokens that each further window of a long document scores; at most ``context``."""
    micro_batch: Annotated[int, Field(ge=1)] = 16
    """Windows per forward pass to begin with; halved when memory runs out. The score does not depend on it."""
    precision: Literal["fp32"] = "fp32"


class TrainJob(Record):
    """Train one config with one seed for one budget."""

    kind: Literal["train"] = "train"
    config: TrialConfig
    seed: Annotated[int, Field(ge=0)]
    budget: str
    """Canonical text of a ``frozen.timer.Budget``."""
    train: Path
    """Folder of the encoded training split."""
    probe: Path
    tokenizer: Path
    folder: Path
    """The only place that the child may write; the model goes to ``folder/model``."""
    evaluation: EvalSettings
    """For the probe points."""
    probe_points: Annotated[int, Field(ge=0)] = 10
    """Probe evaluations spread evenly over the budget."""
    warmup_cap_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Warm-up passes beyond this are charged to a budget in seconds."""
    abort_if: AbortIf | None = None
    """Give up at the first probe point that meets this."""
    resumable: bool = False
    """Write checkpoints at the probe points and go on from the newest one (replay's full runs)."""
    device: str
    """``cpu`` or ``cuda:0``."""
    threads: Annotated[int, Field(ge=1)]


class ScoreJob(Record):
    """Score saved weights on one split. The model is rebuilt from the config; only tensors are read from the folder."""

    kind: Literal["score"] = "score"
    config: TrialConfig
    weights: Path
    """Folder that holds ``model.safetensors``."""
    split: Path
    tokenizer: Path
    evaluation: EvalSettings
    device: str
    threads: Annotated[int, Field(ge=1)]


Job = Annotated[TrainJob | ScoreJob, Field(discriminator="kind")]
