"""The commands that only read: status, ledger, show, lineage, compare, briefing.

They write nothing and import nothing slow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from harness.errors import BadInput
from harness.locks import driver_lives
from harness.paths import StudyPaths, find, names
from harness.queries import Reader
from harness.records import Role, Trial
from harness.report import documents, summary

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from harness.memory import Held


PIPED_COLUMNS = 160
"""Width where the output is no terminal: wide enough that `grep` finds a row in one line."""


LARGEST_ROW = 2**63 - 1
"""SQLite's largest integer."""


def chosen(name: str | None) -> StudyPaths:
    """Return the study that a command is about: the named one, else the only one, else the only one that runs."""
    if name is not None:
        return find(name)
    known = names()
    if not known:
        raise BadInput("there is no study under runs/: `overnight run` makes and runs the demo")
    if len(known) == 1:
        return find(known[0])
    running = [name for name in known if driver_lives(find(name))]
    if len(running) == 1:
        return find(running[0])
    raise BadInput(f"which study? There are {', '.join(known)}")


def console(file: TextIO | None = None) -> Console:
    """Return where people read (absent: standard output): no markup, what proposers and jobs wrote is data."""
    from rich.console import Console

    from harness.output import trimmed

    out = file or sys.stdout
    width = None if out.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    return Console(file=out if out.isatty() else trimmed(out), width=width, markup=False, highlight=False, emoji=False)


def put(document: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def status(arguments: argparse.Namespace) -> int:
    """Print how a study stands."""
    facts = _facts(chosen(arguments.study))
    if arguments.json:
        from harness.report import sources

        rows = [sources.document(row) for row in sources.sources(facts)]
        put(summary.summarise(facts) | {"sources": rows, "insights": list(facts.insights)})
    else:
        from harness.report import table

        _print(table.status(facts))
    return 0


def ledger(arguments: argparse.Namespace) -> int:
    """Print every proposal."""
    facts = _facts(chosen(arguments.study))
    if arguments.json:
        put(documents.ledger(facts))
    else:
        from harness.report import table

        out = console()
        out.print(table.ledger(facts, out.width))
    return 0


def lineage(arguments: argparse.Namespace) -> int:
    """Print the way from the baseline to the incumbent."""
    facts = _facts(chosen(arguments.study))
    if arguments.json:
        put(documents.lineage(facts))
    else:
        from harness.report import table

        out = console()
        out.print(table.lineage(facts, out.width))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print one trial, or one proposal with its trials."""
    paths, what = chosen(arguments.study), arguments.what
    with Reader(paths.ledger) as reader:
        number = proposal_number(what)
        if number is not None:
            past = reader.proposal(number)
            facts = summary.gather(reader, driver_lives=driver_lives(paths))
            taken_out = summary.ablated(facts).get(past.number)
            if arguments.json:
                trials = {"trials": [documents.trial(trial) for trial in past.trials]}
                put(documents.proposal(past) | documents.without(taken_out) | trials)
                return 0
            from harness.report import table

            nodes = {standing.node: standing.config for standing in reader.lineage()}
            parent = None if past.parent is None else nodes.get(past.parent)
            _print(table.proposal(past, parent, taken_out, facts.study, facts.guard))
            return 0
        trial = named_trial(reader, what)
        sensors, study, guard = reader.sensors(trial.id), reader.study(), reader.guard()
        held = _held(paths, reader, trial)
    if arguments.json:
        read = {"device_celsius": sensors.celsius, "device_watts": sensors.watts}
        put(documents.trial(trial) | read | documents.memory(trial, held))
    else:
        from harness.report import table

        _print(table.trial(trial, sensors, study, guard, held))
    return 0


def _held(paths: StudyPaths, reader: Reader, trial: Trial) -> Held | None:
    """Return what a trial was expected to hold in memory; None where nothing is trained or the study cannot say.

    Its files are the owner's to edit: a trial is shown whatever became of them (`overnight run` says what is wrong).
    """
    from harness.memory import Gauge, Held
    from harness.sizes import BaseFacts
    from harness.study import read_lengths
    from harness.studyfile import FRESH, StudyFile

    if trial.role is Role.REFERENCE or trial.device is None or not paths.study_toml.exists():
        return None
    try:
        file = StudyFile.read(paths.study_toml)
        asked, lengths = file.study, read_lengths(paths, file)
        base = BaseFacts.read(paths.base) if asked.model != FRESH else None
    except BadInput:
        return None
    others = (one for one in reader.trials(curves=False) if one.id != trial.id)
    gauge = Gauge.learned(
        others,
        vocabulary=asked.vocabulary,
        base=base,
        device=trial.device,
        memory_bytes=None,
        lengths=lengths,
    )
    return Held(estimate=gauge.estimate(trial.config), correction=gauge.correction)


def briefing(arguments: argparse.Namespace) -> int:
    """Print what the study's proposer would show a language model now."""
    from harness.history import briefing_of
    from harness.study import load

    paths = chosen(arguments.study)
    with Reader(paths.ledger) as reader:
        sys.stdout.write(briefing_of(load(paths.root), reader))
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Print two scored trials side by side."""
    paths = chosen(arguments.study)
    lives = driver_lives(paths)
    with Reader(paths.ledger) as reader, reader.snapshot():
        a, b = named_trial(reader, arguments.a), named_trial(reader, arguments.b)
        facts = summary.gather(reader, driver_lives=lives)
        nats = [reader.document_nats(trial.id) if trial.score is not None else () for trial in (a, b)]
    found = documents.compare(facts, a, b, *nats)
    if arguments.json:
        put(documents.comparison(found))
    else:
        from harness.report import table

        _print(table.comparison(found, facts.study))
    return 0


def _facts(paths: StudyPaths) -> summary.Facts:
    lives = driver_lives(paths)
    with Reader(paths.ledger) as reader:
        return summary.gather(reader, driver_lives=lives)


def proposal_number(what: str) -> int | None:
    """Return the number of a proposal's name like ``p7``; None for a name that is none."""
    digits = what[1:]
    return _number(digits) if what[:1] in ("p", "P") and digits.isascii() and digits.isdigit() else None


def named_trial(reader: Reader, what: str) -> Trial:
    """Return the trial of a number, the untouched ``base``, or the one that stands for ``best`` or ``baseline``."""
    if what == "base":
        reference = reader.reference()
        if reference is None:
            raise BadInput("there is no untouched base: a fresh model is trained, or nothing was scored yet")
        return reference
    if what in ("best", "baseline"):
        standing = reader.incumbent() if what == "best" else reader.baseline()
        if standing is None or standing.trial is None:
            raise BadInput(f"there is no {what} yet: the baseline has no score")
        return reader.trial(standing.trial)
    if not (what.isascii() and what.isdigit()):
        raise BadInput(
            f"{what[:40]!r} is no trial: give its number, best, baseline or base (proposals: `overnight show p7`)"
        )
    return reader.trial(_number(what))


def _number(digits: str) -> int:
    """Return the number; `BadInput` for one that no row of a ledger can have."""
    number = int(digits[:20])
    if number > LARGEST_ROW:
        raise BadInput(f"there is no number {digits[:40]}: it is larger than any row's")
    return number


def _print(content: RenderableType) -> None:
    console().print(content)
