"""The commands that only read: status, ledger, show, lineage, compare, briefing.

They write nothing and import nothing slow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from harness.errors import BadInput
from harness.locks import driver_lives
from harness.paths import StudyPaths, find, names
from harness.queries import Reader
from harness.records import Trial
from harness.report import documents, summary

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from harness.records import Proposer

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


def console() -> Console:
    """Return where people read: no markup, because what proposers and jobs wrote is data."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    return Console(width=width, markup=False, highlight=False, emoji=False)


def put(document: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def status(arguments: argparse.Namespace) -> int:
    """Print how a study stands."""
    facts = _facts(chosen(arguments.study))
    if arguments.json:
        put(summary.summarise(facts))
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
        if what[:1] in "pP" and what[1:].isdigit():
            past = reader.proposal(_number(what[1:]))
            if arguments.json:
                put(documents.proposal(past) | {"trials": [documents.trial(trial) for trial in past.trials]})
                return 0
            from harness.report import table

            nodes = {standing.node: standing.config for standing in reader.lineage()}
            _print(table.proposal(past, None if past.parent is None else nodes.get(past.parent)))
            return 0
        trial = _trial(reader, what)
    if arguments.json:
        put(documents.trial(trial))
    else:
        from harness.report import table

        _print(table.trial(trial))
    return 0


def briefing(arguments: argparse.Namespace) -> int:
    """Print what the study's proposer would show a language model now."""
    from harness.history import history_of
    from harness.study import load

    paths = chosen(arguments.study)
    study = load(paths.root)
    with Reader(paths.ledger) as reader:
        history = history_of(study, reader)
    proposer = _briefed(study.file.agent.proposer)
    try:
        sys.stdout.write(proposer.briefing(history).rstrip("\n") + "\n")
    finally:
        proposer.close()
    return 0


def _briefed(name: str) -> Proposer:
    """Return the study's proposer, or the default one where that lacks a file of its own, such as a script."""
    from harness.proposers import load_proposer
    from harness.studyfile import Agent

    try:
        return load_proposer(name)
    except BadInput:
        return load_proposer(Agent().proposer)


def compare(arguments: argparse.Namespace) -> int:
    """Print two scored trials side by side."""
    paths = chosen(arguments.study)
    lives = driver_lives(paths)
    with Reader(paths.ledger) as reader, reader.snapshot():
        a, b = _trial(reader, arguments.a), _trial(reader, arguments.b)
        facts = summary.gather(reader, driver_lives=lives)
        nats = [reader.document_nats(trial.id) if trial.score is not None else () for trial in (a, b)]
    found = documents.compare(facts, a, b, *nats)
    if arguments.json:
        put(documents.comparison(found))
    else:
        from harness.report import table

        _print(table.comparison(found, facts.study.metric))
    return 0


def _facts(paths: StudyPaths) -> summary.Facts:
    lives = driver_lives(paths)
    with Reader(paths.ledger) as reader:
        return summary.gather(reader, driver_lives=lives)


def _trial(reader: Reader, what: str) -> Trial:
    """Return the trial of a number, or the one whose checkpoint stands for ``best`` or ``baseline``."""
    if what in ("best", "baseline"):
        standing = reader.incumbent() if what == "best" else reader.baseline()
        if standing is None or standing.trial is None:
            raise BadInput(f"there is no {what} yet: the baseline has no score")
        return reader.trial(standing.trial)
    if not (what.isascii() and what.isdigit()):
        raise BadInput(f"{what!r} is no trial: give its number, best or baseline (proposals: `overnight show p7`)")
    return reader.trial(_number(what))


def _number(digits: str) -> int:
    """Return the number; `BadInput` for one that no row of a ledger can have."""
    number = int(digits[:20])
    if number > LARGEST_ROW:
        raise BadInput(f"there is no number {digits[:40]}: it is larger than any row's")
    return number


def _print(content: RenderableType) -> None:
    console().print(content)
