"""Every error the harness raises.

::

    OvernightError                  something a person can act on; the command line prints it as one sentence
    ├── WrongUse                    the request cannot be carried out as written (exit code 2)
    │   ├── BadInput                a file, source or value given by a person is not usable
    │   ├── UnknownKnob             a knob that the policy does not have
    │   └── BadValue                a knob's value outside its type or bounds
    ├── CheckFailed                 a promise is broken: seal, ledger or score (exit code 1)
    │   ├── SealBroken              something that a score depends on has changed
    │   └── LedgerBroken            the ledger contradicts itself
    ├── StudyLocked                 another driver owns the study (exit code 2)
    ├── CannotStart                 no job can be started on this machine (exit code 2)
    ├── StoppedEarly                the search ended before its totals: canary, disk (exit code 3)
    └── SpendingCapReached          a call to a language model could pass what the owner allows; never ends a search

A job that fails is no error but a value, ``harness.records.Failed``.
"""


class OvernightError(Exception):
    """Something a person can act on; its text says what was wrong and what to do."""

    exit_code = 1


class WrongUse(OvernightError):
    """The request cannot be carried out as it is written."""

    exit_code = 2


class BadInput(WrongUse):
    """A file, source or value given by a person is not usable."""


class UnknownKnob(WrongUse):
    """A knob that the policy does not have."""


class BadValue(WrongUse):
    """A knob's value is outside its type or bounds."""


class CheckFailed(OvernightError):
    """A promise is broken: seal, ledger or score."""


class SealBroken(CheckFailed):
    """Something that a score depends on has changed since it was sealed."""


class LedgerBroken(CheckFailed):
    """The ledger contradicts itself."""


class StudyLocked(WrongUse):
    """Another driver owns the study."""


class CannotStart(OvernightError):
    """No job can be started on this machine: its interpreter, packages or sandbox fail before any training."""

    exit_code = 2


class StoppedEarly(OvernightError):
    """The search ended before its totals were reached; the reason is in the ledger."""

    exit_code = 3


class SpendingCapReached(OvernightError):
    """A call to a language model could pass what the owner allows; the search goes on without it."""
