from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.ablation import ablation, steps, turned_back, without
from harness.config import TrialConfig, Value, apply, flatten
from harness.records import Noise, Role, Standing, Trial, TrialState
from tests.samples import BASE

NOISE = Noise(standard_deviation=0.01, degrees_of_freedom=10)
KNOBS = {
    "optim.beta1": st.sampled_from([0.7, 0.8, 0.9]),
    "optim.weight_decay": st.sampled_from([0.0, 0.1, 0.2]),
    "schedule.warmup_fraction": st.sampled_from([0.0, 0.05, 0.1]),
    "sampling.weights.text": st.sampled_from([1.0, 2.0]),
}
DIFFS = st.lists(st.fixed_dictionaries({}, optional=KNOBS), min_size=1, max_size=5)


def configs_of(diffs: Sequence[Mapping[str, Value]]) -> list[TrialConfig]:
    configs = [BASE]
    for diff in diffs:
        configs.append(apply(configs[-1], diff))
    return configs


def chain_of(*diffs: Mapping[str, Value]) -> list[Standing]:
    return [
        Standing(node=node, parent=node - 1 if node else None, diff={}, config=config, scores={}, trial=None)
        for node, config in enumerate(configs_of(diffs))
    ]


@given(DIFFS)
def test_a_config_without_a_step_differs_in_what_the_step_left(diffs: list[dict[str, Value]]) -> None:
    """Every knob of the last config stays, but those that this step was the last to turn: they are as before it."""
    configs = configs_of(diffs)
    for at in range(1, len(configs)):
        found = without(configs, at)
        last_turned = {
            knob
            for knob in KNOBS
            if flatten(configs[at - 1]).get(knob) != flatten(configs[at]).get(knob)
            and len({flatten(config).get(knob) for config in configs[at:]}) == 1
        }
        assert set(turned_back(configs, at)) == last_turned
        assert (found is None) == (not last_turned)
        if found is not None:
            kept, before, last = flatten(found), flatten(configs[at - 1]), flatten(configs[-1])
            for knob in kept.keys() | before.keys() | last.keys():
                assert kept.get(knob) == (before if knob in last_turned else last).get(knob), knob


def test_what_is_left_may_be_no_config() -> None:
    """A width that only its own step's heads fit cannot be turned back alone: nothing runs, nothing is claimed."""
    chain = chain_of({"model.width": 96, "model.heads": 3}, {"model.heads": 6})
    assert flatten(BASE)["model.width"] == 64
    (first, _) = steps(chain)
    assert first.back == {"model.width": 64}
    assert first.without is None


@pytest.fixture
def final(make_trial: Callable[..., Trial]) -> Callable[..., Trial]:
    """Return a builder of rows that a replay wrote."""

    def build(config: TrialConfig, score: float | None, replicate: int, **changes: object) -> Trial:
        state = TrialState.SCORED if score is not None else TrialState.DIVERGED
        row = {"role": Role.FINAL, "config": config, "score": score, "replicate": replicate, "state": state}
        return make_trial(**(row | {"seal": "a"} | changes))

    return build


def test_nothing_is_said_before_somebody_took_a_step_out(final: Callable[..., Trial]) -> None:
    """Reproductions alone measure no step."""
    chain = chain_of({"optim.beta1": 0.8})
    assert ablation(chain, [final(chain[-1].config, 1.0, 1001)], NOISE, "1000tok") is None
    assert ablation(chain, [], NOISE, "1000tok") is None
    assert ablation(chain[:1], [], NOISE, "1000tok") is None


def test_only_pairs_count(final: Callable[..., Trial]) -> None:
    """Same replicate, tool and machine, at the search's budget: everything else is no comparison."""
    chain = chain_of({"optim.beta1": 0.8})
    best = chain[-1].config
    rows = [final(best, 1.0, 1001), final(best, 1.1, 1002), final(best, 5.0, 1001, seal="b", epoch=2)]
    rows += [final(BASE, 1.3, 1001), final(BASE, 1.2, 1002)]
    rows += [final(BASE, 9.0, 1003), final(BASE, 9.0, 1002, seal="b"), final(BASE, 9.0, 1001, epoch=2)]
    rows += [final(BASE, 9.0, 1001, budget="1tok"), final(BASE, 9.0, 1001, role=Role.REPLICATE)]
    rows += [final(BASE, None, 1001), final(BASE, None, 1004)]
    found = ablation(chain, rows, NOISE, "1000tok")
    assert found is not None
    assert (found[0].pairs, found[0].failed) == (2, 1)
    assert found[0].loss == pytest.approx(0.2)
    assert found[0].standard_error == pytest.approx(0.01)


@pytest.mark.parametrize(("loss", "of", "proven"), [(0.019, 1, True), (0.017, 1, False), (0.019, 2, False)])
def test_a_step_is_proven_beyond_chance(final: Callable[..., Trial], loss: float, of: int, proven: bool) -> None:
    """The one-sided 95 % quantile of Student's t with 10 degrees of freedom is 1.812; two steps share the error."""
    chain = chain_of({"optim.beta1": 0.8}, *([{"optim.beta2": 0.9}] if of == 2 else []))
    best = chain[-1].config
    taken_out = steps(chain)[0].without
    assert taken_out is not None
    rows = [final(best, 1.0, 1001), final(best, 1.0, 1002)]
    rows += [final(taken_out, 1.0 + loss, 1001), final(taken_out, 1.0 + loss, 1002)]
    found = ablation(chain, rows, NOISE, "1000tok")
    assert found is not None
    assert found[0].is_proven is proven
