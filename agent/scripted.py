"""Proposals from a file, one JSON object per line: for tests, for examples, and for a list that a person wrote.

Nothing is stored: how many scripted proposals the history holds says which line comes next, so that a search that was
killed goes on where it was. A line that is no proposal is an error before anything runs; a proposal that the policy
refuses is a row like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from agent.offline import OfflineProposer
from harness.config import explain
from harness.errors import BadInput
from harness.records import History, Proposal

SCRIPT = "OVERNIGHT_SCRIPT"
"""Environment variable that names the file, where no argument does."""


class ScriptedProposer(OfflineProposer):
    """Hands out the lines of a JSON-lines file in their order; their ``source`` is always ``scripted``."""

    name = "scripted"

    def __init__(self, script: Path | None = None) -> None:
        """Read the whole file; `BadInput` names the line that is no proposal."""
        if script is None:
            named = os.environ.get(SCRIPT)
            if not named:
                raise BadInput(f"the scripted proposer needs a file of proposals: set {SCRIPT} to its path")
            script = Path(named)
        try:
            lines = script.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise BadInput(f"script {script} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BadInput(f"script {script} is no UTF-8 text") from error
        self._proposals = [
            _parse(line, f"script {script}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
        ]

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        """Return the next ``count`` lines; nothing after the last one."""
        done = sum(past.proposal.source == self.name for past in history.past)
        return self._proposals[done : done + count]


def _parse(line: str, where: str) -> Proposal:
    try:
        table = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where} is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise BadInput(f"{where} is no JSON object with diff, rationale and watch")
    try:
        return Proposal.model_validate({**table, "source": ScriptedProposer.name})
    except ValidationError as error:
        raise BadInput(f"{where} is no proposal: {explain(error)}") from error
