import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import setup
from harness.config import flatten
from harness.errors import BadInput, OvernightError
from harness.paths import find, folder_of, names
from harness.queries import Reader
from harness.request import Request, check, settle
from harness.setup import create
from harness.study import load
from harness.studyfile import Evaluation

SMALL = Evaluation(context=32, stride=16, probe_bytes=4_000, val_bytes=8_000, holdout_bytes=8_000)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a JSONL file of 200 documents in which no two are alike."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(2000)]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=120))}) for _ in range(200)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def make(tmp_path: Path, texts: Path) -> Callable[..., Any]:
    """Return a call of `create` that is right unless told otherwise."""

    def call(name: str = "night", **changes: Any) -> Any:
        told: dict[str, Any] = {
            "policy": "demo",
            "data": [texts],
            "budget": "200000tok",
            "runs": tmp_path / "runs",
            "vocabulary": 400,
            "evaluation": SMALL,
        }
        return create(name, **(told | changes))

    return call


def test_a_study_is_whole_and_reads_back(make: Callable[..., Any], tmp_path: Path) -> None:
    """Everything a driver needs is in the folder, sealed, and the folder's parent holds nothing half made."""
    study = make(baseline={"optim.learning_rate": 0.001}, seed=7)
    assert study.paths.root == tmp_path / "runs" / "night"
    assert study.seal.verify(thorough=True) == study.seal.digest
    assert flatten(study.baseline)["optim.learning_rate"] == 0.001
    assert [study.seed_of(replicate) for replicate in (0, 1, 2)] == [7, 8, 9]
    assert (study.vocabulary, study.metric, study.evaluation.context) == (400, "bits_per_byte", 32)
    assert names(tmp_path / "runs") == ["night"]
    assert study.paths.agents_md.read_text() == setup.guide("night")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".cache", "night"]
    with Reader(study.paths.ledger) as reader:
        row = reader.study()
        assert (row.seal, row.budget, row.seed) == (study.seal.digest, "200000tok", 7)
        assert row.policy == study.paths.policy_toml.read_text()
        assert reader.invariants() == []
    again = load("night", tmp_path / "runs")
    assert (again.file, again.baseline, again.seal.digest) == (study.file, study.baseline, study.seal.digest)
    assert find(str(study.paths.root)).root == study.paths.root


def test_what_was_left_out_is_said(make: Callable[..., Any], texts: Path, tmp_path: Path) -> None:
    """Malformed rows that are too few to refuse the source are named with place and reason, also from the cache."""
    lines = texts.read_text().splitlines()
    for place, row in ((3, "{"), (10, '{"content": "x"}'), (50, "3"), (60, "{"), (70, "{"), (80, '{"text": ""}')):
        lines.insert(place, row)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(lines))
    for name in ("one", "two"):
        said: list[str] = []
        study = make(name, data=[broken], progress=said.append)
        (line,) = [line for line in said if line.startswith("Left out of")]
        assert line.startswith("Left out of source broken, 6 in all: broken.jsonl:4: not JSON: ")
        assert "; broken.jsonl:11: no field 'text' (it has: content); " in line
        assert line.endswith(f"; and 1 more, see {study.paths.data_report}.")


def test_a_source_that_adds_nothing_is_refused(make: Callable[..., Any], texts: Path, tmp_path: Path) -> None:
    """The same text under two names would give a weight that turns nothing; a part that is there already is told."""
    with pytest.raises(BadInput, match=r"source (one|two) adds nothing to train on: .* duplicates"):
        make(data=[f"one={texts}", f"two={texts}"])
    assert not (tmp_path / "runs" / "night").exists()


def test_the_encoded_data_is_shared(make: Callable[..., Any], tmp_path: Path) -> None:
    """A second study on the same text encodes nothing and takes no room."""
    one, two = make("one"), make("two", budget="6s")
    assert sum(path.is_dir() for path in (tmp_path / "runs" / ".cache").iterdir()) == 1
    name = "tokens.npy"
    assert (one.paths.split("train") / name).samefile(two.paths.split("train") / name)
    assert one.seal.digest != two.seal.digest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "no/such/../na me"}, "cannot be the name of a study"),
        ({"name": ".hidden"}, "cannot be the name of a study"),
        ({"policy": "demmo"}, "did you mean 'demo'"),
        ({"policy": "no/such.toml"}, "no policy file"),
        ({"budget": "5"}, "budget '5' is not understood"),
        ({"budget": "0.001s"}, "a trial needs at least 1 s"),
        ({"data": ["a= "]}, "names no file or folder"),
        ({"budget": "10tok"}, "the baseline does not fit its budget: one optimizer step takes"),
        ({"task": "pretrian"}, "did you mean 'pretrain'"),
        ({"model": "llama"}, "the task pretrain trains a fresh model, not llama"),
        ({"task": "sft"}, "the policy demo is not for the task sft but for pretrain"),
        ({"beta": 0.2}, "--beta belongs to preferences"),
        ({"guard": "x"}, "--guard compares with the untouched base model"),
        ({"baseline": {"optim.learning_rat": 1.0}}, "did you mean 'optim.learning_rate'"),
        ({"baseline": {"optim.learning_rate": 5.0}}, "is outside"),
        ({"vocabulary": 3}, "a vocabulary of 3 is too small"),
        ({"data": []}, "needs data"),
        ({"data": ["no-such-file"]}, "there is no readable file or folder 'no-such-file'"),
        ({"data": ["a=no-such-file"]}, "there is no readable file or folder 'no-such-file'"),
        ({"data": ["we ird=pyproject.toml"]}, "cannot be the name of a source"),
    ],
)
def test_a_bad_request_makes_nothing(
    make: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """One sentence with the value and what to do, exit code 2, and not even an empty folder."""
    with pytest.raises(OvernightError) as caught:
        make(**changes)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02" * 1000, b"too small for four splits", b"\xff\xfe\xfa" * 99])
def test_unusable_text_makes_nothing(make: Callable[..., Any], tmp_path: Path, content: bytes) -> None:
    """A source that is empty, binary, too small or not UTF-8 is refused, and nothing is left behind."""
    source = tmp_path / "source.txt"
    source.write_bytes(content)
    with pytest.raises(BadInput, match=r"source"):
        make(data=[source])
    assert not (tmp_path / "runs").exists()


def test_an_existing_study_is_not_touched(make: Callable[..., Any]) -> None:
    """A name is used once."""
    paths = make().paths
    before = paths.study_toml.stat()
    with pytest.raises(BadInput, match="is there already"):
        make()
    assert paths.study_toml.stat() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_said(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A full or read-only disk gets a sentence, and the half made folder is gone."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code), "somewhere")

    monkeypatch.setattr("harness.files.os.link", fail)
    monkeypatch.setattr("harness.files.CANNOT_LINK", frozenset())
    with pytest.raises(BadInput, match="somewhere cannot be written: "):
        make()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".cache"]


def test_a_full_disk_is_noticed_before_the_data_is_read(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What will not fit is not begun."""
    monkeypatch.setattr("harness.disk.free_bytes", lambda folder: 5_000)
    with pytest.raises(BadInput, match="nearly full"):
        make()
    assert not (tmp_path / "runs").exists()


def test_what_a_killed_create_left_is_swept(make: Callable[..., Any], tmp_path: Path) -> None:
    """The next attempt removes the hidden folder of a process that is no more, and no other."""
    dead, alive = tmp_path / "runs" / ".night.99999999", tmp_path / "runs" / f".night.{os.getppid()}"
    dead.mkdir(parents=True)
    alive.mkdir()
    make()
    assert not dead.exists()
    assert alive.exists()


def test_studies_are_found_by_name_or_path(make: Callable[..., Any], tmp_path: Path) -> None:
    """A mistyped name gets the nearest one; a path is taken as it is."""
    runs = tmp_path / "runs"
    with pytest.raises(BadInput, match="`overnight init night` makes one"):
        find("night", runs)
    make()
    with pytest.raises(BadInput, match="did you mean 'night'"):
        find("nihgt", runs)
    assert folder_of("./x/y", runs) == Path("x/y")
    assert folder_of("x", runs) == runs / "x"
    assert folder_of("./x", runs) == folder_of(folder_of("./x", runs), runs) == Path("x")


def test_constants_are_derived_from_the_amount_of_text(texts: Path, tmp_path: Path) -> None:
    """Without wishes of the owner, val and holdout get a tenth each and the context is the baseline's."""
    request = Request(
        root=tmp_path / "night",
        runs=tmp_path,
        policy="demo",
        data=(str(texts),),
        budget="6s",
        task="pretrain",
        model="fresh",
        baseline={},
        vocabulary=None,
        evaluation=None,
        seed=0,
    )
    file = settle(request, check(request), None).file
    size = texts.stat().st_size
    assert (file.eval.val_bytes, file.eval.holdout_bytes, file.eval.probe_bytes) == (size // 10, size // 10, size // 40)
    assert (file.eval.context, file.eval.stride, file.study.vocabulary) == (128, 64, 1024)


def test_demo_text_is_the_standard_library(tmp_path: Path) -> None:
    """The demo needs no download: modules in order of name, a few megabytes, copied once."""
    folder = setup.demo_text(tmp_path)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert setup.DEMO_TEXT_BYTES <= size < setup.DEMO_TEXT_BYTES * 1.2
    assert setup.demo_text(tmp_path, library=tmp_path) == folder
    with pytest.raises(BadInput, match="standard library"):
        setup.demo_text(tmp_path / "other", library=tmp_path / "nothing")


def test_a_cpu_computes_in_fp32(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy for GPUs is not left to crawl, and is told so; who names bf16 has it."""
    monkeypatch.setattr("harness.origin.device", lambda: "cpu")
    said: list[str] = []
    assert make(policy="pretrain", budget="20Mtok", progress=said.append).baseline.precision == "fp32"
    assert any("compute in fp32" in line for line in said)


def test_who_names_bf16_has_it(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some CPUs have the instructions for it."""
    monkeypatch.setattr("harness.origin.device", lambda: "cpu")
    assert make(policy="pretrain", budget="20Mtok", baseline={"precision": "bf16"}).baseline.precision == "bf16"


def test_a_baseline_that_cannot_fit_is_told(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a byte of data is read."""
    monkeypatch.setattr("harness.origin.device_memory_bytes", lambda device: 10_000_000)
    with pytest.raises(BadInput, match="the baseline does not fit this machine: it needs about"):
        make()
