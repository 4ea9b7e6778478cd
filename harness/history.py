"""What a proposer is given: the ledger's rows with what the study's files and the machine add to them.

One function for the driver, for `overnight briefing` and for coding agents, so that what a person reads is what a model
is shown.
"""

from __future__ import annotations

from dataclasses import replace

from harness import origin
from harness.errors import BadInput
from harness.noise import smallest_provable
from harness.proposers import load_proposer
from harness.queries import Reader
from harness.records import History, ProposalState
from harness.study import Study
from harness.studyfile import Agent


def history_of(study: Study, reader: Reader) -> History:
    """Return all that a proposer may know, as of one moment.

    Running proposals come without their trials, so that the answer is the same whether it is asked for when they begin
    or, after a crash, in their middle.
    """
    policy = study.policy
    with reader.snapshot():
        noise = reader.noise()
        history = reader.history(
            knobs=policy.knobs,
            max_changes=policy.proposals.max_changes,
            minimum_steps=policy.proposals.minimum_steps,
            smallest_provable=None if noise is None else smallest_provable(noise, policy.judge),
            program=_program(study),
            device_memory_bytes=origin.device_memory_bytes(study.device),
        )
    past = (replace(p, trials=()) if p.state is ProposalState.RUNNING else p for p in history.past)
    return replace(history, past=tuple(past), base=study.base, lengths=study.lengths)


def briefing_of(study: Study, reader: Reader) -> str:
    """Return what the study's proposer would show a language model now.

    The default proposer speaks for one that lacks something of its own here, such as a script.
    """
    try:
        proposer = load_proposer(study.file.agent.proposer)
    except BadInput:
        proposer = load_proposer(Agent().proposer)
    try:
        return proposer.briefing(history_of(study, reader)).rstrip("\n") + "\n"
    finally:
        proposer.close()


def _program(study: Study) -> str:
    """Return what the owner tells a model; nothing if the file was removed.

    A stray byte, or something else in the file's place, must not end a night: it is said where the text would stand.
    """
    path = study.paths.program_md
    try:
        if path.exists() and not path.is_file():
            return f"({path.name} is no file and could not be read)"
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"({path.name} could not be read: {error.strerror})"
