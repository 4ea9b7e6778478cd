"""Finds proposers by the entry-point group ``overnight.proposers``, so that anyone's package can add one."""

from __future__ import annotations

import functools
import importlib.metadata
import re

from harness.config import nearest
from harness.errors import BadValue, WrongUse
from harness.terms import Proposer

GROUP = "overnight.proposers"
HUMAN = "human"
"""Source of a proposal by a person who gave no other name."""
_OUTSIDER = re.compile(r"[A-Za-z0-9_-]{1,40}")


@functools.cache
def proposer_names() -> tuple[str, ...]:
    """Return the names of all installed proposers; looked up once, because it reads every package's metadata."""
    return tuple(sorted(point.name for point in importlib.metadata.entry_points(group=GROUP)))


def load_proposer(name: str) -> Proposer:
    """Return a new proposer; `WrongUse` names the installed ones if there is none of that name."""
    points = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if name not in points:
        raise WrongUse(f"unknown proposer {name!r}{nearest(name, points)} (installed: {', '.join(sorted(points))})")
    proposer: Proposer = points[name].load()()
    return proposer


def outsider(name: str) -> str:
    """Return the name of a person or an agent that speaks from outside; `BadValue` for one that they may not bear.

    Win rates, shares and costs are counted by source, so nobody from outside may pose as a proposer of the study.
    """
    if not _OUTSIDER.fullmatch(name):
        raise BadValue(f"{name[:60]!r} cannot be a source: up to 40 letters, digits, dashes and underscores")
    if name.lower() in map(str.lower, proposer_names()):
        raise BadValue(f"{name!r} is the name of a proposer of our own: choose another source")
    return name
