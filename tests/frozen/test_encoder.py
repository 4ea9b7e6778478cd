import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from frozen.chat import Chat, Unencodable
from frozen.conversations import Conversation, Turn
from frozen.encoder import Encoder, chat_template
from frozen.formats import SourceError
from tests.standin import CHATML, make_tokenizer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """Return a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Encoder(folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer of five words, which knows nothing else."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "yes": 1, "no": 2, "<s>": 3, "</s>": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "[UNK]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings_ = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "[UNK]", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_", "a", " ", "é", "🎉", "\n"]) | st.text(max_size=4)).map("".join))
def test_text_is_encoded_without_loss_and_without_special_tokens(encoder: Encoder, text: str) -> None:
    """As one text, as a part, or among others."""
    for pieces in (encoder.as_text(text), encoder.part(text, "special"), encoder.part(text, "text")):
        assert encoder.decode(pieces.ids) == text
        assert encoder.special.isdisjoint(pieces.ids)
    (tokens,) = encoder.texts([text])
    assert tokens.tolist() == encoder.as_text(text).ids
    assert encoder.lossy([text], [tokens]) == []


def test_special_tokens_in_the_vocabulary_of_text_stay_text(words: Path) -> None:
    """Where the model itself knows ``<s>`` as a word, its spelling is broken up."""
    encoder = Encoder(words)
    assert encoder.as_template("yes <s>").ids == [1, 3]
    assert encoder.special.isdisjoint(set(encoder.as_text("yes <s> no").ids) - {encoder.unknown})


def test_what_a_tokenizer_does_not_know_is_found(words: Path) -> None:
    """A text with an unknown word is lossy; a conversation whose answer has one is refused."""
    encoder = Encoder(words)
    texts = ["yes", "yes maybe", "no"]
    assert encoder.lossy(texts, list(encoder.texts(texts))) == [1]
    with pytest.raises(Unencodable, match="does not give back"):
        Chat(encoder).encode(Conversation((Turn("user", "yes"), Turn("assistant", "maybe"))))


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    """A saved tokenizer may carry a largest length: documents are never cut by it."""
    make_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = Encoder(tmp_path)
    assert encoder.decode(next(iter(encoder.texts(["a longer text"])))) == "a longer text"


def test_what_stands_before_a_text(words: Path, tmp_path: Path) -> None:
    """The token that the tokenizer puts first, else bos, else eos, else nothing can."""
    assert Encoder(words).separator == 3
    for names, expected in (({"eos_token": "</s>"}, 4), ({}, None)):
        (tmp_path / "tokenizer.json").write_text((words / "tokenizer.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
        if expected is None:
            with pytest.raises(SourceError, match="neither a bos_token nor an eos_token"):
                _ = Encoder(tmp_path).separator
        else:
            assert Encoder(tmp_path).separator == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "T"),
        ("chat_template.json", json.dumps({"chat_template": "T"})),
        ("tokenizer_config.json", json.dumps({"chat_template": "T"})),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "T"}]}),
        ),
    ],
)
def test_a_chat_template_is_found_wherever_it_is_kept(tmp_path: Path, name: str, content: str) -> None:
    """In a file of its own, or in the tokenizer's settings, alone or by name."""
    assert chat_template(tmp_path) is None
    (tmp_path / name).write_text(content)
    assert chat_template(tmp_path) == "T"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """It is said what is missing or broken."""
    with pytest.raises(SourceError, match=r"has no tokenizer\.json"):
        Encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="holds no tokenizer"):
        Encoder(tmp_path)
