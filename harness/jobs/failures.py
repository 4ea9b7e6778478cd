"""Which exceptions of a job say something about its config, and what they are called in the ledger."""

from __future__ import annotations

from frozen.timer import BudgetTooSmall
from harness.records import TrialState

_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class Diverged(RuntimeError):
    """The loss or the gradients are NaN, infinite or far above what guessing would give."""


class Aborted(RuntimeError):
    """The proposal's own condition for giving up is met; that says nothing about where the config would have ended."""


class WeightsRefused(ValueError):
    """The saved weights are not those of the config's model."""


class ConfigRefused(ValueError):
    """The config cannot be trained here: a package is missing, or two of its values exclude each other."""


def state_of(error: BaseException) -> TrialState:
    """Return the state of a trial that ended with this exception; what is not known is a crash."""
    from frozen.evaluate import EvaluationRefused  # imports torch, which the driver does not

    if isinstance(error, Diverged):
        return TrialState.DIVERGED
    if isinstance(error, Aborted):
        return TrialState.STOPPED
    if isinstance(error, BudgetTooSmall | EvaluationRefused | WeightsRefused | ConfigRefused):
        return TrialState.INVALID
    if is_out_of_memory(error):
        return TrialState.OUT_OF_MEMORY
    return TrialState.CRASHED


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the device or the machine had no memory left; torch has a class for the GPU, only text for a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _MEMORY_PHRASES)
