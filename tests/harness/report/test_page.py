"""The report and the numbers under it: complete, honest and safe to open."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from harness.paths import StudyPaths
from harness.queries import Reader
from harness.report import documents, plot, table, words
from harness.report.page import page
from harness.report.summary import Facts, gather, improvement, level, state, stop_reason, summarise
from harness.report.unproven import unproven

VOID = {"meta", "br", "link", "img", "input", "hr"}


@pytest.fixture(scope="module")
def facts(played: StudyPaths) -> Facts:
    with Reader(played.ledger) as reader:
        return gather(reader, driver_lives=False, curves=True)


@pytest.fixture
def bare(barren: StudyPaths) -> Facts:
    with Reader(barren.ledger) as reader:
        return gather(reader, driver_lives=False, curves=True)


class Balance(HTMLParser):
    """Checks that tags close in the order in which they were opened, and collects what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def read(html: str) -> Balance:
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    return balance


def test_the_page_stands_alone_and_is_well_formed(facts: Facts, played: StudyPaths) -> None:
    """No tag is left open and nothing is fetched from elsewhere."""
    found = read(page(facts, played))
    assert found.links == []


def test_the_page_answers_the_readers_questions(facts: Facts, played: StudyPaths) -> None:
    """What won, by how much and how surely, what was changed, every proposal, and what is not proven."""
    text = " ".join("".join(read(page(facts, played)).text).split())
    gain = improvement(facts)
    assert gain is not None
    assert f"{gain.amount:.4f} ± {gain.standard_error:.4f}" in text
    assert "sequence_length 256 → 128" in text
    assert all(f"p{past.number}" in text for past in facts.past)
    assert "the holdout has not been looked at" in text
    assert "1 diverged" in text


def test_what_jobs_and_proposers_wrote_is_data(facts: Facts, played: StudyPaths) -> None:
    """Markup in an error text is shown, not run."""
    html = page(facts, played)
    assert "<b>index</b>" not in re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    assert "&lt;b&gt;index&lt;/b&gt;" in html


def test_a_night_without_a_result_says_so(bare: Facts, barren: StudyPaths) -> None:
    """No improvement is a finding, in the headline and in the list of what is not proven."""
    text = " ".join("".join(read(page(bare, barren)).text).split())
    assert "No improvement is proven" in text
    assert any("degrees of freedom" in sentence for sentence in unproven(bare))


def test_a_study_that_ended_before_its_baseline_was_seated_has_a_report(facts: Facts, played: StudyPaths) -> None:
    """Trials without a lineage (a failed baseline, an owner who stopped at once) are shown, nothing is claimed."""
    import dataclasses

    early = dataclasses.replace(facts, trials=facts.trials[:1], past=(), lineage=(), best_lineage=(), noise=None)
    assert "Nothing is known yet" in page(early, played)


def test_a_study_that_never_ran_has_a_report(facts: Facts, played: StudyPaths) -> None:
    """An empty ledger is no reason to fail."""
    import dataclasses

    empty = dataclasses.replace(
        facts, trials=(), past=(), lineage=(), best_lineage=(), noise=None, events=(), driver_lives=False
    )
    assert "Nothing is known yet" in page(empty, played)
    found = summarise(empty)
    assert (found["state"], found["best"], found["improvement"], found["utilization"]) == ("new", None, None, None)


def test_a_level_is_the_mean_of_replicates_without_the_screening_run(facts: Facts) -> None:
    """What selected a config does not count for it, and the error of the mean rests on the pooled noise."""
    found = level(facts, facts.best)
    assert found is not None
    assert facts.noise is not None
    counted = [t.score for t in facts.trials if t.proposal == 11 and t.replicate > 0 and t.score is not None]
    assert found.score == pytest.approx(math.fsum(counted) / len(counted))
    assert found.standard_error == pytest.approx(facts.noise.standard_deviation / math.sqrt(len(counted)))


def test_a_run_without_an_end_was_killed(facts: Facts) -> None:
    """A driver that wrote no end and holds no lock is dead, and the reader learns what to do."""
    import dataclasses

    dead = dataclasses.replace(facts, events=tuple(event for event in facts.events if event.kind != "run_ended"))
    assert state(dead) == "killed"
    assert "goes on" in (stop_reason(dead) or "")
    assert state(dataclasses.replace(dead, driver_lives=True)) == "running"
    assert stop_reason(dataclasses.replace(dead, driver_lives=True)) is None


def test_the_band_and_every_trial_are_in_the_picture(facts: Facts) -> None:
    """Every scored and every failed trial has a mark, and the noise has its band."""
    figure = plot.progress(facts)
    marks = [x for trace in figure.data if trace.mode == "markers" for x in trace.x]
    assert sorted(marks) == [trial.id for trial in facts.trials]
    assert any("noise band" in trace.name for trace in figure.data)


def test_one_hopeless_trial_does_not_flatten_the_rest(facts: Facts) -> None:
    """A score far off the scale is drawn at the edge, so that the others can still be told apart."""
    import dataclasses

    far = dataclasses.replace(facts.trials[-1], score=50.0)
    figure = plot.progress(dataclasses.replace(facts, trials=(*facts.trials[:-1], far)))
    assert figure.layout.yaxis.range[1] < 4


def test_documents_of_two_trials_are_compared_in_pairs(facts: Facts, played: StudyPaths) -> None:
    """A trial compared with itself differs by nothing, in no document."""
    with Reader(played.ledger) as reader:
        trial, nats = reader.trial(1), reader.document_nats(1)
    found = documents.compare(facts, trial, trial, nats, nats)
    assert (found.difference, found.documents_better, found.document_standard_error) == (0.0, 0, 0.0)
    assert found.diff == {}


def test_headline_counts_what_was_kept(facts: Facts) -> None:
    """The answer is one sentence with the gain, its error and the count."""
    assert re.fullmatch(
        r"The best config is 0\.\d{4} ± 0\.\d{4} .* 4 of 16 decided proposals kept\.", table.headline(facts)
    )


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (1500, "25 min"), (7380, "2 h 03 min")]
)
def test_spans_are_said_in_a_persons_units(seconds: float, said: str) -> None:
    """Nobody counts a night in seconds."""
    assert words.duration(seconds) == said
