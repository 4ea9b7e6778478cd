import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frozen.formats import Document, Format, Source, SourceError, read, readable_bytes


def texts(path: Path, file_format: Format = "auto") -> list[str]:
    """Return the texts of a source."""
    return [_text(document) for document in read(Source("one", path, format=file_format)).documents]


def _text(document: Document) -> str:
    """Return a document's text."""
    assert isinstance(document.content, str)
    return document.content


def rows(*values: Any) -> str:
    """Return JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values)


def good(count: int) -> list[dict[str, str]]:
    """Return rows that can be read."""
    return [{"text": f"text {number}"} for number in range(count)]


def test_a_folder_is_read_recursively_and_in_order(tmp_path: Path) -> None:
    """Text and JSON-lines files count, by suffix; hidden files and others do not, and are counted."""
    for name, content in {
        "b/two.py": "two",
        "b/a/one.md": "one",
        "z.jsonl": rows({"text": "three"}, {"text": "four"}),
        "image.png": "no text",
        "LICENSE": "no suffix",
        "config.json": "{}",
        ".hidden.txt": "hidden",
        ".git/config.txt": "hidden",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    reading = read(Source("one", tmp_path))
    assert reading.documents == [Document("one", text) for text in ("three", "four", "two", "one")]
    assert reading.other_files == {".png": 1, "no suffix": 1, ".json": 1}
    assert reading.rejected == []


@pytest.mark.parametrize(("name", "file_format"), [("data.txt", "auto"), ("README", "auto"), ("x.jsonl", "text")])
def test_a_named_file_is_one_text(tmp_path: Path, name: str, file_format: Format) -> None:
    """A file that is named itself may have any suffix, and a format that is named wins over the suffix."""
    (tmp_path / name).write_text('{"text": "é"}', encoding="utf-8")
    assert texts(tmp_path / name, file_format) == ['{"text": "é"}']


@pytest.mark.parametrize(("name", "file_format"), [("x.jsonl", "auto"), ("x.json", "auto"), ("x.txt", "jsonl")])
def test_a_named_file_of_json_lines(tmp_path: Path, name: str, file_format: Format) -> None:
    """Rows are documents, blank lines are none, a byte-order mark does no harm, other fields are left alone."""
    (tmp_path / name).write_text("\ufeff" + rows({"text": "a", "id": 1}) + "\n" + rows({"text": "b\nc"}), "utf-8")
    assert texts(tmp_path / name, file_format) == ["a", "b\nc"]


def test_links_to_folders_make_no_loop(tmp_path: Path) -> None:
    """A folder that links to itself, or a link that leads to itself, is read once and nothing hangs."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "b.txt").symlink_to(tmp_path / "c.txt")
    (tmp_path / "c.txt").symlink_to(tmp_path / "b.txt")
    reading = read(Source("one", tmp_path))
    assert [_text(document) for document in reading.documents] == ["a"]
    assert {(item.where, item.reason) for item in reading.rejected} == {
        ("b.txt", "a link that leads nowhere"),
        ("c.txt", "a link that leads nowhere"),
    }


def test_a_link_stays_within_the_folder(tmp_path: Path) -> None:
    """What lies outside is left out by name; a link to a file within is that file, also to a hidden one."""
    data, outside = tmp_path / "data", tmp_path / "outside"
    (data / ".store").mkdir(parents=True)
    outside.mkdir()
    (data / "a.txt").write_text("a")
    (data / ".store" / "8f3a").write_text("stored")
    (data / "b.txt").symlink_to(".store/8f3a")
    (outside / "secret.txt").write_text("secret")
    (data / "file.txt").symlink_to(outside / "secret.txt")
    (data / "folder").symlink_to(outside, target_is_directory=True)
    (data / ".hidden.txt").symlink_to(outside / "secret.txt")
    (tmp_path / "data-too").mkdir()
    (data / "near").symlink_to(tmp_path / "data-too")
    reading = read(Source("one", data))
    assert sorted(_text(document) for document in reading.documents) == ["a", "stored"]
    assert [(item.where, item.reason.partition(",")[0]) for item in reading.rejected] == [
        (name, "a link that leads out of the folder") for name in ("file.txt", "folder", "near")
    ]
    assert readable_bytes(Source("one", data)) == len("a") + len("stored")


@pytest.mark.parametrize("name", ["data", "data/a.txt"])
def test_a_source_may_be_a_link_itself(tmp_path: Path, name: str) -> None:
    """Whoever names a link means what it leads to."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / name)
    assert texts(tmp_path / "link") == ["a"]


def test_a_folder_of_links_says_where_they_lead(tmp_path: Path) -> None:
    """With nothing else in the folder the source is refused, and the sentence names the file to give instead."""
    (tmp_path / "data").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "data" / "a.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(SourceError, match=rf"holds no text \(a\.txt: a link .* to {tmp_path}/a\.txt"):
        read(Source("one", tmp_path / "data"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"ab\0cd", "binary"),
        (b"\x89PNG\r\n\x1a\n\0\0", "binary"),
        ("grüße".encode("latin-1"), "not UTF-8: byte 2 is 0xfc"),
        (b"", "empty"),
        (b"\xef\xbb\xbf \n\t", "empty"),
        ("text".encode("utf-16"), "UTF-16"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """Binary, wrongly encoded and empty files are refused by name and reason."""
    (tmp_path / "data.txt").write_bytes(content)
    with pytest.raises(SourceError, match=rf"source one: .*data\.txt: {reason}"):
        read(Source("one", tmp_path / "data.txt"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not UTF-8: byte 0 of the line is 0xff"),
        (b'{"text": "caf\xe9"}', "not UTF-8: byte 13 of the line is 0xe9"),
        (b'"text"', "expected an object with a field 'text', found str"),
        (b'{"content": "a"}', r"no field 'text' \(it has: content\)"),
        (b'{"text": 3}', "the field 'text' is no string but int"),
        (b'{"text": null}', "the field 'text' is no string but NoneType"),
        (b'{"text": "\\ud800"}', "the text holds half of a surrogate pair"),
    ],
)
def test_a_few_malformed_rows_are_rejected_and_many_refuse_the_source(tmp_path: Path, row: bytes, reason: str) -> None:
    """One bad row in fifty costs that row, with its line number and reason; one in ten refuses the source."""
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    few.write_bytes(rows(*good(30)).encode() + row + b"\n" + rows(*good(20)).encode())
    many.write_bytes(rows(*good(9)).encode() + row + b"\n")
    reading = read(Source("one", few))
    assert len(reading.documents) == 50
    assert [item.where for item in reading.rejected] == ["few.jsonl:31"]
    with pytest.raises(SourceError, match=rf"1 of 10 .* malformed \(at most 5% may be\): many\.jsonl:10: {reason}"):
        read(Source("one", many))


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.json", "x.csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_named_as_what_it_is(tmp_path: Path, name: str, encoding: str) -> None:
    """As some spreadsheets and shells write it: refused as a whole, with what to do."""
    text = rows(*good(30)) if name != "x.csv" else "text\n" + "a\n" * 30
    (tmp_path / name).write_bytes(
        ("\ufeff" if encoding == "utf-16-be" else "").encode(encoding) + text.encode(encoding)
    )
    with pytest.raises(SourceError, match=rf"{name}:? (is )?UTF-16, which is not read: save it as UTF-8"):
        read(Source("one", tmp_path / name, format="csv" if name == "x.csv" else "auto"))


def test_empty_rows_are_rejected_but_not_malformed(tmp_path: Path) -> None:
    """Texts without any letter are left out, however many there are."""
    (tmp_path / "x.jsonl").write_text(rows({"text": ""}, {"text": " \n"}, {"text": "a"}))
    reading = read(Source("one", tmp_path / "x.jsonl"))
    assert [item.reason for item in reading.rejected] == ["empty", "empty"]


def test_missing_and_special_sources_are_refused(tmp_path: Path) -> None:
    """A path that is not there, a pipe, and a folder without text each get their sentence."""
    with pytest.raises(SourceError, match="nowhere does not exist"):
        read(Source("one", tmp_path / "nowhere"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="neither a file nor a folder"):
        read(Source("one", tmp_path / "pipe"))
    with pytest.raises(SourceError, match="holds no text"):
        read(Source("one", tmp_path))
    (tmp_path / "a.png").write_bytes(b"\0")
    with pytest.raises(SourceError, match=r"only files that are not read as text: 1 \.png"):
        read(Source("one", tmp_path))


def test_a_source_needs_a_name(tmp_path: Path) -> None:
    """A source without a name could not be weighted or reported."""
    with pytest.raises(SourceError, match="empty name"):
        read(Source(" ", tmp_path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    """Whatever a file holds, reading gives documents or a SourceError, and documents can be encoded."""
    for name in ("x.txt", "x.jsonl"):
        (tmp_path / name).write_bytes(content)
        try:
            found = texts(tmp_path / name)
        except SourceError:
            continue
        assert all(text.encode("utf-8") for text in found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda text: text.strip("\ufeff \n")), min_size=1)
)
def test_json_lines_round_trip(tmp_path: Path, written: list[str]) -> None:
    """Texts written as JSON lines are read back exactly, unless they are white space."""
    path = tmp_path / "x.jsonl"
    path.write_text(rows(*({"text": text} for text in written)), "utf-8")
    visible = [text for text in written if text.lstrip("\ufeff").strip()]
    if visible:
        assert texts(path) == visible


def test_studies_and_bytecode_are_not_looked_into(tmp_path: Path) -> None:
    """A folder that holds studies gives the same documents before and after a study was made in it."""
    (tmp_path / "a.txt").write_text("a text")
    study = tmp_path / "runs" / "night"
    (study / "data" / "val").mkdir(parents=True)
    (study / "data" / "val" / "documents.jsonl").write_text('{"text": "held out"}\n')
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.py").write_text("x = 1\n")
    (study / "study.toml").write_text("task")
    assert len(read(Source("s", tmp_path)).documents) == 3
    (study / "ledger.db").write_text("")
    assert [_text(document) for document in read(Source("s", tmp_path)).documents] == ["a text"]


def test_only_what_would_be_read_counts_for_the_size(tmp_path: Path) -> None:
    """Bytecode and pictures beside the text do not make a small source look big."""
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"\0" * 5000)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    assert readable_bytes(Source("s", tmp_path)) == 6 + 14
    assert readable_bytes(Source("s", tmp_path / "a.py")) == 6
    with pytest.raises(SourceError, match="cannot be read"):
        readable_bytes(Source("s", tmp_path / "nothing"))
