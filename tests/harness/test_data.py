import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozen.conversations import Conversation, Preference, Turn
from frozen.rows import HubData, Row
from harness.cli import main
from harness.data import LONGEST_SAMPLE, SAMPLES, harmless, preview
from tests.standin import make_tokenizer


def talk(number: int, answer: str = "yes") -> dict[str, Any]:
    """Return a chat row."""
    rng = random.Random(number)
    question = " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(12))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"{answer} {number}"}]}


def rows(path: Path, *values: Any) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run the command; return exit code, output and errors."""
    code = main(["data", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    """Run the command with --json; return exit code and the first source."""
    code, out, _ = shown(capsys, *words, "--json")
    (source,) = json.loads(out)["sources"]
    return code, source


def test_what_was_understood_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Format and reason, counts, lengths, duplicates, what is left out with its row, and samples."""
    path = rows(tmp_path / "talks.jsonl", *map(talk, range(100)), talk(3), {"messages": []}, {"text": "x"})
    code, out, err = shown(capsys, path)
    assert (code, err) == (0, "")
    for words in (
        "chat: 100 of the first 100 rows have the field 'messages'",
        "101 conversations",
        "1 equal",
        "talks.jsonl:102  a conversation without an answer",
        "talks.jsonl:103  no field 'messages' (it has: text)",
        "50 of 101, drawn at random",
        "assistant: “yes ",
    ):
        assert words in out
    assert shown(capsys, path)[1] == out


def test_reasons_that_differ_in_a_number_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But the number in a name belongs to it."""
    path = rows(tmp_path / "talks.jsonl", *map(talk, range(60)), {"messages": [{}]}, {"messages": [talk(1), {}]})
    path.write_bytes(path.read_bytes() + b'{"text": "\xe9"}\n')
    _, source = document(capsys, path)
    assert source["reasons"] == {
        "message N has no 'role' (or 'from')": 2,
        "not UTF-8: byte N of the line is 0xe9": 1,
    }


def test_the_document_has_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, one document and nothing else."""
    path = rows(tmp_path / "talks.jsonl", *map(talk, range(60)), {"messages": []})
    code, source = document(capsys, path)
    assert code == 0
    assert (source["format"], source["kind"], source["documents"]) == ("chat", "conversation", 60)
    assert source["first"] == [
        {"where": "talks.jsonl:61", "reason": "a conversation without an answer of the assistant"}
    ]
    assert (len(source["samples"]), source["tokens"], source["fault"]) == (SAMPLES, None, None)


def test_a_model_counts_tokens_and_tries_its_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What its template refuses is left out, by row."""
    make_tokenizer(
        tmp_path / "model",
        template="{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}"
        "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}",
    )
    three = {"messages": [{"role": "system", "content": "s"}, *talk(1)["messages"]]}
    path = rows(tmp_path / "talks.jsonl", *map(talk, range(60)), three)
    code, source = document(capsys, path, "--model", tmp_path / "model")
    assert (code, source["documents"]) == (0, 60)
    assert source["tokens"]["longest"] >= source["tokens"]["median"] > 20
    assert source["first"] == [{"where": "talks.jsonl:61", "reason": "the chat template refuses it: too many"}]


def test_texts_are_counted_in_tokens_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a byte-level tokenizer nothing is lost."""
    make_tokenizer(tmp_path / "model")
    (tmp_path / "a.txt").write_text("a text\n" * 20)
    code, source = document(capsys, tmp_path / "a.txt", "--model", tmp_path / "model")
    assert (code, source["format"], source["lossy"]) == (0, "text", 0)
    assert source["tokens"]["longest"] > 0


@pytest.mark.parametrize(("task", "code"), [("sft", 0), ("dpo", 2), ("pretrain", 2)])
def test_a_task_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, code: int) -> None:
    """Data of another kind is shown, and then refused."""
    found, out, err = shown(capsys, rows(tmp_path / "talks.jsonl", *map(talk, range(9))), "--task", task)
    assert found == code
    assert "9 conversations" in out
    assert ("holds conversations, and --task" in err) == bool(code)


def test_refused_data_is_shown_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that its owner sees what is wrong with which rows."""
    path = rows(tmp_path / "x.jsonl", *map(talk, range(9)), *({"messages": 1} for _ in range(9)))
    code, out, err = shown(capsys, path)
    assert code == 2
    assert "9 of 18 documents" in err
    assert "x.jsonl:18  expected a list of messages, found int" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.txt"], "there is no readable file or folder 'nowhere.txt'"),
        (["x.jsonl", "--format", "chta"], "source x: format 'chta' is not known; did you mean 'chat'"),
        (["x.jsonl", "--format", "y=chat"], "there is no source 'y'"),
        (["x.jsonl", "--subset", "en"], "source x is on this machine: --subset is for data sets on the Hub"),
        (["x.jsonl", "--split", "guard=test"], "--split guard=test is an option of the guard set, and there is none"),
        (["hub:a/b/c"], "names no data set on the Hub: write hub:ORG/NAME, or hub:ORG/NAME@REVISION"),
        (["x.jsonl", "--task", "dop"], "task 'dop' is not known; did you mean 'dpo'"),
        (["x.jsonl", "--model", "nowhere"], "there is no folder 'nowhere'"),
        (["x.jsonl", "--model", "."], "has no tokenizer.json"),
        (["a" * 5000], "no readable file"),
        (["x.jsonl", "--column", "body"], "no field 'body'"),
    ],
)
def test_wrong_use_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Exit code 2, on stderr."""
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "x.jsonl", {"text": "a"})
    code, _, err = shown(capsys, *words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_data_set_of_the_hub_is_written_as_for_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its revision, subset and split, and options for one source of several."""
    asked: list[tuple[str, str | None, str | None, str | None]] = []

    def hub_data(hub: str, revision: str | None, subset: str | None, split: str | None, wanted: Any) -> HubData:
        asked.append((hub, revision, subset, split))
        items = (Row(f"{hub}:{number}", talk(number)) for number in range(9))
        return HubData(items, "c" * 40)

    monkeypatch.setattr("frozen.rows.hub_data", hub_data)
    path = rows(tmp_path / "x.jsonl", {"body": "a text"}, {"body": "another"})
    words = ["hub:org/chats@v1", "b=org/more", f"mine={path}", "--split", "chats=train_sft", "--subset", "b=en"]
    code, out, _ = shown(capsys, *words, "--column", "mine=body", "--json")
    assert code == 0
    assert asked == [("org/chats", "v1", None, "train_sft"), ("org/more", None, "en", None)]
    found = {source["name"]: source for source in json.loads(out)["sources"]}
    assert found.keys() == {"chats", "b", "mine"}
    assert (found["chats"]["kind"], found["chats"]["revision"]) == ("conversation", "c" * 40)
    assert (found["mine"]["kind"], found["mine"]["documents"]) == ("text", 2)


def test_several_sources_share_the_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one repeats of the other is counted where it is dropped; names are given or taken from the files."""
    one, two = rows(tmp_path / "a.jsonl", *map(talk, range(40))), rows(tmp_path / "b.jsonl", *map(talk, range(20, 60)))
    code, out, _ = shown(capsys, one, f"second={two}", "--json")
    sources = {source["name"]: source for source in json.loads(out)["sources"]}
    assert code == 0
    assert set(sources) == {"a", "second"}
    assert sources["second"]["duplicates"] == {"equal": 20}
    assert [len(source["samples"]) for source in sources.values()] == [SAMPLES // 2] * 2


@given(st.text(max_size=400), st.integers(2, 60))
def test_no_text_steers_a_terminal(text: str, most: int) -> None:
    """Whatever it holds, it is one short line of visible characters; emoji stay whole."""
    line = harmless(text, most)
    assert len(line) <= most
    assert all(character.isprintable() or character in " \u200d\u3000\u00a0" for character in line)
    assert harmless("👩\u200d👧 \x1b[2J\u202e", 20) == "👩\u200d👧 \ufffd[2J\ufffd"


def test_previews_name_the_sides() -> None:
    """A conversation by its roles, a pair by its answers, all cut."""
    long = "word " * 500
    talk_ = Conversation(tuple(Turn(role, long) for role in ("user", "assistant") * 3))  # type: ignore[arg-type]
    pair = Preference((Turn("user", "which?"),), "this", "that")
    assert preview(pair) == "user: “which?”  chosen: “this”  rejected: “that”"
    assert preview(talk_).endswith("… 3 more turns")
    assert len(preview(talk_)) < 2 * LONGEST_SAMPLE
