"""Optuna as a proposer: what the history holds is told, a candidate is asked for, and the policy's limits hold.

Optuna never sees a study of ours on disk and keeps no state: every request rebuilds its study in memory from the
history, with a seed that is a function of the study's seed and the proposal's number. A restarted search therefore
proposes what an uninterrupted one would have.

What is told decides more than which sampler is asked: a failed config counts as the worst finite score seen (dropped,
it comes back; as a flat penalty, it swallows the scale), what is queued or running is told as running, and a config's
replicates count once, as their mean. A trial that its own ``abort_if`` stopped has no score and says nothing: its limit
was a guess of whoever proposed it.

A language model may go where no sampler would, to the edge of the space. What it finds there is told, but never as
worse than the worst of all that others proposed: one wild score would set the value of every failure and flatten the
scale on which the good configs differ.

A Gaussian process early; TPE (multivariate, group, constant liar) from `TPE_FROM` configs on, in turns with it when
nothing was kept for a while, and always where knobs depend on each other, which Optuna's Gaussian process cannot
model. TPE is told of a config only what means something in it, and draws a knob only after its gates.

Both run in a process of their own (`agent.sampler_worker`).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

from agent.evidence import effects, failures, scores
from agent.offline import OfflineProposer
from agent.random import draw
from agent.space import Space, config_of, from_unit, propose_each, seed, show, to_unit, trials
from harness.config import Knob, TrialConfig, Value, apply, flatten, idle
from harness.errors import BadValue
from harness.records import History, Proposal, ProposalState

Method = Literal["gp", "tpe"]

OPENING = 5
"""Configs with a score or a failure before a model of them says anything; until then draws are random."""
TPE_FROM = 50
STALLED = 12
"""Decided proposals of its own without a kept one, after which the two methods take turns."""
WIDEST_INT = 256
"""A whole number with more values than this is modelled as continuous and rounded."""
ANSWER_SECONDS = 180.0
"""A request takes about a second; a worker that needs this long is ended."""
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH")


class SamplerFailed(RuntimeError):
    """The sampler's process died or did not answer, twice in a row; the text ends with what it said last."""


class SamplerProposer(OfflineProposer):
    """Proposes what Optuna's samplers expect most of, within the diffs that the policy allows."""

    name = "sampler"

    def __init__(self) -> None:
        self._worker = Worker()

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        """Return up to ``count`` proposals; `SamplerFailed` if the worker cannot be brought to answer."""
        return propose_each(history, count, self._next)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _next(self, history: History) -> Proposal | None:
        space = Space.of(history)
        if space is None:
            return None
        scored, failed = len(scores(history)), len(failures(history))
        said = f"over {scored} scored and {failed} failed configs"
        if scored + failed >= OPENING:
            method = choose(history, scored + failed)
            question = request(space, method)
            for candidate in self._worker.ask(question):
                changed = {
                    name: number for name, number in candidate.items() if number != question["incumbent"].get(name)
                }
                step = space.step(decode(space.knobs, changed))
                if step is not None:
                    return self._proposal(space, step.diff, f"{_METHODS[method]} {said}")
            said = "nothing new was admissible among the model's candidates: drawn at random"
        else:
            said = f"too few configs for a model ({scored + failed} of {OPENING}): drawn at random"
        step = draw(space, random.Random(seed(history, self.name)))
        return None if step is None else self._proposal(space, step.diff, said)

    def _proposal(self, space: Space, diff: dict[str, Value], said: str) -> Proposal:
        changes = ", ".join(
            f"{name} {show(flatten(space.base).get(name, 'unset'))} → {show(v)}" for name, v in diff.items()
        )
        return Proposal(
            diff=diff,
            source=self.name,
            rationale=f"{said[0].upper()}{said[1:]}: {changes}.",
            watch="; ".join(space.knobs[name].watch for name in diff),
        )


_METHODS: Mapping[Method, str] = {
    "gp": "largest expected improvement of a Gaussian process",
    "tpe": "most likely among the good by tree-structured Parzen estimators",
}


def choose(history: History, configs: int) -> Method:
    """Return which sampler is asked, given how many configs there are to learn from."""
    if configs >= TPE_FROM or any(gate in history.knobs for knob in history.knobs.values() for gate in knob.when):
        return "tpe"
    own = [past for past in history.past if past.proposal.source == SamplerProposer.name and past.verdict is not None]
    kept = {effect.number for effect in effects(history) if effect.kept}
    stalled = len(own) >= STALLED and not any(past.number in kept for past in own[-STALLED:])
    return "tpe" if stalled and history.next_number % 2 else "gp"


def request(space: Space, method: Method) -> dict[str, Any]:
    """Return what the worker is asked: plain data, complete, and the same for the same history."""
    history, knobs = space.history, reachable(space)
    found, failed = scores(history), failures(history)
    standings = [*history.lineage, *(s for s in (history.baseline, history.incumbent) if s is not None)]
    configs = {trial.config.digest: trial.config for trial in trials(history)}
    configs |= {standing.config.digest: standing.config for standing in standings}
    means = {digest: sum(values) / len(values) for digest, values in found.items()}
    theirs = _of_language_models(history)
    worst = max(mean for digest, mean in means.items() if digest not in theirs)  # the baseline's at least
    means |= {digest: min(mean, worst) for digest, mean in means.items() if digest in theirs}
    told = means | dict.fromkeys(failed, worst)
    out = (config_of(past, history, space.base) for past in history.past if past.state in _OUT)
    pending = {config.digest: config for config in out if config is not None and config.digest not in told}
    return {
        "method": method,
        "seed": seed(history, SamplerProposer.name),
        "max_changes": history.max_changes,
        "knobs": [_describe(knobs[name], knobs) for name in sorted(knobs)],
        "incumbent": encode(knobs, _within(knobs, space.base)),
        "observed": [
            {"values": values, "score": told[digest]}
            for digest in sorted(told)
            if (values := encode(knobs, configs[digest])) is not None
        ],
        "pending": [values for digest in sorted(pending) if (values := encode(knobs, pending[digest])) is not None],
    }


def _of_language_models(history: History) -> frozenset[str]:
    """Return the digests of configs that ran for language models' proposals, repaired ones included."""
    theirs = (past for past in history.past if past.proposal.model is not None)
    return frozenset(trial.config.digest for past in theirs for trial in past.trials)


_OUT = (ProposalState.QUEUED, ProposalState.RUNNING)


def encode(knobs: Mapping[str, Knob], config: TrialConfig) -> dict[str, float] | None:
    """Return the active knobs of a config as the worker's numbers, or None if it lies outside the knobs' ranges.

    A config out of range comes from a repair, which halves a batch without asking the policy.
    """
    flat = flatten(config)
    without_meaning = idle(flat, knobs)
    try:
        return {
            name: _number(knob, knob.check(flat[name]))
            for name, knob in sorted(knobs.items())
            if name in flat and name not in without_meaning
        }
    except BadValue:
        return None


def _within(knobs: Mapping[str, Knob], config: TrialConfig) -> TrialConfig:
    """Return the config with every number that is out of its knob's range at the nearest value within."""
    flat, nearest = flatten(config), dict[str, Value]()
    for name, knob in knobs.items():
        value = flat.get(name)
        if isinstance(value, str | bool | None):
            continue
        try:
            knob.check(value)
        except BadValue:
            ends = (from_unit(knob, 0.0), from_unit(knob, 1.0))
            numbers = [number for number in knob.choices or ends if not isinstance(number, str | bool)]
            nearest[name] = min(numbers, key=lambda number: abs(number - value))
    return apply(config, nearest)


def decode(knobs: Mapping[str, Knob], numbers: Mapping[str, float]) -> dict[str, Value]:
    """Return the worker's numbers as values of their knobs, rounded to what people read."""
    return {name: _value(knobs[name], number) for name, number in numbers.items()}


def _kind(knob: Knob) -> Literal["float", "int", "choice"]:
    """Tell how a knob is modelled: a choice among ascending numbers keeps its order, as a whole number."""
    if knob.type == "choice":
        numbers = [choice for choice in knob.choices if not isinstance(choice, str | bool)]
        ordered = len(numbers) == len(knob.choices) and all(a < b for a, b in itertools.pairwise(numbers))
        return "int" if ordered else "choice"
    if knob.type == "int" and knob.low is not None and knob.high is not None:
        return "int" if knob.high - knob.low <= WIDEST_INT else "float"
    return "float"


def reachable(space: Space) -> dict[str, Knob]:
    """Return the knobs that some config of the study gives a meaning: a gate that is no knob is what it is."""
    flat, knobs = flatten(space.base), space.knobs

    def can(name: str) -> bool:
        conditions = knobs[name].when.items()
        return all(can(gate) if gate in knobs else flat.get(gate) in _several(wanted) for gate, wanted in conditions)

    return {name: knob for name, knob in knobs.items() if can(name)}


def _several(wanted: Value | tuple[Value, ...]) -> tuple[Value, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _describe(knob: Knob, knobs: Mapping[str, Knob]) -> dict[str, Any]:
    when = {
        gate: [_number(knobs[gate], knobs[gate].check(value)) for value in _several(wanted)]
        for gate, wanted in knob.when.items()
        if gate in knobs
    }
    described: dict[str, Any] = {
        "name": knob.name,
        "kind": _kind(knob),
        "when": when,
        "default": _number(knob, knob.default),
    }
    if knob.type == "choice":
        described |= {"low": 0, "high": len(knob.choices) - 1, "log": False, "size": len(knob.choices)}
    elif described["kind"] == "int":
        low, high = from_unit(knob, 0.0), from_unit(knob, 1.0)
        described |= {"low": low, "high": high, "log": knob.scale == "log"}
    return described


def _number(knob: Knob, value: Value) -> float:
    if knob.type == "choice":
        return knob.choices.index(value)
    return int(value) if _kind(knob) == "int" else to_unit(knob, value)


def _value(knob: Knob, number: float) -> Value:
    if knob.type == "choice":
        return knob.choices[int(number)]
    return int(number) if _kind(knob) == "int" else from_unit(knob, number)


class Worker:
    """Owns the sampler's process: started when first asked, restarted once if it dies, gone when its input closes."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-I", "-m", "agent.sampler_worker")) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, or None while none runs."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Mapping[str, Any]) -> list[dict[str, float]]:
        """Return the worker's candidates, best first; `SamplerFailed` after two attempts."""
        said = ""
        for _ in range(2):
            process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(question, allow_nan=False) + "\n")
                process.stdin.flush()
                ready, _, _ = select.select([process.stdout], [], [], ANSWER_SECONDS)
                line = process.stdout.readline() if ready else ""
            except BrokenPipeError:
                line = ""
            if line.endswith("\n"):
                candidates: list[dict[str, float]] = json.loads(line)["candidates"]
                return candidates
            said = self._last_words()
            self.close()
        raise SamplerFailed(f"the sampler's process gave no answer: {said or 'it said nothing'}")

    def close(self) -> None:
        """End the process, if one runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close_quietly(pipe)
        if self._said is not None:
            self._said.close()
            self._said = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            env=environment | threads,
            start_new_session=True,  # a Ctrl-C is the driver's; the worker ends with its input
        )
        return self._process

    def _last_words(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(0)
        return self._said.read()[-2000:].decode("utf-8", errors="replace").strip()


def _close_quietly(pipe: IO[str]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # a request that was never read
        return
