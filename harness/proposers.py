"""Finds proposers by the entry-point group ``overnight.proposers``, so that anyone's package can add one."""

from __future__ import annotations

import importlib.metadata

from harness.config import nearest
from harness.errors import WrongUse
from harness.records import Proposer

GROUP = "overnight.proposers"


def proposer_names() -> list[str]:
    """Return the names of all installed proposers."""
    return sorted(point.name for point in importlib.metadata.entry_points(group=GROUP))


def load_proposer(name: str) -> Proposer:
    """Return a new proposer; `WrongUse` names the installed ones if there is none of that name."""
    points = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if name not in points:
        raise WrongUse(f"unknown proposer {name!r}{nearest(name, points)} (installed: {', '.join(sorted(points))})")
    proposer: Proposer = points[name].load()()
    return proposer
