"""What a proposer is given: the ledger's rows with what the study's files and the machine add to them.

One function for the driver and for `overnight briefing`, so that what a person reads is what a model is shown.
"""

from __future__ import annotations

from harness import origin
from harness.errors import BadInput
from harness.noise import smallest_provable
from harness.queries import Reader
from harness.records import History
from harness.study import Study


def history_of(study: Study, reader: Reader) -> History:
    """Return all that a proposer may know, as of one moment; `BadInput` if program.md is there and cannot be read."""
    policy = study.policy
    with reader.snapshot():
        noise = reader.noise()
        return reader.history(
            knobs=policy.knobs,
            max_changes=policy.proposals.max_changes,
            minimum_steps=policy.proposals.minimum_steps,
            smallest_provable=None if noise is None else smallest_provable(noise, policy.judge),
            program=_program(study),
            device_memory_bytes=origin.device_memory_bytes(study.device),
        )


def _program(study: Study) -> str:
    """Return what the owner tells a model; nothing if the file was removed. A stray byte must not end a night."""
    path = study.paths.program_md
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
