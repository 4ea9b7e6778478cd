import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frozen.corpus import SPLITS, SplitSizes
from frozen.formats import Source, SourceError
from frozen.tokens import (
    SEPARATOR,
    EncodedSplit,
    NewTokenizer,
    Prepared,
    encode,
    prepare,
    train_tokenizer,
    write_split,
)

MakeSplit = Callable[..., EncodedSplit]
SIZES = SplitSizes(probe_bytes=2000, val_bytes=4000, holdout_bytes=4000)
TEXTS = ["the quick brown fox jumps over the lazy dog " * 20, "grüße, 漢字 and 🎉\n" * 20]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small tokenizer."""
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer(TEXTS, 300, folder)
    return folder


def write_source(folder: Path, count: int = 100, seed: int = 0) -> Path:
    """Write a folder of different text files, about 700 bytes each, and return it."""
    folder.mkdir(parents=True)
    for number in range(count):
        rng = random.Random(seed * 1000 + number)
        text = " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(120))
        (folder / f"{number}.txt").write_text(f"é{text}\n")
    return folder


def files_of(folder: Path) -> dict[str, str]:
    """Return the digest of every file in a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_splits_round_trip(make_split: MakeSplit) -> None:
    """What is written is what is mapped, with the narrowest type that holds the vocabulary."""
    split = make_split([[1, 2], [3], [99, 5, 6]], byte_counts=[7, 8, 9], source_ids=[0, 1, 0], sources=("a", "b"))
    assert [split.document(index).tolist() for index in range(split.documents)] == [[1, 2], [3], [99, 5, 6]]
    assert (split.bytes.tolist(), split.source_ids.tolist(), split.sources) == ([7, 8, 9], [0, 1, 0], ("a", "b"))
    assert (split.separator, split.vocabulary, split.tokens.dtype) == (0, 100, np.uint16)
    assert isinstance(split.tokens, np.memmap)
    assert make_split([[70_000]], vocabulary=100_000).tokens.dtype == np.uint32


@pytest.mark.parametrize("token", [-1, 100])
def test_tokens_outside_the_vocabulary_are_refused(make_split: MakeSplit, token: int) -> None:
    """A token that has no logit is never written."""
    with pytest.raises(ValueError, match="document 1 holds a token outside the vocabulary of 100"):
        make_split([[1], [token]])


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("tokens", np.zeros(6, np.int64), "types"),
        ("tokens", np.zeros(7, np.uint16), "offsets do not cut 7 tokens"),
        ("offsets", np.array([0, 2, 2, 6]), "at least one token"),
        ("offsets", np.array([1, 2, 3, 6]), "offsets"),
        ("bytes", np.array([1, 2]), "2 byte counts, 4 offsets, 3 source ids"),
        ("bytes", np.array([1, 0, 2]), "an empty one"),
        ("source_ids", np.array([0, 0, 1], np.int16), "none of the 1 named"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(
    tmp_path: Path, make_split: MakeSplit, name: str, values: Any, problem: str
) -> None:
    """A split whose files do not fit together is named, with what does not fit."""
    make_split([[1, 2], [3], [4, 5, 6]])
    np.save(tmp_path / "split1" / f"{name}.npy", values)
    with pytest.raises(ValueError, match=rf"split1 is not a sound split: .*{problem}"):
        EncodedSplit.load(tmp_path / "split1")


@pytest.mark.parametrize("documents", [[], [[]]])
def test_a_split_without_tokens_is_refused(make_split: MakeSplit, documents: Sequence[Sequence[int]]) -> None:
    """A split holds documents, and a document holds tokens."""
    with pytest.raises(ValueError, match="not a sound split"):
        make_split(documents)


def test_a_separator_outside_the_vocabulary_is_refused(make_split: MakeSplit) -> None:
    """The separator is a token like any other."""
    with pytest.raises(ValueError, match="separator 100"):
        make_split([[1]], separator=100)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1))
def test_any_text_decodes_to_itself(tokenizer: Path, text: str) -> None:
    """Byte-level encoding loses nothing, whatever the text."""
    from tokenizers import Tokenizer

    (tokens,) = encode([text], tokenizer)
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert loaded.decode(tokens.tolist(), skip_special_tokens=False) == text


def test_a_text_cannot_spell_the_separator(tokenizer: Path) -> None:
    """The separator's name in a document is text: it is encoded by its characters and scored as such."""
    (tokens,) = encode([f"a{SEPARATOR}b"], tokenizer)
    assert 0 not in tokens
    assert len(tokens) > 3


def test_training_a_tokenizer_repeats_exactly(tmp_path: Path, tokenizer: Path) -> None:
    """The same texts give the same files, also in another process with other hash seeds."""
    script = (
        "import json, sys, pathlib; from frozen.tokens import train_tokenizer;"
        "train_tokenizer(json.loads(sys.argv[1]), 300, pathlib.Path(sys.argv[2]))"
    )
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-c", script, json.dumps(TEXTS), str(other)], check=True, timeout=120)
    assert files_of(other) == files_of(tokenizer)


@pytest.mark.parametrize("vocabulary", [0, 256, 1 << 21])
def test_impossible_vocabularies_are_refused(tmp_path: Path, vocabulary: int) -> None:
    """256 bytes and the separator are the least."""
    with pytest.raises(ValueError, match=f"a vocabulary of {vocabulary}"):
        train_tokenizer(TEXTS, vocabulary, tmp_path / "tokenizer")


@pytest.mark.process
def test_transformers_loads_the_tokenizer(tokenizer: Path) -> None:
    """``AutoTokenizer.from_pretrained`` gives the same tokens, and knows the separator as id 0."""
    script = (
        "import sys; from transformers import AutoTokenizer;"
        "loaded = AutoTokenizer.from_pretrained(sys.argv[1]); text = 'the fox 漢 ';"
        "print(loaded.eos_token_id, loaded.bos_token_id, len(loaded), loaded.decode(loaded(text).input_ids) == text,"
        " *loaded(text).input_ids)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tokenizer)], check=True, timeout=300, capture_output=True, text=True
    )
    (tokens,) = encode(["the fox 漢 "], tokenizer)
    assert done.stdout.split() == ["0", "0", "300", "True", *map(str, tokens.tolist())]


def test_tokens_needs_no_torch() -> None:
    """The driver prepares data without importing torch."""
    script = "import sys, frozen.tokens, frozen.timer; print('torch' in sys.modules, 'datasketch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Return data that was prepared once."""
    folder = tmp_path_factory.mktemp("prepared")
    sources = [Source("b", write_source(folder / "b")), Source("a", write_source(folder / "a", 40, seed=1))]
    return prepare(sources, SIZES, NewTokenizer(400), folder / "cache")


def test_prepared_data_is_complete(prepared: Prepared) -> None:
    """Every split, the tokenizer, the report, and the raw text of val and holdout are there; of train it is not."""
    assert {path.split("/")[0] for path in files_of(prepared.folder)} == {
        *SPLITS,
        "tokenizer",
        "report.json",
        "manifest.json",
    }
    assert (prepared.folder.name, prepared.reused, prepared.vocabulary) == (prepared.digest, False, 400)
    raw = {path.parent.name for path in prepared.folder.rglob("documents.jsonl")}
    assert raw == {"val", "holdout"}


@pytest.mark.parametrize("name", ["val", "holdout"])
def test_scored_bytes_are_the_bytes_of_the_raw_text(prepared: Prepared, name: str) -> None:
    """Document by document: bytes are those of the raw text, and the tokens are its encoding."""
    split = EncodedSplit.load(prepared.folder / name)
    with (prepared.folder / name / "documents.jsonl").open(encoding="utf-8", newline="\n") as file:
        rows = [json.loads(line) for line in file]
    assert split.bytes.tolist() == [len(row["text"].encode("utf-8")) for row in rows]
    for index, tokens in enumerate(encode([row["text"] for row in rows], prepared.folder / "tokenizer")):
        assert split.document(index).tolist() == tokens.tolist()
    assert [split.sources[source] for source in split.source_ids] == [row["source"] for row in rows]


def test_train_holds_no_held_out_text(prepared: Prepared) -> None:
    """No document of probe, val or holdout is in train, token by token."""
    splits = {name: EncodedSplit.load(prepared.folder / name) for name in SPLITS}
    seen = {
        name: {tuple(split.document(index).tolist()) for index in range(split.documents)}
        for name, split in splits.items()
    }
    for name in ("probe", "val", "holdout"):
        assert not seen["train"] & seen[name]
    assert sum(map(len, seen.values())) == 140


def test_report_says_what_was_read_and_kept(prepared: Prepared) -> None:
    """Counts by source and split, tokens, vocabulary and rejections are in the report."""
    report = prepared.report
    assert {name: row["documents"] for name, row in report["read"].items()} == {"a": 40, "b": 100}
    assert set(report["splits"]) == set(report["tokens"]) == set(SPLITS)
    assert report["rejected"]["a"] == {"rejected": 0, "first": [], "other_files": {}}


def test_the_same_inputs_are_reused_wherever_they_lie(tmp_path: Path) -> None:
    """Other paths, file names and another order find the same folder; another vocabulary does not."""
    one, two = write_source(tmp_path / "one"), write_source(tmp_path / "two", 20, seed=1)
    cache = tmp_path / "cache"
    first = prepare([Source("one", one), Source("two", two)], SIZES, NewTokenizer(300), cache)
    one.rename(tmp_path / "moved")
    (tmp_path / "moved" / "7.txt").rename(tmp_path / "moved" / "renamed.md")
    again = prepare([Source("two", two), Source("one", tmp_path / "moved")], SIZES, NewTokenizer(300), cache)
    assert (again.folder, again.reused, again.report) == (first.folder, True, first.report)
    other = prepare([Source("two", two), Source("one", tmp_path / "moved")], SIZES, NewTokenizer(301), cache)
    assert (other.reused, other.folder == first.folder) == (False, False)


def test_preparing_repeats_exactly(tmp_path: Path) -> None:
    """Prepared twice into two caches, every file is the same."""
    source = write_source(tmp_path / "source")
    one, two = (prepare([Source("s", source)], SIZES, NewTokenizer(300), tmp_path / name) for name in ("one", "two"))
    assert files_of(one.folder) == files_of(two.folder)


@pytest.mark.parametrize("damage", ["change", "remove", "add", "manifest"])
def test_a_cache_that_has_changed_is_made_anew(tmp_path: Path, damage: str) -> None:
    """Studies share the cache's files: one that was touched is never sealed into the next study."""
    source = write_source(tmp_path / "source")
    first = prepare([Source("s", source)], SIZES, NewTokenizer(300), tmp_path / "cache")
    before = files_of(first.folder)
    match damage:
        case "change":
            content = bytearray((first.folder / "val" / "tokens.npy").read_bytes())
            content[-1] ^= 1
            (first.folder / "val" / "tokens.npy").write_bytes(content)
        case "remove":
            (first.folder / "tokenizer" / "tokenizer.json").unlink()
        case "add":
            (first.folder / "train" / "more.npy").write_bytes(b"")
        case _:
            (first.folder / "manifest.json").write_text("{")
    again = prepare([Source("s", source)], SIZES, NewTokenizer(300), tmp_path / "cache")
    assert not again.reused
    assert files_of(again.folder) == before


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    """A half-built folder is never used, and gone after the next build."""
    cache = tmp_path / "cache"
    (cache / ".building-dead" / "train").mkdir(parents=True)
    prepared = prepare([Source("s", write_source(tmp_path / "source"))], SIZES, NewTokenizer(300), cache)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [prepared.digest]


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    """Too little text, a missing source, a repeated name or a vocabulary of 10 leave no trace."""
    cache, source = tmp_path / "cache", Source("s", write_source(tmp_path / "source", 3))
    for sources, vocabulary in (
        ([source], 300),
        ([Source("s", tmp_path / "nowhere")], 300),
        ([source, source], 300),
        ([], 300),
        ([source], 10),
    ):
        with pytest.raises((SourceError, ValueError)):
            prepare(sources, SIZES, NewTokenizer(vocabulary), cache)
    assert not cache.exists()


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    """An error while encoding reaches the caller, and the half-built folder is removed."""

    def fail(message: str) -> None:
        if message == "encoding val":
            raise OSError("no space left")

    cache = tmp_path / "cache"
    with pytest.raises(OSError, match="no space"):
        prepare([Source("s", write_source(tmp_path / "source"))], SIZES, NewTokenizer(300), cache, fail)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_write_split_does_not_overwrite(tmp_path: Path, make_split: MakeSplit) -> None:
    """A folder that is there already is an error, not a merge."""
    make_split([[1]])
    with pytest.raises(FileExistsError):
        write_split(
            tmp_path / "split1",
            documents=[[1]],
            byte_counts=[1],
            source_ids=[0],
            sources=("one",),
            separator=0,
            vocabulary=10,
        )
