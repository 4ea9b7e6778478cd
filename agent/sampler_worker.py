"""The sampler's own process: Optuna, asked over JSON lines.

Optuna's Gaussian process imports torch, which neither the driver nor a command line that only reads should pay for; so
it lives here, warm between requests, and ends when its standard input does, that is, with its parent at the latest.

A request holds everything: knobs, observations, what is out, the incumbent and a seed. Nothing is kept from one request
to the next, so that a worker that was restarted answers as one that was not.

The acquisition function is maximised among the configs that a proposal may ask for, those which differ from the
incumbent in at most ``max_changes`` knobs, and not over the whole space with a projection afterwards: a projected
optimum is no optimum. For that `SparseGP` replaces the last step of Optuna's sampler, at the seam that its source
names for the purpose. TPE has no such seam; its draws keep the knobs whose change matters most.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

Array = npt.NDArray[np.float64]
Values = dict[str, float]

DRAWS = 3000
"""Random sparse candidates of which the acquisition function is evaluated."""
LEADERS = 12
"""Best of them, which are refined."""
ROUNDS = 8
NEIGHBOURS = 24
"""Perturbations of each leader in each round of refinement."""
ANSWERS = 256
"""Candidates returned, best first; the driver takes the first that the policy admits and that is new."""
TPE_DRAWS = 16


class SparseGP(optuna.samplers.GPSampler):
    """Optuna's GP sampler (Matérn 5/2 with ARD, log EI), maximised near one point: few coordinates change at a time."""

    def __init__(self, *, seed: int, center: FrozenTrial, max_changes: int) -> None:
        super().__init__(seed=seed, n_startup_trials=1)
        self._center = center
        self._max_changes = max_changes
        self.ranked: list[Values] = []

    def _optimize_acqf(self, acqf: Any, best_params: Array | None) -> Array:
        space, rng = acqf.search_space, self._rng.rng
        center: Array = space.get_normalized_params([self._center])[0]
        choices = dict(zip(space.discrete_indices.tolist(), space.get_choices_of_discrete_params(), strict=True))
        points = _sparse_draws(center, choices, min(self._max_changes, len(center)), rng)
        values: Array = acqf.eval_acqf_no_grad(points)
        for turn in range(ROUNDS):
            leaders = points[np.argsort(-values, kind="stable")[:LEADERS]]
            near = _neighbours(leaders, center, choices, 0.2 * 0.6**turn, rng)
            points = np.vstack([points, near])
            values = np.concatenate([values, acqf.eval_acqf_no_grad(near)])
        order = np.argsort(-values, kind="stable")
        best = points[order[:ANSWERS]]
        self.ranked = [space.get_unnormalized_param(point) for point in best]
        top: Array = best[0]
        return top


def _sparse_draws(center: Array, choices: Mapping[int, Array], most: int, rng: np.random.RandomState) -> Array:
    """Return points [DRAWS, knobs] that differ from the center in 1 to ``most`` coordinates, half of them nearby."""
    points = np.tile(center, (DRAWS, 1))
    for row in range(DRAWS):
        for column in rng.choice(len(center), size=rng.randint(1, most + 1), replace=False).tolist():
            if column in choices:
                points[row, column] = rng.choice(choices[column])
            elif row % 2:
                points[row, column] = rng.uniform()
            else:
                points[row, column] = np.clip(center[column] + 0.2 * rng.standard_normal(), 0, 1)
    return points


def _neighbours(
    leaders: Array, center: Array, choices: Mapping[int, Array], width: float, rng: np.random.RandomState
) -> Array:
    """Return perturbations of each leader in the coordinates that it changes, some with one change taken back."""
    points = np.repeat(leaders, NEIGHBOURS, axis=0)
    for point in points:
        changed: list[int] = np.flatnonzero(point != center).tolist()
        if len(changed) > 1 and rng.uniform() < 0.1:
            back = rng.choice(changed)
            point[back] = center[back]
        for column in changed:
            if point[column] == center[column] or rng.uniform() < 0.3:
                continue
            if column in choices:
                if rng.uniform() < 0.3:
                    point[column] = rng.choice(choices[column])
            else:
                point[column] = np.clip(point[column] + width * rng.standard_normal(), 0, 1)
    return points


def answer(request: Mapping[str, Any]) -> list[Values]:
    """Return candidates, best first, for one request (`agent.sampler.request` makes it)."""
    knobs: dict[str, Mapping[str, Any]] = {knob["name"]: knob for knob in request["knobs"]}
    distributions = {name: _distribution(knob) for name, knob in knobs.items()}
    observed = [_trial(distributions, item["values"], item["score"]) for item in request["observed"]]
    pending = [_trial(distributions, values, None) for values in request["pending"]]
    center: Values = request["incumbent"]
    if request["method"] == "gp":
        sampler = SparseGP(
            seed=request["seed"],
            center=_trial(distributions, center, 0.0),
            max_changes=request["max_changes"],
        )
        study = _study(sampler, observed, pending)
        study.ask(distributions)
        return sampler.ranked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # `group`, in Optuna since 2.8
        tpe = optuna.samplers.TPESampler(
            seed=request["seed"], n_startup_trials=1, multivariate=True, group=True, constant_liar=True
        )
    study = _study(tpe, observed, pending)
    weights = _importances(study, knobs)
    drawn = [_draw(study, knobs, distributions) for _ in range(TPE_DRAWS)]
    return [_project(values, center, knobs, weights, request["max_changes"]) for values in drawn]


def _study(
    sampler: optuna.samplers.BaseSampler, observed: Sequence[FrozenTrial], pending: Sequence[FrozenTrial]
) -> optuna.Study:
    study = optuna.create_study(direction="minimize", sampler=sampler)
    study.add_trials([*observed, *pending])
    return study


def _distribution(knob: Mapping[str, Any]) -> BaseDistribution:
    match knob["kind"]:
        case "float":
            return FloatDistribution(0.0, 1.0)
        case "int":
            return IntDistribution(knob["low"], knob["high"], log=knob["log"])
        case "choice":
            return CategoricalDistribution(range(knob["size"]))
        case kind:
            raise ValueError(f"unknown kind of knob {kind!r}")


def _trial(distributions: Mapping[str, BaseDistribution], values: Values, score: float | None) -> FrozenTrial:
    return create_trial(
        state=TrialState.RUNNING if score is None else TrialState.COMPLETE,
        value=score,
        params=dict(values),
        distributions={name: distributions[name] for name in values},
    )


def _draw(
    study: optuna.Study, knobs: Mapping[str, Mapping[str, Any]], distributions: Mapping[str, BaseDistribution]
) -> Values:
    """Return one joint draw; a conditional knob is drawn after its gates, and only where it has a meaning."""
    trial = study.ask()
    values: Values = {}
    for name in _gates_first(knobs):
        if _means_something(name, values, knobs):
            values[name] = _suggest(trial, name, distributions[name])
    return values


def _means_something(name: str, values: Values, knobs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tell whether a knob's conditions hold among values that leave out what means nothing."""
    return all(values.get(gate) in wanted for gate, wanted in knobs[name]["when"].items())


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> float:
    match distribution:
        case FloatDistribution():
            return trial.suggest_float(name, distribution.low, distribution.high)
        case IntDistribution():
            return trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
        case CategoricalDistribution():
            return int(trial.suggest_categorical(name, distribution.choices))  # type: ignore[arg-type]
        case _:
            raise TypeError(f"no such distribution here: {distribution}")


def _gates_first(knobs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    waiting, done = sorted(knobs), set[str]()
    while waiting:
        ready = [name for name in waiting if set(knobs[name]["when"]) & set(knobs) <= done]
        if not ready:  # a circle of conditions: nobody can be first
            raise ValueError(f"knobs depend on each other in a circle: {', '.join(waiting)}")
        yield from ready
        done.update(ready)
        waiting = [name for name in waiting if name not in done]


def _importances(study: optuna.Study, knobs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return PED-ANOVA importances; a knob that they leave out, since not all trials have it, gets their mean."""
    found = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), normalize=True
    )
    mean = sum(found.values()) / len(found) if found else 1.0
    return {name: found.get(name, mean) + 0.1 / len(knobs) for name in knobs}


def _project(
    values: Values,
    center: Values,
    knobs: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, float],
    max_changes: int,
) -> Values:
    """Keep the changes that matter most, importance × distance in the knob's range, each with the gates it needs.

    A knob that the center leaves without a meaning begins at its default.
    """
    before = {name: center.get(name, knobs[name]["default"]) for name in values}

    def matters(name: str) -> float:
        knob = knobs[name]
        span = knob["high"] - knob["low"] if knob["kind"] == "int" else 1.0
        distance = 1.0 if knob["kind"] == "choice" else abs(values[name] - before[name]) / span
        return weights[name] * distance

    def gates(name: str) -> set[str]:
        above = [gate for gate in knobs[name]["when"] if gate in knobs]
        return set(above).union(*map(gates, above))

    changed = [name for name in values if values[name] != before[name]]
    kept: set[str] = set()
    for name in sorted(changed, key=lambda name: (-matters(name), name)):
        with_gates = kept | {name} | (gates(name) & set(changed))
        if len(with_gates) <= max_changes:
            kept = with_gates
    return {name: values[name] for name in changed if name in kept}


def _read(source: TextIO, requests: queue.SimpleQueue[str]) -> None:
    """Pass requests on; the end of the input ends the process at once, whatever it is doing."""
    for line in source:
        requests.put(line)
    os._exit(0)


def main() -> None:
    """Serve requests until the input ends; what Optuna prints goes to stderr, answers alone to stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, requests), daemon=True).start()
    while True:
        candidates = answer(json.loads(requests.get()))
        answers.write(json.dumps({"candidates": candidates}, allow_nan=False) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
