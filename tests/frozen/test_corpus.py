import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozen.corpus import SPLITS, Corpus, SplitSizes, split_corpus
from frozen.duplicates import HeldOut, near_duplicates, shingles
from frozen.formats import Document, SourceError
from frozen.pieces import PIECE_BYTES, cut, digest_of, normalise

SIZES = SplitSizes(probe_bytes=2000, val_bytes=4000, holdout_bytes=4000)


def prose(seed: int, words: int = 120) -> str:
    """Return a text that resembles no other."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(words))


def lines(seed: int, count: int) -> str:
    """Return a text of lines."""
    return "\n".join(prose(seed * 100_000 + number, 8) for number in range(count))


def documents(count: int = 100, source: str = "one") -> list[Document]:
    """Return different documents of about 700 bytes."""
    return [Document(source, prose(number)) for number in range(count)]


def contents(corpus: Corpus) -> dict[str, list[str]]:
    """Return the texts of each split."""
    return {name: [kept.text for kept in texts] for name, texts in corpus.splits.items()}


def test_every_text_goes_to_one_split_and_splits_have_their_size() -> None:
    """Nothing is lost or doubled; held-out splits hold what was asked for, and at most one document more."""
    corpus = split_corpus(documents(), SIZES)
    everything = [text for texts in contents(corpus).values() for text in texts]
    assert sorted(everything) == sorted(str(document.content) for document in documents())
    for name, wanted in (("probe", 2000), ("val", 4000), ("holdout", 4000)):
        size = sum(kept.bytes for kept in corpus.splits[name])
        assert wanted <= size < wanted + max(kept.bytes for kept in corpus.splits[name])
    assert tuple(corpus.splits) == SPLITS


def test_texts_lie_in_the_order_of_their_digests() -> None:
    """The order within a split is that of the content's SHA-256."""
    for texts in split_corpus(documents(), SIZES).splits.values():
        assert [kept.digest for kept in texts] == sorted(digest_of(kept.text) for kept in texts)


def test_splits_do_not_depend_on_the_order_of_reading() -> None:
    """Shuffled input, with repeats among it, gives the same splits and the same report."""
    given_order = [*documents(80, "one"), *documents(20, "two"), Document("one", lines(1, 1500))]
    shuffled = random.Random(1).sample(given_order, len(given_order))
    one, other = split_corpus(given_order, SIZES), split_corpus(shuffled, SIZES)
    assert one.splits == other.splits
    assert one.report.as_json() == other.report.as_json()


def test_golden_split() -> None:
    """The division is the same on every machine: a change here is a change of every study's val split."""
    splits = split_corpus(documents(), SIZES).splits
    assert [splits[name][0].digest[:8] for name in SPLITS] == GOLDEN


GOLDEN = ["1f469f56", "1c931b46", "0be87a95", "046d54fa"]


def test_equal_texts_are_kept_once() -> None:
    """Line ends, a byte-order mark and space around a text do not make it another one."""
    text = prose(5) + "\n" + prose(6)
    versions = [text, text.replace("\n", "\r\n"), "\ufeff" + text, "\n \n" + text + " \n\n"]
    corpus = split_corpus([*documents(), *(Document("two", version) for version in versions)], SIZES)
    assert sum(texts.count(text) for texts in contents(corpus).values()) == 1
    assert corpus.report.as_json()["dropped"]["two"]["equal"]["texts"] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(" ", "\n"),
        str.upper,
        lambda text: text + " one more sentence at its end",
        lambda text: " ".join([*text.split()[:60], "other", "words", *text.split()[62:]]),
    ],
)
def test_near_duplicates_are_kept_once(change: Callable[[str], str]) -> None:
    """Layout, case, an added sentence or two changed words do not make a text another one, in whichever split."""
    plain = documents()
    corpus = split_corpus([*plain, *(Document("two", change(str(document.content))) for document in plain)], SIZES)
    dropped = corpus.report.as_json()["dropped"]
    assert sum(row["near-duplicate"]["texts"] for row in dropped.values()) == len(plain)
    assert sum(map(len, corpus.splits.values())) == len(plain)


def test_train_texts_that_quote_held_out_ones_are_dropped() -> None:
    """A long text around a held-out text, and a part of one, are no near-duplicates but quotes: train loses them."""
    plain = documents()
    wrapped = [
        Document("wrapped", prose(1000 + index, 300) + " " + str(document.content) + " " + prose(2000 + index, 300))
        for index, document in enumerate(plain)
    ]
    corpus = split_corpus([*plain, *wrapped], SIZES)
    held_out = [text for name in ("probe", "val", "holdout") for text in contents(corpus)[name]]
    for text in contents(corpus)["train"]:
        assert not any(one in text or text in one for one in held_out)
    assert corpus.report.as_json()["dropped"]["wrapped"]["quotes a held-out text"]["texts"] > 0


def test_common_phrases_are_no_quotes() -> None:
    """A greeting that is a document of its own in val does not empty train of letters that begin with it."""
    held_out = HeldOut([shingles("Dear all, thank you very much for your letter")])
    assert held_out.quoted_by(shingles("Dear all, thank you very much for your letter " + prose(1))) is None


def test_pieces_of_a_document_stay_together_unless_it_is_very_long() -> None:
    """A document of two pieces lies in one split; one that would fill a small split alone is spread."""
    pair, long = lines(1, 350), lines(2, 4000)
    sizes = SplitSizes(probe_bytes=150_000, val_bytes=150_000, holdout_bytes=150_000)
    corpus = split_corpus(
        [Document("pairs", lines(number, 350)) for number in range(10, 70)] + [Document("pairs", pair)], sizes
    )
    assert 1 < len(cut(pair)) < 4
    assert sum(any(text in pair for text in texts) for texts in contents(corpus).values()) == 1
    spread = split_corpus([Document("long", long)], SplitSizes(20_000, 20_000, 20_000))
    assert all(spread.splits[name] for name in SPLITS)


PARTS = st.sampled_from(["a", "é", "漢" * 3000, " ", "\n", "\n\n    ", "word " * 90, "x" * 9000])


@given(st.lists(PARTS, max_size=40).map("".join))
def test_pieces_are_small_and_lose_only_space(text: str) -> None:
    """Cut anywhere, a text's pieces have at most 16 KiB and hold every visible character in order."""
    pieces = cut(normalise(text))
    assert all(0 < len(piece.encode()) <= PIECE_BYTES for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_two_versions_of_a_long_document_are_cut_alike() -> None:
    """After lines added at its start, a long document's later pieces are those of the shorter version."""
    text = lines(3, 3000)
    shifted = lines(4, 40) + "\n" + text
    common = set(cut(text)) & set(cut(shifted))
    assert len(common) > 0.7 * len(cut(text))


def test_a_piece_keeps_its_indentation() -> None:
    """Only blank lines are taken from the start of a text."""
    assert normalise("\n  \n    def f():\n        pass\n\n") == "    def f():\n        pass"


@pytest.mark.parametrize("count", [1, 10, 27])
def test_too_little_text_is_refused_with_numbers(count: int) -> None:
    """Four splits need twice the held-out bytes; the message has what was read, what is left and what is needed."""
    text = documents(count)
    read = sum(len(str(document.content)) for document in text)
    with pytest.raises(SourceError, match=rf"{read} bytes were read, .* {read} are left, but 20000 are needed"):
        split_corpus([*text], SIZES)


def test_text_that_is_all_repeats_is_too_little() -> None:
    """A hundred copies of one document are one document."""
    with pytest.raises(SourceError, match="too small"):
        split_corpus([Document("one", prose(1))] * 100, SIZES)


@pytest.mark.parametrize("size", [0, -5])
def test_splits_hold_something(size: int) -> None:
    """A split of no bytes is refused."""
    with pytest.raises(ValueError, match="val_bytes must be at least 1"):
        SplitSizes(probe_bytes=1, val_bytes=size, holdout_bytes=1)


def test_report_adds_up_and_is_json() -> None:
    """What was read is what was dropped plus what the splits hold, per source."""
    text = [*documents(80, "one"), *documents(60, "two"), Document("one", lines(1, 900))]
    report = json.loads(json.dumps(split_corpus(text, SIZES).report.as_json()))
    for source in ("one", "two"):
        dropped = sum(row["texts"] for row in report["dropped"].get(source, {}).values())
        kept = sum(rows[source]["texts"] for rows in report["splits"].values() if source in rows)
        assert report["read"][source]["texts"] == dropped + kept


def test_texts_without_words_are_no_duplicates() -> None:
    """A text of which nothing is left to compare resembles nothing."""
    assert near_duplicates([shingles("\u200b"), shingles("\u200c")], lambda _: None) == {}
    assert HeldOut([shingles("")]).quoted_by(shingles(prose(1))) is None


def test_scripts_without_spaces_have_shingles_too() -> None:
    """Chinese or Japanese text is compared by characters, so an added sentence leaves it a near-duplicate."""
    text = "".join(chr(0x4E00 + (number * 37) % 5000) for number in range(300))
    assert near_duplicates([shingles(text), shingles(text + "一二三四五六")], lambda _: None) == {1: 0}
