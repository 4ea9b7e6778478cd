import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frozen import rows
from frozen.conversations import Conversation, Turn
from frozen.formats import Reading, Source, SourceError, read, readable_bytes

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "é 🎉"}]
CONTENT = Conversation((Turn("user", "a"), Turn("assistant", "é 🎉")))


def contents(path: Path, **how: Any) -> list[Any]:
    """Return what a source's documents say."""
    return [document.content for document in read(Source("one", path, **how)).documents]


def write(path: Path, text: str | bytes) -> Path:
    """Write a file."""
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return path


def lines(*values: Any) -> str:
    """Return JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values)


def talks(count: int, **more: Any) -> list[dict[str, Any]]:
    """Return chat rows, each another."""
    return [{"messages": [{"role": "user", "content": f"q{number}"}, TALK[1]], **more} for number in range(count)]


# --- JSON ----------------------------------------------------------------------------------------------------------


def test_a_json_array_is_read_by_element(tmp_path: Path) -> None:
    """Also with a byte-order mark and any layout; an element's place is its number."""
    path = write(tmp_path / "x.json", "\ufeff \n" + json.dumps(talks(30), indent=2).replace('"q4"', "4"))
    reading = read(Source("one", path))
    assert len(reading.documents) == 29
    assert [item.where for item in reading.rejected] == ["x.json:5"]
    assert reading.containers == {"json": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"text": "a"}, {"text": ', "element 2"),
        ('[{"text": "a"} {"text": "b"}]', "breaks off after element 1"),
        ('[{"text": "a"}] x', "something follows"),
        ('[{"text": "a"}', "breaks off"),
        ("[" * 100_000, "element 1"),
        (b'["\xff"]', "not UTF-8"),
    ],
)
def test_a_broken_json_array_is_refused(tmp_path: Path, text: str | bytes, reason: str) -> None:
    """Nothing tells where its next element would begin."""
    with pytest.raises(SourceError, match=reason):
        read(Source("one", write(tmp_path / "x.json", text)))


def test_an_empty_json_array_holds_nothing(tmp_path: Path) -> None:
    """It is no crash."""
    with pytest.raises(SourceError, match="holds no text"):
        read(Source("one", write(tmp_path / "x.json", "[ ]")))


def test_a_line_of_twenty_megabytes_is_a_row_like_any_other(tmp_path: Path) -> None:
    """As a text it is read; as a conversation it is too long to be one."""
    long = "word " * (4 << 20)
    path = write(tmp_path / "x.jsonl", lines({"text": long}, {"text": "b"}))
    assert [len(text) for text in contents(path)] == [len(long), 1]
    path = write(tmp_path / "y.jsonl", lines(*talks(30), {"messages": [TALK[0], {**TALK[1], "content": long}]}))
    assert [item.reason for item in read(Source("one", path)).rejected] == [
        "a conversation of more than 1048576 characters"
    ]


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line beyond the limit is one malformed row, and what comes after it is read."""
    monkeypatch.setattr(rows, "LARGEST_ROW_BYTES", 1000)
    path = write(tmp_path / "x.jsonl", lines(*talks(30)) + "x" * 5000 + "\n" + lines(*talks(31)[30:]))
    reading = read(Source("one", path))
    assert len(reading.documents) == 31
    assert [item.where for item in reading.rejected] == ["x.jsonl:31"]


def test_windows_line_ends_and_byte_order_marks(tmp_path: Path) -> None:
    """Neither is part of any content."""
    text = "\ufeff" + lines(*talks(3)).replace("\n", "\r\n")
    assert contents(write(tmp_path / "x.jsonl", text))[0].turns[0].content == "q0"


def test_rows_of_several_schemas_are_refused_with_the_reason(tmp_path: Path) -> None:
    """What most rows hold is what the source is read as; a share of others is too much."""
    path = write(tmp_path / "x.jsonl", lines(*talks(60), *({"text": "b"} for _ in range(40))))
    with pytest.raises(
        SourceError, match=r"40 of 100 .* read as chat because 60 of the first 100 .* no field 'messages'"
    ):
        read(Source("one", path))


def test_a_readme_beside_conversations_is_no_conversation(tmp_path: Path) -> None:
    """Texts in the folder are left out and counted, whether they come before or after the rows."""
    write(tmp_path / "README.md", "# Data")
    write(tmp_path / "train.jsonl", lines(*talks(3)))
    write(tmp_path / "z.txt", "licence")
    reading = read(Source("one", tmp_path))
    assert (len(reading.documents), reading.kind) == (3, "conversation")
    assert reading.other_files == {".md": 1, ".txt": 1}


def test_a_named_format_wins(tmp_path: Path) -> None:
    """Rows that could be two things are what their owner says."""
    row = {"prompt": "a", "completion": "b", "instruction": "c", "output": "d"}
    path = write(tmp_path / "x.jsonl", lines(row))
    assert contents(path)[0].plain
    assert contents(path, format="alpaca")[0].turns[0].content == "c"
    assert contents(path, column="output") == ["d"]


# --- CSV -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_with_known_fields_is_read_by_row(tmp_path: Path, delimiter: str) -> None:
    """Quotes, line ends within a field, a byte-order mark and each usual delimiter."""
    rows_ = [["instruction", "output"], ['"say ""a"""', '"b\r\nc"'], ["d", "e"]]
    text = "\ufeff" + "\r\n".join(delimiter.join(row) for row in rows_)
    found = contents(write(tmp_path / "x.csv", text))
    assert [[turn.content for turn in content.turns] for content in found] == [['say "a"', "b\nc"], ["d", "e"]]


def test_csv_without_known_fields_is_a_text_unless_asked(tmp_path: Path) -> None:
    """Tables were always texts; with a column or the format named they are rows."""
    path = write(tmp_path / "x.csv", "name,body\nn,hello\n")
    assert contents(path) == ["name,body\nn,hello\n"]
    assert contents(path, column="body") == ["hello"]
    with pytest.raises(SourceError, match=r"no field 'text' \(it has: body, name\)"):
        read(Source("one", path, format="csv"))


def test_broken_csv_rows_cost_themselves(tmp_path: Path) -> None:
    """Too many fields, bytes that are not UTF-8: by line, with the reason."""
    good = b"".join(b"a%d\n" % number for number in range(100))
    reading = read(Source("one", write(tmp_path / "x.csv", b"text\n" + good + b"b,c\n\xff\n" + good)))
    assert len(reading.documents) == 200
    assert [(item.where, item.reason) for item in reading.rejected] == [
        ("x.csv:102", "2 fields, where the first line names 1"),
        ("x.csv:103", "not UTF-8"),
    ]


@pytest.mark.parametrize("fault", ['q3,"a3', '"q3,a3'])
def test_a_quotation_mark_that_is_not_closed_costs_every_line_it_swallows(tmp_path: Path, fault: str) -> None:
    """Else one sign takes half of a file away, and counts as one malformed row."""
    lines = [f"q{number},a{number}" for number in range(40)]
    lines[3] = fault
    path = write(tmp_path / "x.csv", "prompt,completion\n" + "\n".join(lines) + "\n")
    with pytest.raises(SourceError, match=r"37 of 40 documents .* x\.csv:5: not CSV: .* begins on line 5"):
        read(Source("one", path))


def test_csv_fields_may_be_large(tmp_path: Path) -> None:
    """The library's limit of 128 kB is lifted for the file alone."""
    import csv

    before = csv.field_size_limit()
    assert [len(text) for text in contents(write(tmp_path / "x.csv", "text\n" + "y" * 1_000_000 + "\n"))] == [1_000_000]
    assert csv.field_size_limit() == before


def test_csv_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    """Which column is meant is anybody's guess."""
    with pytest.raises(SourceError, match="the same name"):
        read(Source("one", write(tmp_path / "x.csv", "text,text\na,b\n")))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.binary(max_size=120))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    """Whatever a file with a format's name holds, reading gives documents or a SourceError."""
    for name, start in (("x.csv", b"text,b\n"), ("x.json", b"["), ("x.jsonl", b""), ("x.parquet", b"PAR1")):
        path = write(tmp_path / name, start + content)
        try:
            found = read(Source("one", path))
        except SourceError:
            continue
        assert found.documents


# --- Parquet and saved data sets ------------------------------------------------------------------------------------


def test_parquet_rows(tmp_path: Path) -> None:
    """Nested messages are read, columns that no format knows are not decoded."""
    table = pa.Table.from_pylist([{"messages": TALK, "picture": b"\x89PNG"}] * 600)
    pq.write_table(table, tmp_path / "x.parquet")
    reading = read(Source("one", tmp_path / "x.parquet"))
    assert [document.content for document in reading.documents] == [CONTENT] * 600
    assert reading.documents[-1].where == "x.parquet:600"
    assert readable_bytes(Source("one", tmp_path)) == (tmp_path / "x.parquet").stat().st_size


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    """A damaged file is named."""
    with pytest.raises(SourceError, match=r"x\.parquet cannot be read as Parquet"):
        read(Source("one", write(tmp_path / "x.parquet", b"PAR1 nothing PAR1")))


def test_saved_data_sets(tmp_path: Path) -> None:
    """What `save_to_disk` writes is read, one data set or one split of several."""
    one = datasets.Dataset.from_list([{"messages": TALK, "id": 1}] * 3)
    other = datasets.Dataset.from_list([{"messages": TALK}] * 5)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": other}).save_to_disk(tmp_path / "both")
    assert contents(tmp_path / "one") == [CONTENT] * 3
    assert len(contents(tmp_path / "both")) == 3
    assert len(contents(tmp_path / "both", split="test")) == 5
    assert contents(tmp_path / "one", format="saved") == [CONTENT] * 3
    assert readable_bytes(Source("one", tmp_path / "one")) > 0
    with pytest.raises(SourceError, match=r"no split 'dev': it has train, test"):
        read(Source("one", tmp_path / "both", split="dev"))
    with pytest.raises(SourceError, match="without splits"):
        read(Source("one", tmp_path / "one", split="test"))


def test_a_saved_data_set_with_chosen_rows_is_read_as_chosen(tmp_path: Path) -> None:
    """`select` before saving leaves no other row behind."""
    whole = datasets.Dataset.from_list([{"text": f"row {number}"} for number in range(9)])
    whole.select([7, 2]).save_to_disk(tmp_path / "some")
    assert contents(tmp_path / "some") == ["row 7", "row 2"]


def test_a_saved_data_set_reads_nothing_outside_of_itself(tmp_path: Path) -> None:
    """A file list that leads elsewhere is refused."""
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "one")
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    state["_data_files"] = [{"filename": "../secret.arrow"}]
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    with pytest.raises(SourceError, match="no data files of its own folder"):
        read(Source("one", tmp_path / "one"))


@pytest.mark.parametrize("how", [{"format": "saved"}, {"split": "train"}])
def test_a_folder_that_was_not_saved_is_refused(tmp_path: Path, how: dict[str, Any]) -> None:
    """It has neither the files nor splits."""
    write(tmp_path / "a.txt", "a")
    with pytest.raises(SourceError, match=r"no folder that|has no splits"):
        read(Source("one", tmp_path, **how))


# --- the Hub --------------------------------------------------------------------------------------------------------


class _Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does for a gated and an unknown data set."""

    def do_GET(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.process
def test_why_a_hub_data_set_cannot_be_had_is_said(endpoint: str, tmp_path: Path) -> None:
    """Gated, unknown, offline and unreachable are told apart, each with what to do."""
    script = (
        "import sys; from frozen.formats import *\n"
        "try: read(Source('one', None, hub=sys.argv[1]))\n"
        "except SourceError as error: print(error)"
    )

    def reason(hub: str, **environment: str) -> str:
        surroundings = {"HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_ENDPOINT": endpoint} | environment
        command = [sys.executable, "-c", script, hub]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=surroundings, check=True)
        return done.stdout

    assert "it is gated: ask for access" in reason("some/gated")
    assert "there is none of this name, or it is private" in reason("some/unknown")
    assert "HF_HUB_OFFLINE is set" in reason("some/data", HF_HUB_OFFLINE="1")
    assert "the Hub cannot be reached" in reason("some/data", HF_ENDPOINT="http://127.0.0.1:1")


def test_rows_of_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` returns is read without the columns that nobody wants, and the commit is kept."""
    commit = "0123456789" * 4
    data = datasets.Dataset.from_list([{"messages": TALK, "picture": "x"}] * 3)
    asked: list[tuple[Any, ...]] = []

    def load(hub: str, subset: str | None, *, split: str, revision: str) -> datasets.Dataset:
        asked.append((hub, subset, split, revision))
        return data

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda hub, subset, revision: ["test", "train"])
    reading: Reading = read(Source("one", None, hub="some/data", revision=commit, subset="english"))
    assert [document.content for document in reading.documents] == [CONTENT] * 3
    assert asked == [("some/data", "english", "train", commit)]
    assert (reading.revision, reading.containers) == (commit, {"hub": 1})


def test_a_folder_is_never_taken_for_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would read the folder."""
    (tmp_path / "some" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="is a file or folder here"):
        read(Source("one", None, hub="some/data"))
