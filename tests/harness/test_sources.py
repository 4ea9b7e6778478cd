from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import hub
from harness.errors import BadInput
from harness.sources import data_sources, guard_set, pinned
from harness.studyfile import DataSource


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of rows in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x"}\n' * 100)
    (tmp_path / "folder").mkdir()
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rows.jsonl", {"name": "rows", "path": "rows.jsonl"}),
        ("mine=rows.jsonl", {"name": "mine", "path": "rows.jsonl"}),
        ("hub:org/name", {"name": "name", "hub": "org/name"}),
        ("hub:name", {"name": "name", "hub": "name"}),
        ("a=hub:org/name@v1.2", {"name": "a", "hub": "org/name", "revision": "v1.2"}),
        ("Abirate/english_quotes", {"name": "english_quotes", "hub": "Abirate/english_quotes"}),
        ("q=tatsu-lab/alpaca@main", {"name": "q", "hub": "tatsu-lab/alpaca", "revision": "main"}),
    ],
)
@pytest.mark.usefixtures("rows")
def test_what_a_src_names(text: str, expected: dict[str, str]) -> None:
    """A path, or a data set on the Hub with or without its mark; a name before either."""
    (source,) = data_sources([text], [], {})
    assert source == DataSource(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("org/rows.jsonl", "no readable file or folder 'org/rows.jsonl'"),
        ("folder/name", "no readable file or folder 'folder/name' (a data set on the Hub is hub:folder/name)"),
        ("./org/name", "no readable file or folder './org/name'"),
        ("hub:a/b/c", "names no data set on the Hub"),
        ("hub:", "names no data set on the Hub"),
        ("guard=rows.jsonl", "cannot be named 'guard'"),
        ("nothing", "no readable file or folder 'nothing'"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_a_mistyped_path_is_not_asked_of_the_hub(text: str, said: str) -> None:
    """What looks like a file, or lies in a folder that is here, is a file."""
    with pytest.raises(BadInput, match=re.escape(said)):
        data_sources([text], [], {})


@pytest.mark.usefixtures("rows")
def test_a_local_folder_of_the_name_wins(tmp_path: Path) -> None:
    """ORG/NAME that lies here is read here."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    (source,) = data_sources(["org/name"], [], {})
    assert (source.path, source.hub) == ("org/name", None)


@pytest.mark.usefixtures("rows")
def test_options_for_all_and_for_one() -> None:
    """A bare value is for the sources of --data that have none of their own; general text is named."""
    options = {"format": ["alpaca", "b=chat", "web=text"], "column": ["b=answer=1"], "split": ["b=train_sft"]}
    a, b, web = data_sources(["a=rows.jsonl", "b=hub:o/n"], ["web=folder"], options)
    assert (a.format, a.column, a.general) == ("alpaca", None, False)
    assert (b.format, b.column, b.split, b.general) == ("chat", "answer=1", "train_sft", False)
    assert (web.format, web.general) == ("text", True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": ["rowss=chat"]}, "there is no source 'rowss'; did you mean 'rows'?"),
        ({"format": ["chatt"]}, "source rows: format 'chatt' is not known; did you mean 'chat'?"),
        ({"format": ["chat", "alpaca"]}, "--format is given twice for all sources"),
        ({"column": ["rows=a", "rows=b"]}, "--column is given twice for rows"),
        ({"subset": ["x"]}, "--subset is for data sets on the Hub"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_options_that_fit_nothing(options: dict[str, list[str]], said: str) -> None:
    """Never ignored, always named."""
    with pytest.raises(BadInput, match=re.escape(said)):
        data_sources(["rows.jsonl"], [], options)


@pytest.mark.usefixtures("rows")
def test_guard_set() -> None:
    """Its options are those of `guard`; others are not its."""
    guard = guard_set("rows.jsonl", None, 1 << 16, {"column": ["text", "guard=body"], "format": ["guard=jsonl"]})
    assert (guard.path, guard.column, guard.format) == ("rows.jsonl", "body", "jsonl")
    assert (guard.bytes, guard.max_regression) == (1 << 16, 0.05)
    assert guard_set(guard, 0.5, 1, {}).max_regression == 0.5
    with pytest.raises(BadInput, match="max_regression"):
        guard_set("rows.jsonl", 99.0, 1, {})


def test_a_data_set_is_pinned_to_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into the study is the commit that was read, not a branch that moves on."""
    monkeypatch.setattr(hub, "data_set_commit", lambda name, revision: ("c" * 40, 123))
    assert pinned(DataSource(name="a", hub="o/n", revision="main")) == (
        DataSource(name="a", hub="o/n", revision="c" * 40),
        123,
    )
