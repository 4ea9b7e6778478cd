"""What every driver does first: make sure that a dead one's processes are gone, and close the rows it left open."""

from __future__ import annotations

from harness.ledger import Ledger
from harness.queries import Reader
from harness.records import Failed, TrialState
from harness.rows import Ending
from harness.walk import DRIVER_DIED
from harness.warm import sweep


def recover(mark: str, ledger: Ledger, reader: Reader) -> None:
    """Kill what still runs under the study's mark, and close every open row as lost. The caller holds the lock."""
    killed = sweep(mark)
    if killed:
        ledger.event("swept", f"{killed} processes of a dead driver were killed", {"processes": killed})
    calls = ledger.lose_calls()
    if calls:
        ledger.event("calls_lost", f"{calls} calls to a language model were in flight; they count at their worst case")
    for trial in reader.open_trials():
        lost = Failed(
            state=TrialState.LOST,
            error_class=DRIVER_DIED,
            error_text="its driver ended without closing it; the same config and seed run again",
        )
        ledger.close_trial(trial.id, Ending(failed=lost))
