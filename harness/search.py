"""The loop. It reads like the walk of one trial in the design, from top to bottom.

Everything that must survive is in the ledger before the next line runs; the loop itself holds no state that a restart
could miss. ``kill -9`` at any line costs at most the running trial.
"""

from __future__ import annotations

import datetime
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, assert_never

from harness import checkpoints
from harness.ahead import Ahead
from harness.config import TrialConfig, flatten
from harness.desk import StudyDesk
from harness.errors import OvernightError, StoppedEarly
from harness.expectations import expectations
from harness.history import history_of
from harness.launch import Launcher
from harness.ledger import Ledger
from harness.limits import Limits, driver_seconds, reached
from harness.locks import device_lock, driver_lock
from harness.owner import Ended, Owner, Stopped
from harness.policy import Refusal
from harness.proposers import load_proposer
from harness.proposing import not_continued
from harness.queries import GUARD_EVENT, Reader
from harness.records import (
    BASELINE,
    UNCOUNTED,
    Decision,
    Guard,
    History,
    Past,
    Proposal,
    ProposalState,
    Role,
    Standing,
    Trial,
    Verdict,
)
from harness.recovery import recover
from harness.report import words
from harness.report.summary import gather, warnings
from harness.rows import NewNode
from harness.study import Study
from harness.studyfile import Agent
from harness.terms import Proposer, Terms
from harness.trials import TrialRunner
from harness.view import View
from harness.walk import Repair, Run, consecutive_failures, failed_replicates, next_step

BASELINE_REPLICATES = 3
"""Seeds that the baseline runs with before anything is judged against it."""
FAILURES_BEFORE_CANARY = 3
"""Failed trials in a row after which the baseline runs again: is it the configs or the machine?"""
ANSWER_POLL_SECONDS = 0.2
"""How often the owner's wishes are looked at while nothing runs because the proposer still thinks."""
LAST_ANSWER_SECONDS = 5.0
"""How long a verdict waits for an answer that was asked for before it: with it, the answer would be another."""
FRUITLESS_LIMIT = 50
"""Proposals in a row that lead to no trial before the space counts as exhausted."""


def search(study: Study, *, limits: Limits, agent: Agent, cold: bool, view: View) -> Stopped:
    """Run the study until a limit is reached, the owner ends it or going on makes no sense.

    Raises `StudyLocked` if another driver owns the study, `SealBroken` if something a score depends on has changed,
    `WrongUse` if the proposer lacks a key, a model or its price.
    """
    with ExitStack() as stack:
        stack.enter_context(driver_lock(study.paths))
        stack.enter_context(device_lock(study.device))
        ledger = stack.enter_context(Ledger.open(study.paths.ledger))
        reader = stack.enter_context(Reader(study.paths.ledger))
        study.seal.verify(thorough=True)
        recover(study.mark, ledger, reader)  # before our own nursery carries the mark that is swept
        desk = StudyDesk(ledger, study.paths, agent)
        chosen = load_proposer(agent.proposer)
        stack.callback(chosen.close)
        desk.check_price()
        chosen.begin(Terms(llm=agent.llm, desk=desk))  # what is missing is told before the nursery warms up
        note_agent(agent, ledger, reader)
        launcher = stack.enter_context(
            Launcher(bytecode=study.paths.bytecode, mark=study.mark, cold=cold, threads=study.threads)
        )
        owner = Owner(study.paths, ledger, view)
        stack.enter_context(owner.signals())
        trials = TrialRunner(study, ledger, reader, launcher, owner, view)
        loop = Loop(study, limits, ledger, reader, chosen, trials, owner, view, desk)
        asked = chosen.model
        for line in expectations(study, reader, launcher.sandbox_tier, limits, agent, asked=asked):
            view.say(line)
        return loop.run()


def note_agent(agent: Agent, ledger: Ledger, reader: Reader) -> None:
    """Book who proposes and under which caps, where that is news: these settings may change between runs."""
    now = agent.model_dump()
    before = reader.events("agent")
    if not before or before[-1].data != now:
        model = f" with {agent.llm}" if agent.llm else ""
        ledger.event("agent", f"proposer {agent.proposer}{model}", now)


class Admitted(NamedTuple):
    """A proposal that may run: against this lineage node, as this config."""

    parent: int
    config: TrialConfig


class Rejection(NamedTuple):
    """A proposal that may not run, and why."""

    state: ProposalState
    reason: str


class Loop:
    """One driver's run of one study."""

    def __init__(
        self,
        study: Study,
        limits: Limits,
        ledger: Ledger,
        reader: Reader,
        proposer: Proposer,
        trials: TrialRunner,
        owner: Owner,
        view: View,
        desk: StudyDesk,
    ) -> None:
        self.study = study
        self.limits = limits
        self.ledger = ledger
        self.reader = reader
        self.proposer = proposer
        self.trials = trials
        self.owner = owner
        self.view = view
        self.desk = desk
        self.ahead = Ahead(proposer)
        self.rules = study.policy.judge
        self.decided = 0
        self.began_seconds = time.monotonic()
        self.earlier_seconds = 0.0

    # --- the loop ---

    def run(self) -> Stopped:
        """Loop until something ends it, and book the driver's time and the reason."""
        self.earlier_seconds = driver_seconds(self.reader.events(), self.reader.trials())
        self.ledger.event("run_began", f"driver {os.getpid()} began", {"pid": os.getpid()})
        stopped = Stopped(reason="the driver failed", exit_code=1)
        try:
            stopped = self.loop()
        except Ended as ended:
            stopped = ended.stopped
        except OvernightError as error:
            self.ledger.event("stopped_early", str(error), {"class": type(error).__name__})
            stopped = Stopped(reason=str(error).rstrip("."), exit_code=error.exit_code)
        finally:
            seconds = time.monotonic() - self.began_seconds
            self.ledger.event("run_ended", stopped.reason, {"seconds": seconds, "exit_code": stopped.exit_code})
        self.view.say(f"Stopped: {stopped.reason}.")
        return stopped

    def loop(self) -> Stopped:
        """Run the untouched base where there is one, the baseline, then proposal after proposal."""
        while (reason := self.limit()) is None:
            step = self.baseline_step()
            if step is not None:
                self.baseline_trial(step)
                continue
            step = self.continued_step()
            if step is not None:
                self.trials.run(step)
                continue
            past = next(iter(self.reader.running()), None)
            control = self.control_step() if past is None else None
            if control is not None:
                self.trials.run(control)
                continue
            past = past or self.next_proposal()
            if past is None:
                return Stopped(reason=self.exhausted(), exit_code=0)
            if past.state is ProposalState.RUNNING:
                self.walk(past)
        return Stopped(reason=reason, exit_code=0)

    # --- baseline ---

    def baseline_step(self) -> Run | None:
        """Return the next trial of the untouched base or of the baseline, or None when there are enough."""
        if self.study.base is not None and self.reader.reference() is None:
            return Run(role=Role.REFERENCE, config=self.study.baseline, replicate=0, proposal=None)
        self.note_guard()
        trials = self.reader.trials()
        scores = {trial.replicate for trial in self.trials_of(self.study.baseline, None) if trial.score is not None}
        if scores and self.reader.baseline() is None:
            self.seat_baseline()
        for replicate in range(BASELINE_REPLICATES):
            if replicate not in scores:
                return Run(role=Role.BASELINE, config=self.study.baseline, replicate=replicate, proposal=None)
        if consecutive_failures(trials) >= FAILURES_BEFORE_CANARY:
            return Run(role=Role.CANARY, config=self.study.baseline, replicate=max(scores) + 1, proposal=None)
        return None

    def baseline_trial(self, step: Run) -> None:
        """Run the baseline; if even that fails the machine is at fault, not the proposals."""
        trial = self.trials.run(step)
        if self.trials.gave_up(trial):
            raise StoppedEarly(
                f"the {step.role.value} failed: trial {trial.id} ended {trial.state.value} ({trial.error_text});"
                f" see {self.study.paths.trial(trial.id).log}"
            )
        if step.role is Role.BASELINE and self.baseline_step() is None:
            for line in warnings(gather(self.reader, driver_lives=True)):
                self.view.say(line)

    def note_guard(self) -> None:
        """Write down once what the guard set allows, for readers that have nothing but the ledger."""
        guard = self.guard()
        if guard is None or self.reader.events(GUARD_EVENT):
            return
        text = (
            f"the untouched base scores {guard.reference:.4f} bits per byte on the guard set; a config may be"
            f" {guard.max_regression:g} worse"
        )
        self.ledger.event(GUARD_EVENT, text, {"reference": guard.reference, "max_regression": guard.max_regression})

    def guard(self) -> Guard | None:
        """Return the limit on the guard set, where the study has one."""
        asked = self.study.file.eval.guard
        return None if asked is None else self.reader.guard(asked.max_regression)

    def seat_baseline(self) -> None:
        """Make the baseline's first replicate the root of the lineage; after a crash as well as right away."""
        first = next(
            trial for trial in self.trials_of(self.study.baseline, None, every_epoch=True) if trial.score is not None
        )
        digest = checkpoints.publish(self.study.paths, first.id, BASELINE, expected=first.checkpoint_digest)
        self.ledger.seat_baseline(first.config, first.id, digest)

    def trials_of(self, config: TrialConfig, start: int | None, *, every_epoch: bool = False) -> list[Trial]:
        """Return the search's trials of a config from one start, in the current epoch or in every one."""
        wanted, epoch = (config, start, str(self.study.budget)), self.reader.epoch()
        return [
            trial
            for trial in self.reader.trials()
            if (trial.config, trial.start, trial.budget) == wanted and trial.role not in UNCOUNTED
            if every_epoch or trial.epoch == epoch
        ]

    def rivals(self, incumbent: Standing) -> list[Trial]:
        """Return the trials that candidates are compared with: the incumbent's, or its config continued."""
        return self.trials_of(incumbent.config, incumbent.children_start)

    def continued_step(self) -> Run | None:
        """Return the next run of the incumbent's config from its own checkpoint, or None when there are enough.

        Only where trials continue from their parent: a candidate has had one more budget of training than the incumbent
        whose checkpoint it goes on from, so it is compared with that one's config, continued as long.
        """
        incumbent = self.reader.incumbent()
        assert incumbent is not None
        if incumbent.continued is None or len(incumbent.continued) >= BASELINE_REPLICATES:
            return None
        failed = failed_replicates(self.rivals(incumbent))
        if len(failed) >= FAILURES_BEFORE_CANARY:
            raise StoppedEarly(
                f"{words.node(incumbent.node)}, continued from its own checkpoint, failed on {len(failed)} seeds: there"
                " is nothing to compare a change with; `overnight init --from` makes a study with that config as its"
                " baseline"
            )
        replicate = next(number for number in itertools.count() if number not in failed | incumbent.continued.keys())
        return _control(incumbent, replicate)

    def control_step(self) -> Run | None:
        """Return the incumbent's next control, due after every ``control_every`` decided proposals (0: never)."""
        if not self.rules.control_every:
            return None
        last = max((trial.id for trial in self.reader.trials() if trial.role is Role.CONTROL), default=0)
        since = [past for past in self.reader.past(curves=False) if past.verdict and past.trials[0].id > last]
        if len(since) < self.rules.control_every:
            return None
        incumbent = self.reader.incumbent()
        assert incumbent is not None
        return _control(incumbent, max(trial.replicate for trial in self.rivals(incumbent)) + 1)

    # --- proposals ---

    def next_proposal(self) -> Past | None:
        """Return the next proposal that passed or failed admission; None when nobody has anything left to propose."""
        self.owner.take_inbox()
        queued = self.reader.queued()
        if not queued:
            if self.fruitless() >= FRUITLESS_LIMIT:
                return None
            self.collect(self.answer())
            queued = self.reader.queued()
            if not queued:
                return None
        return self.admit(queued[0])

    def meanwhile(self) -> None:
        """While a trial runs, take the answer that has come, and ask for another if nothing of it may run.

        So that the device does not wait while a proposer that was turned away thinks again.
        """
        if not self.ahead.is_answered:
            return
        self.collect(self.ahead.take(wait_seconds=0) or ())
        for past in self.reader.queued():
            found = self.resolve(past)
            if isinstance(found, Rejection):
                self.reject(past, found)
        if self.fruitless() < FRUITLESS_LIMIT:
            self.ask_ahead()

    def ask_ahead(self) -> None:
        """Let the proposer think while trials run, unless somebody waits already.

        Also during the last proposal of this run: a run that goes on later finds what one that never ended would have
        asked for at this point.
        """
        if not (self.ahead.is_asked or self.reader.queued()):
            self.ahead.ask(self.history())

    def answer(self) -> Sequence[Proposal]:
        """Return the proposer's answer: the one it was asked for ahead, or, if that came to nothing, a new one."""
        for _ in range(2):
            if not self.ahead.is_asked:
                self.ahead.ask(self.history())
            while (proposals := self.ahead.take(wait_seconds=ANSWER_POLL_SECONDS)) is None:
                self.owner.obey()
            if proposals or self.reader.queued():
                return proposals
        return ()

    def collect(self, proposals: Sequence[Proposal]) -> None:
        """Queue what was proposed, and say what the proposer noted meanwhile."""
        for proposal in proposals:
            self.ledger.queue(proposal)
        for text in self.desk.news():
            self.view.say(text)

    def admit(self, past: Past) -> Past:
        """Turn a queued proposal into a running one, or close it with the reason."""
        found = self.resolve(past)
        if isinstance(found, Rejection):
            return self.reject(past, found)
        self.ledger.start(past.number, found.parent, found.config)
        return self.reader.proposal(past.number)

    def resolve(self, past: Past) -> Admitted | Rejection:
        """Return what a queued proposal would be if it started now."""
        nodes = {standing.node: standing.config for standing in self.reader.lineage()}
        node = past.proposal.parent if past.proposal.parent is not None else next(reversed(nodes))
        if node not in nodes:
            kept = ", ".join(map(str, sorted(nodes)))
            return Rejection(ProposalState.REFUSED, f"parent {node} is not in the lineage (nodes: {kept})")
        newest = next(reversed(nodes))
        if self.study.policy.continues and node != newest:
            return Rejection(ProposalState.STALE, not_continued(node, newest))
        flat = flatten(nodes[node])
        if past.proposal.diff and all(flat.get(name) == value for name, value in past.proposal.diff.items()):
            return Rejection(ProposalState.STALE, f"it changes nothing on its parent, node {node}")
        config = self.study.policy.admit(
            past.proposal,
            nodes[node],
            budget=self.study.budget,
            vocabulary=self.study.vocabulary,
            base=self.study.base,
            lengths=self.study.lengths,
        )
        if isinstance(config, Refusal):
            return Rejection(ProposalState.REFUSED, config.reason)
        misfit = self.study.gauge(self.reader.trials(curves=False)).misfit(config)
        if misfit is not None:
            return Rejection(ProposalState.REFUSED, misfit)
        known = self.reader.known_configs()
        if config.digest in known:
            return Rejection(ProposalState.DUPLICATE, f"its config is that of {_named(known[config.digest])}")
        return Admitted(node, config)

    def reject(self, past: Past, rejection: Rejection) -> Past:
        """Close a queued proposal that does not run."""
        self.ledger.reject(past.number, rejection.state, rejection.reason)
        closed = self.reader.proposal(past.number)
        self.view.decided(closed)
        return closed

    def walk(self, past: Past) -> None:
        """Take a running proposal to its verdict, one trial at a time."""
        while past.state is ProposalState.RUNNING:
            incumbent, noise = self.reader.incumbent(), self.reader.noise()
            assert incumbent is not None
            assert noise is not None
            step = next_step(
                past,
                incumbent,
                noise,
                self.rules,
                epoch=self.reader.epoch(),
                known=self.reader.known_configs(),
                incumbent_failed=failed_replicates(self.rivals(incumbent)),
                guard=self.guard(),
            )
            match step:
                case Run():
                    failing = consecutive_failures(self.reader.trials()) >= FAILURES_BEFORE_CANARY
                    if failing or self.limit() is not None:
                        return
                    self.ask_ahead()
                    self.trials.run(step, self.meanwhile)
                case Repair():
                    self.ledger.amend(past.number, step.config)
                    self.ledger.event("repair", f"proposal {past.number} ran out of memory", flatten(step.config))
                case Verdict():
                    self.ask_ahead()
                    self.collect(self.ahead.take(wait_seconds=LAST_ANSWER_SECONDS) or ())
                    self.decide(past, step)
                case _:
                    assert_never(step)
            past = self.reader.proposal(past.number)

    def decide(self, past: Past, verdict: Verdict) -> None:
        """Publish, then close in one transaction: a checkpoint may lack its row for a moment, never the reverse."""
        node = None
        if verdict.decision is Decision.KEPT:
            trial = self.first_replicate(past)
            digest = checkpoints.publish(self.study.paths, trial.id, past.number, expected=trial.checkpoint_digest)
            node = NewNode(trial=trial.id, checkpoint_digest=digest)
        self.ledger.decide(past.number, verdict, node)
        self.decided += 1
        self.view.decided(self.reader.proposal(past.number))
        self.prune()

    def first_replicate(self, past: Past) -> Trial:
        """Return the candidate's first scored trial after screening: it stands for the config, not the luckiest."""
        own = [t for t in past.trials if (t.config, t.start) == (past.config, past.start)]
        confirmed = [t for t in own if t.replicate > 0 and t.score is not None]
        return min(confirmed, key=lambda trial: trial.replicate)

    # --- limits and housekeeping ---

    def limit(self) -> str | None:
        """Say which limit forbids another trial."""
        return reached(
            self.limits,
            trials=self.reader.trials(),
            decided=self.decided,
            driver_seconds=self.earlier_seconds + time.monotonic() - self.began_seconds,
            now=datetime.datetime.now(datetime.UTC),
            fallback_seconds=self.study.budget.amount if self.study.budget.kind == "seconds" else 0.0,
        )

    def prune(self) -> None:
        """Drop the weights of trials that neither the lineage nor a running proposal needs."""
        checkpoints.prune(self.study.paths, self.trials.needed_trials())

    def fruitless(self) -> int:
        """Return how many proposals in a row led to no trial."""
        count = 0
        for past in reversed(self.reader.past(curves=False)):
            if past.state not in (ProposalState.REFUSED, ProposalState.DUPLICATE, ProposalState.STALE):
                break
            count += 1
        return count

    def exhausted(self) -> str:
        """Say that the proposers have nothing left."""
        return f"proposer {self.proposer.name} has nothing new to propose ({self.fruitless()} fruitless in a row)"

    def history(self) -> History:
        """Return what a proposer is given."""
        return history_of(self.study, self.reader)


def _control(incumbent: Standing, replicate: int) -> Run:
    return Run(
        role=Role.CONTROL,
        config=incumbent.config,
        replicate=replicate,
        proposal=incumbent.node or None,
        start=incumbent.children_start,
    )


def _named(number: int) -> str:
    return "the baseline" if number == BASELINE else f"proposal {number}"
