"""The decision framework of an LLM training engineer, offline: first things first, one reason per change.

The order is that of what usually matters at a short, fixed budget: what failed is mended; the learning rate is swept by
factors; then the number of steps (batch), the size of the model, the schedule, the optimizer's memory, clipping and
regularisation, each in the direction that the incumbent's curve points to; then changes that looked good but could not
be proven are joined; at last every knob is nudged up and down. What is particular to a base model that is trained
further (usual rates, forgetting, adapters, memory) is in `agent.tuning`.

No config is proposed twice, and every proposal says why, what to watch, and what it predicts.

Sources of the rules: warm-up and sweeps by factors are common practice; beta2 for short runs follows Zhang et al.
(arXiv 2407.07972); decay to zero Bergsma et al. (arXiv 2502.15938); tokens per parameter Hoffmann et al.
(arXiv 2203.15556). The predicted changes are guesses from experience, as shares of the score: they are there to be
scored, and are not measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from agent import tuning
from agent.evidence import Effect, differs_only_in, effects, signals
from agent.idea import Idea, Situation
from agent.offline import OfflineProposer
from agent.prose import Figures
from agent.space import Space, config_of, from_unit, of_this_start, propose_each, searched, show, tidy, to_unit
from harness.config import Value, flatten
from harness.records import History, Proposal, TrialState

RATE = "optim.learning_rate"
GENERAL = "sampling.general_fraction"
SWEEP_FACTOR = 3.0
RETUNE_FACTOR = 1.6
FINE_RATIO = 2.0
"""Neighbours of the best learning rate closer than this end the sweep."""
RECENT = 3
"""Failures among so many last proposals are answered."""
OFTEN_CLIPPED = 0.6
"""Share of curve points above the clip from which on the clip, not the rate, sets the size of a step."""
COMPUTE_OPTIMAL = 20.0
"""Tokens per parameter at which a model is about as big as its budget allows (Hoffmann et al.)."""
NUDGES = (0.25, -0.25, 0.12, -0.12)
"""Steps of the last resort, in shares of a knob's range."""
COUPLED = ("batch.", "model.", "method", "adapter.", "optim.name")
"""A change of these moves the best learning rate."""


class RulesProposer(OfflineProposer):
    """Proposes what the decision framework says next; a pure function of the history."""

    name = "rules"

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        """Return up to ``count`` proposals; none when every rule has had its say and every nudge was tried."""
        return propose_each(history, count, self._next)

    def _next(self, history: History) -> Proposal | None:
        space = Space.of(history)
        if space is None:
            return None
        tried = frozenset(frozenset(past.proposal.diff.items()) for past in history.past)
        situation = Situation(space, effects(history), signals(history, space.base), tried)
        for idea in ideas(situation):
            step = space.step(idea.values)
            if step is not None:
                return Proposal(
                    diff=step.diff,
                    source=self.name,
                    rationale=idea.why,
                    watch=idea.watch or "; ".join(space.knobs[name].watch for name in step.diff),
                    predicted_change=-idea.gain * space.base_score,
                    confidence=idea.confidence,
                )
        return None


def ideas(situation: Situation) -> Iterator[Idea]:
    """Yield what to try, most urgent first. Fresh ideas only, but for mending and the learning rate."""
    yield from mend(situation)
    yield from fresh(situation, tuning.urgent(situation))
    yield from sweep(situation)
    yield from fresh(situation, itertools.chain(more_steps(situation), model_size(situation), tuning.reach(situation)))
    yield from retune(situation)
    once = itertools.chain(
        optimizer(situation),
        schedule(situation),
        regularisation(situation),
        tuning.refine(situation),
        join(situation),
        other_way(situation),
    )
    yield from fresh(situation, once)
    yield from nudge(situation)


def fresh(situation: Situation, some: Iterator[Idea]) -> Iterator[Idea]:
    """Leave out what was proposed before, also against another incumbent."""
    return (idea for idea in some if frozenset(idea.values.items()) not in situation.tried)


def mend(s: Situation) -> Iterator[Idea]:
    """Answer recent failures: the idea may be right, and only its rate or its size wrong."""
    for effect in reversed(s.past[-RECENT:]):
        batch, said = effect.config.batch, f"Proposal {effect.number}"
        if effect.failure is TrialState.DIVERGED and set(effect.diff) != {RATE} and s.turns(RATE):
            rate = effect.config.optim.learning_rate
            why = f"{said} diverged at learning rate {show(rate)}: the same with half of it."
            yield Idea({**effect.diff, RATE: tidy(s.space.knobs[RATE], rate / 2)}, why, 0.005, 0.4)
        elif effect.failure is TrialState.OUT_OF_MEMORY:
            for shrink in (2, 4):
                values = {
                    "batch.per_device": max(1, batch.per_device // shrink),
                    "batch.accumulation": batch.accumulation * shrink,
                }
                why = f"{said} ran out of memory: 1/{shrink} of the sequences, {shrink} times the accumulation."
                yield Idea({**effect.diff, **values}, why, 0.005, 0.4, "peak memory; the batch in all is the same")
            yield from tuning.less_memory(s, effect)
        elif effect.breaks_guard:
            yield from _remember(s, effect)
        elif effect.failure in (TrialState.TIMED_OUT, TrialState.INVALID):
            why = f"{said} ended as {effect.failure}: the same with half the sequences, so that its steps are shorter."
            yield Idea({**effect.diff, "batch.per_device": max(1, batch.per_device // 2)}, why, 0.005, 0.3)


def _remember(s: Situation, effect: Effect) -> Iterator[Idea]:
    """Answer a config that forgot what the base model could do: a gentler rate, or general text among the rest."""
    said, rate = f"Proposal {effect.number} forgets too much", effect.config.optim.learning_rate
    if s.turns(GENERAL) and flatten(effect.config).get(GENERAL) == 0:
        why = f"{said}: the same with general text among the rest."
        yield Idea({**effect.diff, GENERAL: tidy(s.space.knobs[GENERAL], 0.1)}, why, 0.005, 0.4, "the guard set")
    if s.turns(RATE) and set(effect.diff) != {RATE}:  # of the rate alone the sweep takes care
        why = f"{said} at learning rate {show(rate)}: the same with half of it."
        yield Idea({**effect.diff, RATE: tidy(s.space.knobs[RATE], rate / 2)}, why, 0.005, 0.4, "the guard set")


def sweep(s: Situation) -> Iterator[Idea]:
    """Sweep the learning rate by factors until the best has worse ones on both sides, then look once between."""
    if not s.turns(RATE) or any(
        set(e.diff) == {RATE} and not differs_only_in(e.config, s.space.base, RATE) for e in s.past
    ):
        return
    points, pending = _rate_points(s)
    if pending:
        return
    yield from _bracket(s, points, SWEEP_FACTOR, "The rate matters most")
    best = _best(points)
    neighbours = [
        *sorted(rate for rate in points if rate > best)[:1],
        *sorted(rate for rate in points if rate < best)[-1:],
    ]
    for near in sorted(neighbours, key=lambda rate: (points[rate], rate))[:1]:
        if max(near / best, best / near) > FINE_RATIO:
            why = f"The sweep has its best at {show(best)}; now between it and {show(near)}."
            yield Idea({RATE: tidy(s.space.knobs[RATE], math.sqrt(best * near))}, why, 0.005, 0.4)


def retune(s: Situation) -> Iterator[Idea]:
    """Bracket the learning rate again, by a small factor, once a change of batch or model was kept."""
    if not s.turns(RATE) or not any(e.kept and any(name.startswith(COUPLED) for name in e.diff) for e in s.past):
        return
    points, pending = _rate_points(s)
    if not pending:
        yield from _bracket(s, points, RETUNE_FACTOR, "The batch or the model has changed, and the best rate with it")


def _bracket(s: Situation, points: Mapping[float, float], factor: float, reason: str) -> Iterator[Idea]:
    knob, best = s.space.knobs[RATE], _best(points)
    assert knob.low is not None
    assert knob.high is not None
    if best == max(points) and best < knob.high:
        seen = "" if len(points) == 1 else f", {show(best)} is the highest tried and the best so far"
        yield Idea({RATE: tidy(knob, best * factor)}, f"{reason}{seen}: {factor:g} times as much.", 0.01, 0.5)
    if best == min(points) and best > knob.low:
        seen = "" if len(points) == 1 else f", {show(best)} is the lowest tried and the best so far"
        yield Idea({RATE: tidy(knob, best / factor)}, f"{reason}{seen}: {factor:g} times less.", 0.01, 0.4)


def _best(points: Mapping[float, float]) -> float:
    return min(points, key=lambda rate: (points[rate], rate))


def _rate_points(s: Situation) -> tuple[dict[float, float], bool]:
    """Return score (infinite if it failed or forgot) by rate at the incumbent's other knobs, and whether one is out."""
    base = s.space.base
    points = {base.optim.learning_rate: s.space.base_score}
    pending = False
    for past in s.space.history.past:
        config = config_of(past, s.space.history, base) if of_this_start(past, s.space.history) else None
        if config is None or not differs_only_in(config, base, RATE) or config.digest == base.digest:
            continue
        effect = next((e for e in s.past if e.number == past.number), None)
        scored = [trial.score for trial in searched(past.trials) if trial.score is not None]
        lost = effect is not None and (effect.failure is not None or effect.breaks_guard)
        if scored and not lost:
            points[config.optim.learning_rate] = sum(scored) / len(scored)
        elif lost:
            points[config.optim.learning_rate] = math.inf
        else:
            pending |= past.state in ("queued", "running")
    for standing in s.space.history.lineage if not s.space.history.continues else ():
        if standing.score is not None and differs_only_in(standing.config, base, RATE):
            points[standing.config.optim.learning_rate] = standing.score
    return points, pending


def more_steps(s: Situation) -> Iterator[Idea]:
    """Halve the tokens of a step: a short run needs steps before it needs smooth gradients."""
    steps = s.signals.steps
    batch = s.space.base.batch
    if s.tunes and batch.per_device * batch.accumulation < 2 * tuning.LEAST_BATCH:
        return
    if steps is not None and steps > 20_000 and not s.signals.still_falling:
        return
    count = f"{steps} steps are few for this budget" if steps is not None else "A short budget has few steps"
    for name in ("batch.accumulation", "batch.per_device"):
        if values := s.scaled(name, 0.5):
            yield Idea(values, f"{count}: half the batch gives twice as many.", 0.01, 0.5)
            return


def model_size(s: Situation) -> Iterator[Idea]:
    """Move the size of the model towards about twenty tokens per parameter."""
    ratio = s.signals.tokens_per_parameter
    if ratio is None:
        return
    smaller = ratio < COMPUTE_OPTIMAL
    if 0.5 < ratio / COMPUTE_OPTIMAL < 2:
        return
    said = f"{ratio:.2g} tokens per parameter are " + ("few: a smaller model" if smaller else "many: a bigger model")
    for name, factor in (("model.depth", 0.5 if smaller else 1.5), ("model.width", 0.75 if smaller else 1.5)):
        if values := s.scaled(name, factor):
            yield Idea(
                values, f"{said} ({name.removeprefix('model.')} {show(next(iter(values.values())))}).", 0.01, 0.4
            )


def schedule(s: Situation) -> Iterator[Idea]:
    """Set the ramp by whether the start is rough, and let the rate fall to zero."""
    if s.turns("schedule.warmup_fraction"):
        knob, now = s.space.knobs["schedule.warmup_fraction"], s.value("schedule.warmup_fraction")
        if s.signals.spikes:
            value = tidy(knob, max(2 * now, 0.05))
            yield Idea({knob.name: value}, "The train loss spikes: a longer ramp.", 0.005, 0.4)
        elif now > 0.02:
            why = "No spike in the train loss: a shorter ramp leaves more of the budget at full rate."
            yield Idea({knob.name: tidy(knob, now / 3)}, why, 0.003, 0.4)
    if s.turns("schedule.final_rate_fraction") and s.value("schedule.final_rate_fraction") > 0:
        knob = s.space.knobs["schedule.final_rate_fraction"]
        yield Idea({knob.name: tidy(knob, 0.0)}, "Decay to zero: the last steps should settle.", 0.003, 0.5)
    if s.turns("schedule.shape") and "linear" in s.space.knobs["schedule.shape"].choices:
        why = "A linear decay to zero does well on short budgets."
        values: dict[str, Value] = {"schedule.shape": "linear"}
        if s.turns("schedule.final_rate_fraction"):
            values |= {"schedule.final_rate_fraction": tidy(s.space.knobs["schedule.final_rate_fraction"], 0.0)}
        yield Idea(values, why, 0.002, 0.3)


def optimizer(s: Situation) -> Iterator[Idea]:
    """Fit the memory of the second moment to the number of steps, and the clip to the gradients seen."""
    if s.turns("optim.beta2"):
        window, steps = 1 / (1 - s.value("optim.beta2")), s.signals.steps
        if s.value("optim.beta2") > 0.96 and (steps is None or 2 * window > steps):
            seen = "" if steps is None else f" of {steps} steps"
            why = f"beta2 averages over {window:.0f} steps, too long for a run{seen}: 0.95 averages over 20."
            yield Idea({"optim.beta2": tidy(s.space.knobs["optim.beta2"], 0.95)}, why, 0.005, 0.5)
    share = s.signals.clipped_share
    if share is not None and share > 0.6 and (values := s.scaled("optim.max_grad_norm", 3)):
        yield Idea(
            values, f"Gradients are clipped at {share:.0%} of the points: a clip that only catches spikes.", 0.003, 0.3
        )


def regularisation(s: Situation) -> Iterator[Idea]:
    """Regularise what overfits, free what does not."""
    if s.signals.overfitting:
        for name, value in (("optim.weight_decay", 0.2), ("model.attention_dropout", 0.1)):
            if s.turns(name) and s.value(name) < value:
                why = "The probe loss rises while the train loss falls: overfitting."
                yield Idea({name: tidy(s.space.knobs[name], value)}, why, 0.005, 0.4)
        return
    for name in ("model.attention_dropout", "optim.weight_decay"):
        if s.turns(name) and s.value(name) > 0.05:
            why = "No sign of overfitting: what regularises only slows a run this short."
            yield Idea({name: tidy(s.space.knobs[name], 0.0)}, why, 0.002, 0.3)
    if s.turns("sampling.fraction") and s.value("sampling.fraction") < 1:
        yield Idea({"sampling.fraction": 1.0}, "More different text costs nothing.", 0.002, 0.4)


def join(s: Situation) -> Iterator[Idea]:
    """Join changes that looked good and could not be proven alone: together they may stand out of the noise."""
    near = [e for e in s.past if not e.kept and not e.pending and e.change is not None and e.change < 0]
    near.sort(key=lambda effect: (effect.change, effect.number))
    figures = Figures.of(s.space.history.noise)
    for one, two in itertools.combinations(near[:4], 2):
        if set(one.diff) & set(two.diff):
            continue
        together = -((one.change or 0) + (two.change or 0)) / 2
        seen = f"{figures.difference(one.change)}, {figures.difference(two.change)}"
        why = f"Proposals {one.number} and {two.number} looked better ({seen}) but were not proven: both at once."
        yield Idea({**one.diff, **two.diff}, why, together / s.space.base_score, 0.4)


def other_way(s: Situation) -> Iterator[Idea]:
    """Try what the first guesses left out: the other direction of batch and size, other lengths, shapes and heads."""
    turns = (
        ("batch.per_device", 2.0, "The other direction: a bigger batch, smoother gradients, fewer steps."),
        ("batch.sequence_length", 0.5, "Shorter sequences: more documents per step, cheaper attention."),
        ("batch.sequence_length", 2.0, "Longer sequences: the model learns to use the context that is evaluated."),
        ("model.depth", 1.5, "The other direction: a deeper model, fewer tokens."),
        ("model.depth", 0.5, "The other direction: a shallower model, more tokens."),
        ("model.width", 1.5, "A wider model, fewer tokens."),
        ("model.width", 0.75, "A narrower model, more tokens."),
        ("model.heads", 0.5, "Fewer, bigger heads."),
        ("model.heads", 2.0, "More, smaller heads."),
    )
    for name, factor, why in turns:
        if values := s.scaled(name, factor):
            yield Idea(values, why, 0.003, 0.2)
    if s.turns("schedule.decay_fraction") and s.value("schedule.decay_fraction") > 0.5:
        values = {"schedule.decay_fraction": tidy(s.space.knobs["schedule.decay_fraction"], 0.5)}
        yield Idea(values, "Hold the rate for half of the run before it decays.", 0.003, 0.3)


def nudge(s: Situation) -> Iterator[Idea]:
    """Nudge each knob up and down: when the framework is through, the neighbourhood is what is left."""
    flat = flatten(s.space.base)
    for size in NUDGES:
        for name, knob in sorted(s.space.knobs.items()):
            if name not in flat:
                continue
            if knob.type == "choice":
                position = knob.choices.index(knob.check(flat[name])) + (1 if size > 0 else -1)
                if not 0 <= position < len(knob.choices):
                    continue
                value = knob.choices[position]
            else:
                value = from_unit(knob, to_unit(knob, flat[name]) + size)
            why = f"Every rule has had its say: {name} from {show(flat[name])} to {show(value)}, a step in its range."
            yield Idea({name: value}, why, 0.001, 0.15)
