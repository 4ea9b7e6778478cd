"""What each kept change is still worth: the best config with one step of its lineage taken out at a time.

A step was proven on top of those before it; a later one may have made it superfluous. Taken out are the knobs that a
step turned and that no later step turned again. With and without it run on the same fresh seeds, so what is lost is a
difference of pairs; its standard error rests on the noise that is pooled over the study, like every other one: three
pairs of their own would say little about their spread. Everything is computed from rows, whoever asks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.config import TrialConfig, Value, difference, flatten, unflatten
from harness.errors import OvernightError
from harness.records import FAILURES, Noise, Role, Standing, Trial

Key = tuple[int, str | None, int]
"""Replicate, seal and epoch: two trials of one key are a pair."""
CONFIDENCE = 0.95
"""That no step is said to be proven on its own which does nothing: shared among all steps (Bonferroni), one-sided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step of the best lineage, and the best config without it."""

    node: int
    back: Mapping[str, Value | None]
    """Knobs that are turned back, with the values from before the step; None: the knob was not there."""
    without: TrialConfig | None
    """None: later steps turned all of its knobs again, or what is left is no config."""
    loss: float | None = None
    """Mean over pairs of the score without the step minus the score with it: positive where the step still helps."""
    standard_error: float | None = None
    pairs: int = 0
    failed: int = 0
    """Runs without the step that failed, on seeds on which the best config has a score."""
    is_proven: bool = False
    """Whether the loss is beyond chance."""


def steps(chain: Sequence[Standing]) -> tuple[Step, ...]:
    """Return the steps from the baseline (first of ``chain``) to the best config (last), with nothing measured yet."""
    configs = [standing.config for standing in chain]
    return tuple(
        Step(node=chain[at].node, back=turned_back(configs, at), without=without(configs, at))
        for at in range(1, len(chain))
    )


def turned_back(configs: Sequence[TrialConfig], at: int) -> dict[str, Value | None]:
    """Return the knobs that ``configs[at]`` turned and no later one turned again, with their values from before."""
    before = flatten(configs[at - 1])
    later = {knob for one, other in itertools.pairwise(configs[at:]) for knob in difference(one, other)}
    return {knob: before.get(knob) for knob in difference(configs[at - 1], configs[at]) if knob not in later}


def without(configs: Sequence[TrialConfig], at: int) -> TrialConfig | None:
    """Return the last config with the step that led to ``configs[at]`` taken out; None if that leaves no config."""
    back = turned_back(configs, at)
    if not back:
        return None
    flat = flatten(configs[-1]) | back
    try:
        return unflatten({knob: value for knob, value in flat.items() if value is not None})
    except OvernightError:  # e.g. a width that only fits the number of heads of its own step
        return None


def ablation(
    chain: Sequence[Standing], trials: Sequence[Trial], noise: Noise | None, budget: str
) -> tuple[Step, ...] | None:
    """Return every step with what was measured without it; None if nobody took a step of this lineage out.

    ``budget`` is the search's. Paired are trials of one replicate, seal and epoch. Where trials continue from their
    parent, a step cannot be taken out without the training that came with it.
    """
    if chain[-1].continued is not None:
        return None
    finals = [trial for trial in trials if trial.role is Role.FINAL and trial.budget == budget]
    found = steps(chain)
    own = [trial for trial in finals if trial.config == chain[-1].config]
    best = {_key(trial): trial.score for trial in own if trial.score is not None}
    tested = sum(step.without is not None for step in found)
    measured = tuple(_measured(step, finals, best, noise, tested) for step in found)
    return measured if any(step.pairs or step.failed for step in measured) else None


def _measured(step: Step, finals: Sequence[Trial], best: Mapping[Key, float], noise: Noise | None, tested: int) -> Step:
    if step.without is None:
        return step
    runs = [trial for trial in finals if trial.config == step.without and _key(trial) in best]
    losses = [trial.score - best[_key(trial)] for trial in runs if trial.score is not None]
    step = replace(step, pairs=len(losses), failed=sum(trial.state in FAILURES for trial in runs))
    if not losses:
        return step
    loss = math.fsum(losses) / len(losses)
    if noise is None:
        return replace(step, loss=loss)
    error = noise.standard_deviation * math.sqrt(2 / len(losses))
    return replace(
        step, loss=loss, standard_error=error, is_proven=loss > _quantile(noise.degrees_of_freedom, tested) * error
    )


def _key(trial: Trial) -> Key:
    return trial.replicate, trial.seal, trial.epoch


def _quantile(degrees_of_freedom: int, tested: int) -> float:
    from scipy import special  # slow to import, and most studies that are looked at were never ablated

    return float(special.stdtrit(degrees_of_freedom, 1 - (1 - CONFIDENCE) / tested))
