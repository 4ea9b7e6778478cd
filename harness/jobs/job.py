"""What a job is told: the three orders that the driver hands to a child. No torch here, both sides import it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from harness.config import Task, TrialConfig
from harness.records import AbortIf, Record


class EvalSettings(Record):
    """Constants of the study's evaluation; no config can touch them."""

    context: Annotated[int, Field(ge=8)]
    """Tokens of context in a scoring window, the separator included."""
    stride: Annotated[int, Field(ge=1)]
    """New tokens that each further window of a long document scores; at most ``context``."""
    micro_batch: Annotated[int, Field(ge=1)] = 16
    """Windows per forward pass to begin with; halved when memory runs out. The score does not depend on it."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What the weights are held in while they are scored; log-softmax and sums are fp32 and fp64 in any case."""
    preference_beta: Annotated[float, Field(gt=0)] = 0.1
    """Of the score of preference pairs; what training uses is the config's."""


class TrainJob(Record):
    """Train one config with one seed for one budget."""

    kind: Literal["train"] = "train"
    task: Task = "pretrain"
    config: TrialConfig
    base: Path | None = None
    """Folder of the prepared base model; None for a fresh one."""
    start: Path | None = None
    """Model folder to go on from in the place of the base itself (a parent's checkpoint); same method and shape."""
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
    """Score saved weights on one split. The model is rebuilt from the config; only tensors are read from the folder.

    Preference pairs are scored against the base model, which the same child scores first. A guard set is scored in the
    same child, because loading a base model twice can take longer than scoring it.
    """

    kind: Literal["score"] = "score"
    task: Task = "pretrain"
    config: TrialConfig
    base: Path | None = None
    """Folder of the prepared base model; None for a fresh one."""
    weights: Path | None
    """Folder of ``model.safetensors`` or ``adapter_model.safetensors``; None: the untrained base model itself."""
    split: Path
    guard: Path | None = None
    """Another split, of plain text whatever the task, that the same weights are scored on."""
    tokenizer: Path
    evaluation: EvalSettings
    device: str
    threads: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _something_to_score(self) -> Self:
        if self.weights is None and self.base is None:
            raise ValueError("neither weights nor a base model to score")
        return self


class MergeJob(Record):
    """Add an adapter to its base model for good, and measure what that changed.

    A base that was trained on in 4 bits is merged unquantized: the adapter was trained to make up for the rounding, so
    the whole scores otherwise than its parts, and both scores are reported.
    """

    kind: Literal["merge"] = "merge"
    config: TrialConfig
    base: Path
    weights: Path
    """Folder of ``adapter_model.safetensors``."""
    split: Path
    """What both are scored on."""
    tokenizer: Path
    folder: Path
    """The only place that the child may write; the model goes to ``folder/model``, in fp32."""
    evaluation: EvalSettings
    device: str
    threads: Annotated[int, Field(ge=1)]


Job = Annotated[TrainJob | ScoreJob | MergeJob, Field(discriminator="kind")]
