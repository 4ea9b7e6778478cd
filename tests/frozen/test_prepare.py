import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frozen.chat import Chat
from frozen.conversations import Conversation, Preference, Turn, parse
from frozen.corpus import SPLITS, SplitSizes, split_corpus
from frozen.encoder import Encoder
from frozen.formats import Document, Source, SourceError
from frozen.leaks import key_of
from frozen.tokens import (
    ANSWER,
    CONTEXT,
    END,
    EncodedSplit,
    GivenTokenizer,
    GuardSource,
    Kind,
    NewTokenizer,
    Prepared,
    prepare,
)
from tests.standin import CHATML, CHATML_MARKED, VOCABULARY, make_tokenizer

SIZES = SplitSizes(probe_bytes=1000, val_bytes=4000, holdout_bytes=4000)


def prose(seed: int, words: int) -> str:
    """Return words that resemble no others."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(words))


def talk(number: int) -> dict[str, Any]:
    """Return a chat row of about 500 bytes."""
    said = [prose(4 * number + turn, 20) for turn in range(4)]
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    return {"messages": [{"role": "system", "content": "Be brief."}, *turns]}


def choice(number: int) -> dict[str, Any]:
    """Return a preference row."""
    sides = {name: prose(9000 + 3 * number + side, 30) for side, name in enumerate(("chosen", "rejected"))}
    return {
        "prompt": [{"role": "user", "content": prose(9002 + 3 * number, 20)}],
        **{name: [{"role": "assistant", "content": text}] for name, text in sides.items()},
    }


def rows(path: Path, *values: Any) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> GivenTokenizer:
    """Return a base model's tokenizer whose model has some logits more than it has tokens."""
    folder = tmp_path_factory.mktemp("base")
    make_tokenizer(folder)
    return GivenTokenizer(folder, VOCABULARY + 16)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, tokenizer: GivenTokenizer) -> Prepared:
    """Return prepared conversations with general text and a guard set."""
    folder = tmp_path_factory.mktemp("chats")
    for name, first in (("general", 50_000), ("guard", 60_000)):
        (folder / name).mkdir()
        for number in range(12):
            (folder / name / f"{number}.txt").write_text(prose(first + number, 100))
    (folder / "general" / "copy.txt").write_text(prose(60_003, 100))
    sources = [
        Source("talks", rows(folder / "talks.jsonl", *map(talk, range(80)))),
        Source("general", folder / "general", general=True),
    ]
    guard = GuardSource(Source("guard", folder / "guard"), 20_000)
    return prepare(sources, SIZES, tokenizer, folder / "cache", kind="conversation", guard=guard)


def load(prepared: Prepared, name: str) -> EncodedSplit:
    """Map a split."""
    return EncodedSplit.load(prepared.folder / name)


def raw(prepared: Prepared, name: str) -> list[dict[str, Any]]:
    """Return the raw contents of a split."""
    with (prepared.folder / name / "documents.jsonl").open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["val", "holdout"])
def test_conversations_are_encoded_as_their_raw_rows_say(chats: Prepared, tokenizer: GivenTokenizer, name: str) -> None:
    """Row by row: separator, tokens, marks and bytes are what an encoding of the raw row gives."""
    split, chat = load(chats, name), Chat(Encoder(tokenizer.folder))
    for index, row in enumerate(raw(chats, name)):
        content = parse({"messages": row["messages"]}, "chat").content
        assert isinstance(content, Conversation)
        encoded = chat.encode(content)
        assert [split.separator, *split.document(index).tolist()] == encoded.tokens.tolist()
        assert split.marks is not None
        begin, end = split.offsets[index], split.offsets[index + 1]
        assert [CONTEXT, *split.marks[begin:end].tolist()] == encoded.marks.tolist()
        assert split.bytes[index] == row["bytes"] == sum(len(answer.encode()) for answer in content.answers)
    assert split.documents == len(raw(chats, name))
    assert (split.vocabulary, split.separator) == (VOCABULARY + 16, chat.encoder.as_template("<|im_start|>").ids[0])


def test_general_text_is_in_train_only_and_learnt_whole(chats: Prepared) -> None:
    """It begins with what a text begins with, as context; what the guard set holds as well is dropped."""
    train = load(chats, "train")
    assert train.general == ("general",)
    general = np.flatnonzero(np.array(train.sources)[train.source_ids] == "general")
    assert len(general) == 12
    assert train.marks is not None
    for index in general:
        marks = train.marks[train.offsets[index] : train.offsets[index + 1]].tolist()
        assert marks == [CONTEXT, *[ANSWER] * (len(marks) - 1)]
        assert train.document(index)[0] == 0
    for name in ("probe", "val", "holdout"):
        assert set(load(chats, name).source_ids.tolist()) == {train.sources.index("talks")}
    assert chats.report["dropped"]["general"]["is in the guard set"]["texts"] == 1


def test_a_guard_set_is_a_split_of_text(chats: Prepared) -> None:
    """Unmarked, with the separator of texts, and no larger than asked."""
    guard = load(chats, "guard")
    assert (guard.marks, guard.separator, guard.sources) == (None, 0, ("guard",))
    assert 0 < guard.bytes.sum() <= 20_000
    assert [row["bytes"] for row in raw(chats, "guard")] == guard.bytes.tolist()


def test_the_report_says_what_was_understood(chats: Prepared) -> None:
    """Format and reason, lengths, separator and template are in it."""
    report = chats.report
    assert report["sources"]["talks"]["format"] == "chat"
    assert "field 'messages'" in report["sources"]["talks"]["why"]
    assert set(report["sources"]["talks"]["tokens"]) == {"median", "p90", "longest"}
    assert report["separator"] == {"token": 1, "text": "<|im_start|>", "of_every_conversation": True}
    assert (report["kind"], report["template"]) == ("conversation", "the model's own")
    assert set(report["tokens"]) == set(report["lengths"]) == {*SPLITS, "guard"}


def test_pairs_lie_side_by_side(tmp_path: Path, tokenizer: GivenTokenizer) -> None:
    """Chosen, then rejected, with the same prompt; only the answers are marked, and counted."""
    source = Source("pairs", rows(tmp_path / "pairs.jsonl", *map(choice, range(60))))
    prepared = prepare([source], SIZES, tokenizer, tmp_path / "cache", kind="preference")
    for name in SPLITS:
        split = load(prepared, name)
        assert split.pairs
        assert split.documents % 2 == 0
    split, encoder = load(prepared, "val"), Encoder(tokenizer.folder)
    assert split.marks is not None
    for number, row in enumerate(raw(prepared, "val")):
        for side, name in enumerate(("chosen", "rejected")):
            index = 2 * number + side
            marks = split.marks[split.offsets[index] : split.offsets[index + 1]]
            answer = row[name][0]["content"]
            assert encoder.decode(split.document(index)[marks == ANSWER].tolist()) == answer
            assert row["bytes"][side] == split.bytes[index] == len(answer.encode())
            assert np.count_nonzero(marks == END) == 1


def test_marked_and_unmarked_templates_give_the_same_arrays(tmp_path: Path) -> None:
    """Two models with one tokenizer and either template."""
    source = Source("talks", rows(tmp_path / "talks.jsonl", *map(talk, range(60))))
    arrays = []
    for name, template in (("plain", CHATML), ("marked", CHATML_MARKED)):
        make_tokenizer(tmp_path / name, template=template)
        given = GivenTokenizer(tmp_path / name, VOCABULARY)
        prepared = prepare([source], SIZES, given, tmp_path / "cache", kind="conversation")
        split = load(prepared, "val")
        assert split.marks is not None
        arrays.append((split.tokens.tolist(), split.marks.tolist(), split.bytes.tolist()))
    assert arrays[0] == arrays[1]


def test_a_model_without_a_template_gets_the_plain_one(tmp_path: Path) -> None:
    """It is said in the report, and the tokenizer of the study carries it."""
    make_tokenizer(tmp_path / "base", template=None)
    source = Source("talks", rows(tmp_path / "talks.jsonl", *map(talk, range(60))))
    given = GivenTokenizer(tmp_path / "base", VOCABULARY)
    prepared = prepare([source], SIZES, given, tmp_path / "cache", kind="conversation")
    assert prepared.report["template"] == "built-in"
    assert Encoder(prepared.folder / "tokenizer").template is not None
    assert prepared.report["separator"]["text"] == "<|endoftext|>"


def test_what_a_template_refuses_is_left_out_with_its_row(tmp_path: Path) -> None:
    """It is in no split, and the report names row and reason."""
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    make_tokenizer(tmp_path / "base", template=no_system)
    given = GivenTokenizer(tmp_path / "base", VOCABULARY)
    values = [{"messages": talk(number)["messages"][number % 3 == 0 :]} for number in range(150)]
    source = Source("talks", rows(tmp_path / "talks.jsonl", *values))
    prepared = prepare([source], SIZES, given, tmp_path / "cache", kind="conversation")
    rejected = prepared.report["rejected"]["talks"]
    assert rejected["rejected"] == 100
    assert rejected["first"][0] == {"where": "talks.jsonl:2", "reason": "the chat template refuses it: no system role"}
    few = Source("talks", rows(tmp_path / "few.jsonl", *values[:60]))
    with pytest.raises(
        SourceError, match=r"too small.*; 40 conversations cannot be encoded, the first: few\.jsonl:2: the"
    ):
        prepare([few], SIZES, given, tmp_path / "cache", kind="conversation")
    none = Source("talks", rows(tmp_path / "none.jsonl", *(value for number, value in enumerate(values) if number % 3)))
    with pytest.raises(SourceError, match="none of its 100 conversations can be encoded"):
        prepare([none], SIZES, given, tmp_path / "cache", kind="conversation")


def test_texts_under_a_given_tokenizer(tmp_path: Path, tokenizer: GivenTokenizer) -> None:
    """Whole texts behind bos; what spells a special token is text."""
    values = [{"text": prose(number, 100) + "<|im_end|>"} for number in range(60)]
    source = Source("texts", rows(tmp_path / "x.jsonl", *values))
    prepared = prepare([source], SIZES, tokenizer, tmp_path / "cache")
    split, encoder = load(prepared, "val"), Encoder(tokenizer.folder)
    assert (split.separator, split.marks, split.vocabulary) == (0, None, VOCABULARY + 16)
    for index, row in enumerate(raw(prepared, "val")):
        assert encoder.decode(split.document(index).tolist()) == row["text"]
        assert encoder.special.isdisjoint(split.document(index).tolist())
    assert prepared.report["lossy"]["texts"] == 0


def test_the_same_inputs_are_found_again_and_others_are_not(tmp_path: Path, tokenizer: GivenTokenizer) -> None:
    """Kind, tokenizer files and the guard set are part of what data is made from."""
    path = rows(tmp_path / "talks.jsonl", *map(talk, range(60)))
    cache = tmp_path / "cache"

    def made(given: GivenTokenizer, guard: GuardSource | None = None) -> Prepared:
        return prepare([Source("talks", path)], SIZES, given, cache, kind="conversation", guard=guard)

    first = made(tokenizer)
    assert made(tokenizer).reused
    make_tokenizer(tmp_path / "other", template=CHATML_MARKED)
    assert not made(GivenTokenizer(tmp_path / "other", VOCABULARY + 16)).reused
    (tmp_path / "guard.txt").write_text(prose(1, 50))
    guarded = made(tokenizer, GuardSource(Source("guard", tmp_path / "guard.txt"), 9999))
    assert guarded.digest != first.digest


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("text", talk(1), "holds conversations .* but texts are needed"),
        ("conversation", {"text": "a"}, "holds texts"),
        ("preference", talk(1), "holds conversations"),
        ("conversation", choice(1), "holds preference pairs"),
    ],
)
def test_data_of_another_kind_is_refused(
    tmp_path: Path, tokenizer: GivenTokenizer, kind: Kind, row: dict[str, Any], message: str
) -> None:
    """The sentence says what was recognised and why."""
    source = Source("one", rows(tmp_path / "x.jsonl", row))
    with pytest.raises(SourceError, match=message):
        prepare([source], SIZES, tokenizer, tmp_path / "cache", kind=kind)
    assert not (tmp_path / "cache").exists()


def test_what_does_not_go_together_is_refused(tmp_path: Path, tokenizer: GivenTokenizer) -> None:
    """Before anything is written."""
    path = rows(tmp_path / "x.jsonl", *map(talk, range(60)))
    cache = tmp_path / "cache"
    one, general = Source("one", path), Source("general", path, general=True)
    with pytest.raises(ValueError, match="need a base model's tokenizer"):
        prepare([one], SIZES, NewTokenizer(300), cache, kind="conversation")
    with pytest.raises(ValueError, match="do not belong together"):
        prepare([one], SIZES, GivenTokenizer(tokenizer.folder, 100), cache, kind="conversation")
    with pytest.raises(SourceError, match="every source is general"):
        prepare([general], SIZES, tokenizer, cache, kind="conversation")
    with pytest.raises(SourceError, match="preferences are trained on alone"):
        prepare([one, general], SIZES, tokenizer, cache, kind="preference")
    with pytest.raises(SourceError, match="different names"):
        prepare([one], SIZES, tokenizer, cache, kind="conversation", guard=GuardSource(one, 100))
    with pytest.raises(ValueError, match="guard set of 0 bytes"):
        prepare([one], SIZES, tokenizer, cache, kind="conversation", guard=GuardSource(general, 0))
    assert not cache.exists()


# --- the division of conversations ----------------------------------------------------------------------------------


def asked(question: str, *answers: str, source: str = "one") -> Document:
    """Return a conversation with one question and its answers."""
    return Document(source, Conversation((Turn("user", question), *(Turn("assistant", one) for one in answers[:1]))))


def whole(document: Document) -> Conversation:
    """Return a document's conversation."""
    assert isinstance(document.content, Conversation)
    return document.content


def test_equal_and_nearly_equal_conversations_are_kept_once() -> None:
    """A changed word or another system turn makes no other conversation; another answer to it does."""
    plain = [asked(prose(number, 40), prose(1000 + number, 40)) for number in range(60)]
    again = [
        Document(
            "two", Conversation((Turn("system", "s"), *whole(one).turns[:1], Turn("assistant", answer + " indeed")))
        )
        for one in plain[:10]
        for answer in whole(one).answers
    ]
    other = [asked(whole(one).turns[0].content, prose(5000 + number, 40)) for number, one in enumerate(plain[:5])]
    corpus = split_corpus([*plain, *plain[:3], *again, *other], SIZES)
    dropped = corpus.report.as_json()["dropped"]
    assert sum(row["texts"] for by in dropped.values() for reason, row in by.items() if reason == "equal") == 3
    assert (
        sum(row["texts"] for by in dropped.values() for reason, row in by.items() if reason == "near-duplicate") == 10
    )
    assert sum(map(len, corpus.splits.values())) == 65


def test_one_question_is_in_one_split() -> None:
    """Whatever the answers, the case and the spaces."""
    several = [
        asked(question, prose(100 * number + answer, 30))
        for number in range(40)
        for answer, question in enumerate((prose(7000 + number, 12), prose(7000 + number, 12).upper() + " "))
    ]
    splits = split_corpus(several, SIZES).splits
    seen = [
        {whole(Document("", kept.content)).turns[0].content.strip().casefold() for kept in texts}
        for texts in splits.values()
    ]
    assert sum(map(len, splits.values())) == 80
    assert sum(map(len, seen)) == 40


def test_a_question_is_the_same_whatever_its_signs() -> None:
    """With or without the question mark, a comma or quotation marks: no split asks what another one tells."""
    several = [
        asked(question, prose(100 * number + answer, 30))
        for number in range(40)
        for answer, question in enumerate(
            (prose(7000 + number, 12), f"“{prose(7000 + number, 12).replace(' ', ', ', 1)}” ?!")
        )
    ]
    splits = split_corpus(several, SIZES).splits
    seen = [
        {
            whole(Document("", kept.content)).turns[0].content.replace(",", "").strip("“”?! ").casefold()
            for kept in texts
        }
        for texts in splits.values()
    ]
    assert sum(map(len, splits.values())) == 80
    assert sum(map(len, seen)) == 40


def test_what_is_only_signs_keeps_them() -> None:
    """Two questions without a word are two questions."""
    assert key_of([Turn("user", "?")]) != key_of([Turn("user", "!")])
    assert key_of([Turn("user", "What is 2+3?")]) == key_of([Turn("user", "what is 2+3")])
    assert key_of([Turn("user", "What is 2+3?")]) != key_of([Turn("user", "What is 2-3?")])


def test_a_question_that_many_share_is_spread() -> None:
    """A greeting does not put all into one split; what begins with the same answer as a held-out one leaves train."""
    greetings = [
        Document(
            "one",
            Conversation(
                (
                    Turn("user", "Hi!"),
                    Turn("assistant", "Hello, what can I do for you?" if number % 8 == 0 else prose(8000 + number, 6)),
                    Turn("user", prose(3000 + number, 30)),
                    Turn("assistant", prose(4000 + number, 40)),
                )
            ),
        )
        for number in range(120)
    ]
    corpus = split_corpus(greetings, SIZES)
    assert all(corpus.splits[name] for name in SPLITS)
    held_out = {
        whole(Document("", kept.content)).turns[1].content for name in SPLITS[1:] for kept in corpus.splits[name]
    }
    assert not held_out & {whole(Document("", kept.content)).turns[1].content for kept in corpus.splits["train"]}


def test_pairs_of_one_prompt_are_in_one_split_however_many() -> None:
    """That is what a preference is about: the answers to one prompt are told apart."""
    pairs = [
        Document(
            "one", Preference((Turn("user", prose(number, 12)),), prose(100 * number + n, 30), prose(7777 + n, 30))
        )
        for number in range(30)
        for n in range(1, 5)
    ]
    splits = split_corpus(pairs, SIZES).splits
    prompts = []
    for texts in splits.values():
        assert all(isinstance(kept.content, Preference) for kept in texts)
        prompts.append({kept.content.prompt for kept in texts if isinstance(kept.content, Preference)})
    assert sum(map(len, prompts)) == 30


def test_a_fixed_instruction_makes_no_duplicates() -> None:
    """Questions of one template with short answers are as different as what was filled in."""
    template = prose(1, 120)
    labelled = [asked(f"{template}\n{prose(100 + number, 14)}", "yes" if number % 2 else "no") for number in range(100)]
    corpus = split_corpus(labelled, SIZES)
    assert corpus.report.as_json()["dropped"] == {}


def test_questions_about_one_article_are_no_duplicates() -> None:
    """Their answers differ, so they are different conversations, in whichever split."""
    about = [
        asked(f"{prose(number // 5, 120)} {prose(9000 + number, 5)}", prose(500 + number, 6)) for number in range(100)
    ]
    assert split_corpus(about, SIZES).report.as_json()["dropped"] == {}


def test_train_answers_that_quote_held_out_ones_are_dropped() -> None:
    """The same long answer to other questions is in train or held out, not both."""
    plain = [asked(prose(number, 10), prose(1000 + number, 60)) for number in range(60)]
    quoting = [
        asked(prose(2000 + number, 10), prose(3000 + number, 80) + " " + whole(one).answers[0], source="two")
        for number, one in enumerate(plain)
    ]
    corpus = split_corpus([*plain, *quoting], SIZES)
    assert corpus.report.as_json()["dropped"]["two"]["quotes a held-out text"]["texts"] > 0
    held_out = [whole(Document("", kept.content)).answers[0] for name in SPLITS[1:] for kept in corpus.splits[name]]
    for kept in corpus.splits["train"]:
        said = whole(Document("", kept.content)).answers[0]
        assert not any(one in said or said in one for one in held_out)


def test_general_texts_give_way() -> None:
    """What another source holds as well is dropped from the general one, and nothing general is held out."""
    texts = [Document("own", prose(number, 100)) for number in range(60)]
    general = [Document("general", prose(number, 100)) for number in range(50, 100)]
    corpus = split_corpus([*texts, *general], SIZES, general=["general"])
    assert corpus.report.as_json()["dropped"]["general"]["equal"]["texts"] == 10
    assert {kept.source for name in SPLITS[1:] for kept in corpus.splits[name]} == {"own"}
    without = split_corpus(texts, SIZES)
    assert {name: corpus.splits[name] for name in SPLITS[1:]} == {name: without.splits[name] for name in SPLITS[1:]}


def test_train_loses_what_is_in_the_guard_set() -> None:
    """Short texts as well, of which no quote is long enough."""
    texts = [Document("own", prose(number, 100)) for number in range(60)] + [
        Document("own", "a short one of six words")
    ]
    guard = [Document("guard", str(texts[5].content)), Document("guard", "A short one\nof six WORDS")]
    corpus = split_corpus(texts, SIZES, guard=guard, guard_bytes=5000)
    held_out = {kept.text for name in SPLITS[1:] for kept in corpus.splits[name]}
    left = {kept.text for kept in corpus.splits["train"]}
    assert not {"a short one of six words", str(texts[5].content)} & (left - held_out)
    assert len(corpus.splits["guard"]) == 2


def test_a_guard_set_that_is_too_small_for_any_text_is_refused() -> None:
    """It would score nothing."""
    texts = [Document("own", prose(number, 100)) for number in range(60)]
    with pytest.raises(SourceError, match="no text of at most 10 bytes"):
        split_corpus(texts, SIZES, guard=[Document("guard", prose(1, 100))], guard_bytes=10)
