import itertools
import json
import math
import string
import typing
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozen.timer import Budget, BudgetTooSmall, Kind, Timer


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Return a clock that a test moves by hand."""
    return Clock()


def step(timer: Timer, clock: Clock, seconds: float = 1.0, tokens: int = 10) -> None:
    """Take one step of the given length."""
    timer.begin_step()
    clock.now += seconds
    timer.end_step(tokens)


@pytest.mark.parametrize(
    ("text", "kind", "amount", "canonical"),
    [
        ("300s", "seconds", 300, "300s"),
        ("6s", "seconds", 6, "6s"),
        ("0.5s", "seconds", 0.5, "0.5s"),
        ("10min", "seconds", 600, "600s"),
        ("1.5h", "seconds", 5400, "5400s"),
        ("200000tok", "tokens", 200_000, "200000tok"),
        ("2Mtok", "tokens", 2_000_000, "2000000tok"),
        ("2.3Mtok", "tokens", 2_300_000, "2300000tok"),
        ("5e11flop", "flops", 5e11, "5e11flop"),
        ("5e12flop", "flops", 5e12, "5e12flop"),
        ("1.25Tflop", "flops", 1.25e12, "1.25e12flop"),
        (" 7 flop ", "flops", 7, "7flop"),
    ],
)
def test_budget_reads_what_people_write(text: str, kind: str, amount: float, canonical: str) -> None:
    """Every documented spelling gives the right amount and one canonical text."""
    budget = Budget.parse(text)
    assert (budget.kind, budget.amount, str(budget)) == (kind, amount, canonical)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "300",
        "s",
        "-5s",
        "0s",
        "nan s",
        "infs",
        "1e999s",
        "3x",
        "1.5tok",
        "2ks",
        "2mtok",
        "1.2.3s",
        "5 s s",
        "٣s",
        "1e31flop",
    ],
)
def test_budget_refuses_with_what_is_expected(text: str) -> None:
    """A budget that cannot be meant is refused with examples of what can."""
    with pytest.raises(ValueError, match="300s, 10min"):
        Budget.parse(text)


@given(st.sampled_from(["seconds", "flops"]), st.floats(min_value=1e-6, max_value=1e30))
def test_budget_text_round_trips(kind: str, amount: float) -> None:
    """The canonical text of any budget reads back as exactly that budget."""
    budget = Budget(kind, amount)  # type: ignore[arg-type]
    assert Budget.parse(str(budget)) == budget


@given(st.integers(min_value=1, max_value=10**15))
def test_token_budgets_round_trip(amount: int) -> None:
    """Token budgets are whole numbers and read back exactly."""
    assert Budget.parse(f"{amount}tok") == Budget("tokens", amount)
    assert str(Budget("tokens", amount)) == f"{amount}tok"


@given(st.text(alphabet=string.printable, max_size=12))
def test_budget_parser_never_breaks_otherwise(text: str) -> None:
    """Any text is either a budget or a ValueError."""
    try:
        budget = Budget.parse(text)
    except ValueError:
        return
    assert Budget.parse(str(budget)) == budget


def test_unknown_kind_is_refused() -> None:
    """A budget's kind is one of three."""
    with pytest.raises(ValueError, match="seconds, tokens or flops"):
        Budget("steps", 3)  # type: ignore[arg-type]


def test_only_steps_are_timed(clock: Clock) -> None:
    """Time between steps (evaluation, saving) is outside the budget."""
    timer = Timer(Budget.parse("10s"), clock=clock, flops_per_token=1)
    for _ in range(3):
        step(timer, clock, seconds=2)
        clock.now += 1000
    assert (timer.spent, timer.progress, timer.steps, timer.tokens) == (6, 0.6, 3, 30)


def test_device_is_synchronised_before_each_reading(clock: Clock) -> None:
    """Work that the device still has queued is waited for and counts."""

    def finish() -> None:
        clock.now += 0.5

    timer = Timer(Budget.parse("10s"), clock=clock, synchronize=finish, flops_per_token=1)
    step(timer, clock, seconds=1)
    assert timer.spent == 1.5


@pytest.mark.parametrize(("amount", "steps"), [("20tok", 2), ("24tok", 2), ("25tok", 3), ("26tok", 3), ("30tok", 3)])
def test_a_step_that_overshoots_by_more_than_half_is_not_begun(clock: Clock, amount: str, steps: int) -> None:
    """The number of steps is the budget in steps, rounded."""
    timer = Timer(Budget.parse(amount), clock=clock, flops_per_token=1)
    while timer.may_begin_step():
        step(timer, clock, tokens=10)
    assert timer.steps == steps


@given(step_seconds=st.floats(min_value=0.01, max_value=4), budget=st.floats(min_value=10, max_value=100))
def test_a_budget_in_seconds_ends_within_half_a_step(step_seconds: float, budget: float) -> None:
    """With even steps the total differs from the budget by at most half a step."""
    clock = Clock()
    timer = Timer(Budget("seconds", budget), clock=clock, flops_per_token=1)
    while timer.may_begin_step():
        step(timer, clock, seconds=step_seconds)
    assert abs(timer.spent - budget) <= step_seconds / 2 + 1e-6


def test_one_hiccup_does_not_end_a_trial(clock: Clock) -> None:
    """The expected length of a step is a median of the last ones."""
    timer = Timer(Budget.parse("100s"), clock=clock, flops_per_token=1)
    for seconds in (1, 1, 1, 1, 80):
        step(timer, clock, seconds=seconds)
    assert timer.may_begin_step()
    assert timer.midpoint == pytest.approx(0.845)


@pytest.mark.parametrize(("budget", "flops_per_token"), [("100tok", 1.0), ("600flop", 6.0)])
def test_midpoints_are_the_middle_of_each_step(clock: Clock, budget: str, flops_per_token: float) -> None:
    """A schedule sampled at midpoints sees evenly spaced values, the first step included where its cost is known."""
    timer = Timer(Budget.parse(budget), clock=clock, flops_per_token=flops_per_token)
    timer.expect(10)
    seen = []
    while timer.may_begin_step():
        seen.append(timer.midpoint)
        step(timer, clock, tokens=10)
    assert seen == pytest.approx([0.05 + 0.1 * index for index in range(10)])
    assert timer.progress == 1


def test_midpoint_is_the_same_before_and_within_a_step(clock: Clock) -> None:
    """A schedule may be read before or after the step's clock has started."""
    timer = Timer(Budget.parse("100s"), clock=clock, flops_per_token=1)
    step(timer, clock)
    before = timer.midpoint
    timer.begin_step()
    clock.now += 1
    assert timer.midpoint == before == pytest.approx(0.015)


def test_flops_make_a_bigger_model_pay(clock: Clock) -> None:
    """Twice the cost per token gives half the steps."""
    steps = []
    for flops_per_token in (6.0, 12.0):
        timer = Timer(Budget.parse("6000flop"), clock=clock, flops_per_token=flops_per_token)
        while timer.may_begin_step():
            step(timer, clock, tokens=10)
        steps.append(timer.steps)
    assert steps == [100, 50]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("budget", ["10tok", "5tok", "60flop"])
def test_a_first_step_that_eats_the_budget_is_caught(clock: Clock, budget: str, known: bool) -> None:
    """A single step of the whole budget is refused with both numbers, before it runs where that is possible."""
    timer = Timer(Budget.parse(budget), clock=clock, flops_per_token=6)
    if known:
        timer.expect(10)
        with pytest.raises(BudgetTooSmall, match=str(Budget.parse(budget))):
            timer.begin_step()
        assert timer.steps == 0
    else:
        with pytest.raises(BudgetTooSmall, match=str(Budget.parse(budget))):
            step(timer, clock, tokens=10)


def test_a_slow_first_step_is_caught(clock: Clock) -> None:
    """In seconds the first step is known when it ends, and then refused."""
    timer = Timer(Budget.parse("6s"), clock=clock, flops_per_token=1)
    with pytest.raises(BudgetTooSmall, match=r"costs 27 seconds, the whole budget is 6s"):
        step(timer, clock, seconds=27)


def test_charged_warmup_shrinks_a_budget_in_seconds_only(clock: Clock) -> None:
    """Warm-up beyond its cap is spent budget in seconds, and recorded time for the other kinds."""
    seconds = Timer(Budget.parse("10s"), clock=clock, flops_per_token=1)
    tokens = Timer(Budget.parse("10tok"), clock=clock, flops_per_token=1)
    for timer in (seconds, tokens):
        timer.charge(4)
        assert timer.train_seconds == timer.charged_seconds == 4
    assert (seconds.progress, tokens.progress) == (0.4, 0)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_impossible_charges_are_refused(clock: Clock, seconds: float) -> None:
    """Nobody gets time back."""
    with pytest.raises(ValueError, match="charged"):
        Timer(Budget.parse("10s"), clock=clock, flops_per_token=1).charge(seconds)


def test_a_clock_that_runs_backwards_is_an_error(clock: Clock) -> None:
    """Negative training time is never booked."""
    timer = Timer(Budget.parse("10s"), clock=clock, flops_per_token=1)
    with pytest.raises(RuntimeError, match="clock"):
        step(timer, clock, seconds=-1)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda timer: timer.end_step(1), "no step has begun"),
        (lambda timer: (timer.begin_step(), timer.begin_step()), "begun already"),
        (lambda timer: (timer.begin_step(), timer.state()), "between steps"),
        (lambda timer: (timer.begin_step(), timer.restore({})), "make a new one"),
    ],
)
def test_misuse_is_an_error(clock: Clock, misuse: Callable[[Timer], object], message: str) -> None:
    """Steps are begun and ended in turn, and state moves between steps."""
    with pytest.raises(RuntimeError, match=message):
        misuse(Timer(Budget.parse("10s"), clock=clock, flops_per_token=1))


def test_impossible_costs_are_refused() -> None:
    """A token costs something and a step holds one."""
    with pytest.raises(ValueError, match="must be"):
        Timer(Budget.parse("10s"), flops_per_token=0)
    with pytest.raises(ValueError, match="at least one token"):
        Timer(Budget.parse("10s"), flops_per_token=1).expect(0)


def test_a_step_without_tokens_is_refused(clock: Clock) -> None:
    """A step that trains on nothing would never spend a token budget."""
    timer = Timer(Budget.parse("10tok"), clock=clock, flops_per_token=1)
    with pytest.raises(ValueError, match="at least one token"):
        step(timer, clock, tokens=0)


@pytest.mark.parametrize("budget", ["100s", "1000tok"])
def test_a_restored_timer_goes_on_as_if_nothing_happened(clock: Clock, budget: str) -> None:
    """Interrupting after any step and restoring from JSON changes no midpoint and no count."""

    def run(interrupt_after: int | None) -> tuple[list[float], float, int]:
        timer = Timer(Budget.parse(budget), clock=clock, flops_per_token=6)
        timer.charge(0.25)
        seen = []
        while timer.may_begin_step():
            seen.append(timer.midpoint)
            step(timer, clock, seconds=1.0 + timer.steps % 3, tokens=10)
            if timer.steps == interrupt_after:
                saved = json.dumps(timer.state())
                timer = Timer(Budget.parse(budget), clock=clock, flops_per_token=6)
                timer.restore(json.loads(saved))
        return seen, timer.train_seconds, timer.tokens

    assert run(None) == run(7)


def test_a_timer_refuses_the_state_of_another_budget(clock: Clock) -> None:
    """Resuming under another budget would anneal wrongly."""
    state = Timer(Budget.parse("10s"), clock=clock, flops_per_token=1).state()
    with pytest.raises(ValueError, match=r"10s, this one has 20s"):
        Timer(Budget.parse("20s"), clock=clock, flops_per_token=1).restore(state)


@given(
    steps=st.lists(st.integers(100, 1000), min_size=1, max_size=20),
    amount=st.integers(5001, 20_000),
    kind=st.sampled_from(typing.get_args(Kind)[1:]),
)
def test_steps_of_different_sizes_spend_their_own_tokens(steps: list[int], amount: int, kind: Kind) -> None:
    """Padded rows: what is spent is what was booked, and the end lies within the largest step of the budget."""
    clock = Clock()
    factor = 6 if kind == "flops" else 1
    timer = Timer(Budget(kind, float(amount * factor)), clock=clock, flops_per_token=6)
    sizes, booked = itertools.cycle(steps), 0
    while timer.may_begin_step():
        assert 0 <= timer.midpoint <= 1
        size = next(sizes)
        step(timer, clock, tokens=size)
        booked += size
        assert timer.spent == factor * booked
    assert -max(steps) < amount - booked < max(steps) / 2


@given(
    steps=st.lists(st.integers(100, 1000), min_size=1, max_size=20),
    amount=st.integers(5001, 20_000),
    kind=st.sampled_from(typing.get_args(Kind)[1:]),
)
def test_steps_that_are_counted_beforehand_have_exact_midpoints(steps: list[int], amount: int, kind: Kind) -> None:
    """Padded rows, expected: each midpoint is the step's own, and the end lies within half of its last one."""
    clock = Clock()
    factor = 6 if kind == "flops" else 1
    timer = Timer(Budget(kind, float(amount * factor)), clock=clock, flops_per_token=6)
    sizes, booked = itertools.cycle(steps), 0
    size = next(sizes)
    timer.expect(size)
    while timer.may_begin_step():
        assert timer.midpoint == pytest.approx(min(1.0, (booked + size / 2) / amount))
        assert timer.midpoint > 0
        step(timer, clock, tokens=size)
        booked += size
        size = next(sizes)
        timer.expect(size)
    assert amount <= booked + size / 2
    assert booked <= amount + max(steps) / 2


def test_seconds_are_not_expected_in_tokens(clock: Clock) -> None:
    """What a step trains on says nothing about how long it takes."""
    timer = Timer(Budget.parse("10s"), clock=clock, flops_per_token=1)
    timer.expect(10_000)
    assert timer.midpoint == 0
    step(timer, clock, seconds=2)
    timer.expect(10_000)
    assert timer.midpoint == pytest.approx(0.3)
