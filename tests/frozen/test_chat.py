import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from frozen.chat import BUILT_IN, Chat, Encoded, Unencodable
from frozen.conversations import Conversation, Turn
from frozen.encoder import Encoder
from frozen.formats import SourceError
from frozen.tokens import ANSWER, CONTEXT, END
from tests.standin import CHATML, CHATML_MARKED, make_tokenizer

LLAMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""Spaces around contents, an end that is eos, no system turn."""
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
CLOSING_EARLY = CHATML_MARKED.replace(
    "message['content'] + '<|im_end|>' }}{% endgeneration %}", "message['content'] }}{% endgeneration %}<|im_end|>"
)
"""Marks around the content alone."""
FIRST_ONLY = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.index == 2 %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)
MakeChat = Callable[[str | None], Chat]


@pytest.fixture(scope="module")
def chat_with(tmp_path_factory: pytest.TempPathFactory) -> MakeChat:
    """Return a function that makes a byte-level tokenizer with a template."""
    made: dict[str | None, Chat] = {}

    def make(template: str | None) -> Chat:
        if template not in made:
            folder = tmp_path_factory.mktemp("tokenizer")
            make_tokenizer(folder, template=template)
            made[template] = Chat(Encoder(folder))
        return made[template]

    return make


@pytest.fixture(scope="module", params=["prepended", "first", "always"])
def spaced(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Chat:
    """Return a sentencepiece-style tokenizer, which puts a space before a text, in one of three ways."""
    folder = tmp_path_factory.mktemp("spaced")
    make_spaced(folder, request.param)
    return Chat(Encoder(folder))


def make_spaced(folder: Path, style: str, template: str = LLAMA_LIKE) -> None:
    """Train and save a tokenizer with byte fallback whose spaces are part of the words after them."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if style == "prepended":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *fallback], show_progress=False
    )
    tokenizer.train_from_iterator(["hi there, what is the answer to this question? the answer is yes"] * 9, trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in fallback]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(saved)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.convert_tokens_to_ids("<s>"))]
    )
    fast.save_pretrained(folder)


def conversation(*said: str, system: str | None = None) -> Conversation:
    """Return turns of user and assistant."""
    roles = ("user", "assistant")
    turns = [Turn(roles[number % 2], text) for number, text in enumerate(said)]  # type: ignore[arg-type]
    return Conversation((*((Turn("system", system),) if system is not None else ()), *turns))


def answers_of(chat: Chat, encoded: Encoded, behind: str = "") -> list[str]:
    """Return what each run of `ANSWER` tokens decodes to ``behind`` another text."""
    before_it = chat.encoder.as_text(behind).ids
    begin = len(chat.encoder.decode(before_it))
    runs: list[list[int]] = []
    before = CONTEXT
    for token, mark in zip(encoded.tokens.tolist(), encoded.marks.tolist(), strict=True):
        if mark == ANSWER:
            if before != ANSWER:
                runs.append([])
            runs[-1].append(token)
        before = mark
    return [chat.encoder.decode([*before_it, *run])[begin:] for run in runs]


def size(texts: Sequence[str]) -> int:
    """Return UTF-8 bytes."""
    return sum(len(text.encode()) for text in texts)


LOOKALIKES = (
    "<|im_end|>",
    "<|im_start|>",
    "<|im_",
    "start|>",
    "<|endoftext|>",
    "<|im_start|>assistant\n",
    "<s>",
    "</s>",
)
LAYOUT = ("\n", "\n\n", " ", "{{ 1 }}", "{% generation %}", "[/INST]", "assistant")
LETTERS = ("e\u0301", "👩\u200d👩\u200d👧", "漢字", "\U000f0001", "0", "\u202e")
FRAGMENTS = st.sampled_from((*LOOKALIKES, *LAYOUT, *LETTERS))
CONTENTS = (
    st.lists(FRAGMENTS | st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=6)
    .map("".join)
    .filter(lambda text: text.strip() != "")
)
TALKS = st.lists(CONTENTS, min_size=2, max_size=6).map(lambda said: said[: len(said) // 2 * 2])


@settings(max_examples=60, deadline=None)
@given(said=TALKS, system=st.none() | CONTENTS)
def test_answers_are_marked_exactly(chat_with: MakeChat, said: list[str], system: str | None) -> None:
    """Whatever is said, `ANSWER` tokens decode to it byte for byte, under templates with and without marks alike."""
    talk = conversation(*said, system=system)
    plain, marked = chat_with(CHATML).encode(talk), chat_with(CHATML_MARKED).encode(talk)
    assert np.array_equal(plain.tokens, marked.tokens)
    assert np.array_equal(plain.marks, marked.marks)
    assert answers_of(chat_with(CHATML), plain) == said[1::2]
    assert plain.bytes == size(said[1::2])


@settings(max_examples=60, deadline=None)
@given(said=TALKS, system=st.none() | CONTENTS)
def test_tokens_are_those_of_an_independent_tokenisation(
    chat_with: MakeChat, said: list[str], system: str | None
) -> None:
    """Turn by turn: the role's line and the content are encoded as text, with the template's tokens around them."""
    talk = conversation(*said, system=system)
    chat = chat_with(CHATML)
    tokenizer = Tokenizer.from_file(str(chat.encoder.folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    tokens, marks = [], []
    for turn in talk.turns:
        head = f"{turn.role}\n"
        ids = tokenizer.encode(head + turn.content).ids
        # A byte-level token is written with one letter for each byte.
        sizes = np.cumsum([len(tokenizer.id_to_token(token)) for token in ids]).tolist()
        if turn.role == "assistant" and len(head) not in sizes:
            ids = tokenizer.encode(head).ids + tokenizer.encode(turn.content).ids
            sizes = np.cumsum([len(tokenizer.id_to_token(token)) for token in ids]).tolist()
        said_mark, end_mark = (ANSWER, END) if turn.role == "assistant" else (CONTEXT, CONTEXT)
        tokens += [start, *ids, end, *tokenizer.encode("\n").ids]
        marks += [CONTEXT, *(said_mark if total > len(head) else CONTEXT for total in sizes), end_mark, CONTEXT]
    encoded = chat.encode(talk)
    assert encoded.tokens.tolist() == tokens
    assert encoded.marks.tolist() == marks


@settings(max_examples=40, deadline=None)
@given(said=TALKS)
def test_contents_never_make_special_tokens(chat_with: MakeChat, said: list[str]) -> None:
    """There are as many special tokens as the template writes, whatever the contents spell."""
    chat = chat_with(CHATML)
    encoded = chat.encode(conversation(*said))
    assert sum(token in chat.encoder.special for token in encoded.tokens.tolist()) == 2 * len(said)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CLOSING_EARLY, TRIMMING])
def test_tokens_are_those_of_transformers(chat_with: MakeChat, template: str) -> None:
    """For ordinary contents, `apply_chat_template` gives the same tokens, and its mask is `ANSWER` with `END`."""
    from transformers import AutoTokenizer

    chat = chat_with(template)
    tokenizer = AutoTokenizer.from_pretrained(chat.encoder.folder)
    talk = conversation("What is this?", "An answer, née 🎉.", "Why?", "Because.\nTwo lines.", system="Be brief.")
    encoded = chat.encode(talk)
    messages = [{"role": turn.role, "content": turn.content} for turn in talk.turns]
    marked = "{% generation %}" in template
    expected = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked)
    assert encoded.tokens.tolist() == expected["input_ids"]
    if template == CHATML_MARKED:
        assert (encoded.marks != CONTEXT).astype(int).tolist() == expected["assistant_masks"]
    if template == CLOSING_EARLY:  # what the template leaves out is the end, which a model has to learn
        assert (encoded.marks == ANSWER).astype(int).tolist() == expected["assistant_masks"]
        assert np.count_nonzero(encoded.marks == END) == 2


def test_a_template_says_which_answers_are_learnt(chat_with: MakeChat) -> None:
    """An answer outside of the marks is context, and its bytes do not count."""
    encoded = chat_with(FIRST_ONLY).encode(conversation("a", "first", "b", "second"))
    assert answers_of(chat_with(FIRST_ONLY), encoded) == ["first"]
    assert (encoded.bytes, np.count_nonzero(encoded.marks == END)) == (5, 1)


def test_only_the_last_answer_of_a_pair_is_learnt(chat_with: MakeChat) -> None:
    """Earlier answers are the same on both sides."""
    encoded = chat_with(CHATML).encode(conversation("a", "first", "b", "second"), learnt="last")
    assert answers_of(chat_with(CHATML), encoded) == ["second"]
    assert encoded.bytes == 6


@settings(max_examples=60, deadline=None)
@given(said=TALKS)
def test_a_template_that_trims_gives_trimmed_answers(chat_with: MakeChat, said: list[str]) -> None:
    """White space around contents is gone from the tokens, the bytes and the conversation alike."""
    chat = chat_with(TRIMMING)
    encoded = chat.encode(conversation(*said))
    trimmed = [text.strip() for text in said]
    assert answers_of(chat, encoded) == trimmed[1::2]
    assert encoded.conversation == conversation(*trimmed)
    assert encoded.bytes == size(trimmed[1::2])


@pytest.mark.parametrize(
    ("template", "talk", "reason"),
    [
        (LLAMA_LIKE, conversation("a", "b", system="s"), "refuses it: Only user and assistant roles"),
        (CHATML.replace("message['content']", "message['content'] | upper"), conversation("a", "b"), "rewrites what"),
        (CHATML.replace("message['content']", "message['text'] * 2"), conversation("a", "b"), "refuses it"),
        (CHATML.replace("in messages", "in messages[1:]"), conversation("a", "b"), "leaves out the user turn"),
        (CHATML.replace("messages %}", "messages + messages %}"), conversation("a", "b"), "writes a turn twice"),
        (CHATML.replace("message['role'] +", "nothing.at.all +"), conversation("a", "b"), "refuses it: 'nothing'"),
        ("{% generation %}{% endgeneration %}" + CHATML, conversation("a", "b"), "marks none of the answers"),
    ],
)
def test_what_a_template_does_not_take_is_refused(
    chat_with: MakeChat, template: str, talk: Conversation, reason: str
) -> None:
    """A conversation that a template rejects, shortens, repeats or rewrites is refused with the reason."""
    with pytest.raises(Unencodable, match=reason):
        chat_with(template).encode(talk)


REASONING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and '</think>' not in message['content'] %}{{ '<think></think>' }}{% endif %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in message['content'] %}"
    "{{ message['content'].split('</think>')[1] }}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
)


def test_a_template_that_reads_thoughts_is_searched(chat_with: MakeChat) -> None:
    """What it writes depends on the contents: answers that are there as they are, once, are found; others refused."""
    chat = chat_with(REASONING)
    for answer in ("<think>well</think>yes", "no thoughts"):
        assert answers_of(chat, chat.encode(conversation("a", answer))) == [answer]
    with pytest.raises(Unencodable, match="rewrites what the assistant says"):
        chat.encode(conversation("a", "<think>well</think>yes", "b", "<think>so</think>no"))
    with pytest.raises(Unencodable, match="spells a special token"):
        chat.encode(conversation("<|im_end|>", "<think>well</think>yes"))


def test_without_a_template_there_is_a_plain_one(chat_with: MakeChat) -> None:
    """Headings and the eos token after each answer; the bos token first."""
    chat = chat_with(None)
    encoded = chat.encode(conversation("a", "first", "b", "second", system="s"))
    assert (chat.built_in, chat.source) == (True, BUILT_IN)
    assert chat.encoder.decode(encoded.tokens.tolist()) == (
        "<|endoftext|>### System:\ns\n\n### User:\na\n\n### Assistant:\nfirst<|im_end|>\n\n"
        "### User:\nb\n\n### Assistant:\nsecond<|im_end|>\n\n"
    )
    assert answers_of(chat, encoded) == ["first", "second"]
    assert np.count_nonzero(encoded.marks == END) == 2


def test_a_template_that_ends_no_turn_gets_the_eos_token(chat_with: MakeChat) -> None:
    """Else a model would never learn to stop."""
    chat = chat_with(
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    )
    encoded = chat.encode(conversation("a", "first", "b", "second"))
    assert encoded.tokens[-1] == chat.encoder.eos
    assert encoded.marks[-1] == END
    assert answers_of(chat, encoded) == ["first", "second"]


@settings(max_examples=40, deadline=None)
@given(said=st.lists(CONTENTS, min_size=2, max_size=2))
def test_a_prompt_and_its_completion_have_no_template(chat_with: MakeChat, said: list[str]) -> None:
    """Prompt, completion, eos; also where both would be one token."""
    chat = chat_with(CHATML)
    talk = Conversation(conversation(*said).turns, plain=True)
    encoded = chat.encode(talk)
    assert chat.encoder.decode(encoded.tokens.tolist()) == "".join(said) + "<|im_end|>"
    assert answers_of(chat, encoded) == said[1:]
    assert encoded.marks[-1] == END
    assert encoded.bytes == size(said[1:])


@settings(max_examples=50, deadline=None)
@given(said=TALKS)
@example(said=["a", "  b"])
def test_spaces_of_sentencepiece_belong_to_the_answer_after_them(spaced: Chat, said: list[str]) -> None:
    """A word and the space before it are one token: it is the answer's, and the answer decodes to what was said."""
    encoded = spaced.encode(conversation(*said))
    # Alone they would lose a space of their own: a decoder takes one from the start of a text.
    for run, text in zip(answers_of(spaced, encoded, behind="\n"), said[1::2], strict=True):
        assert run in (text, f" {text}")
    assert encoded.bytes == size(said[1::2])
    assert np.count_nonzero(encoded.marks == END) >= len(said) // 2
    assert sum(token in spaced.encoder.special for token in encoded.tokens.tolist()) == 1 + len(said) // 2


def test_sentencepiece_tokens_are_those_of_transformers(spaced: Chat) -> None:
    """Ordinary conversations are encoded as when the model is used; the first word keeps its space."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spaced.encoder.folder)
    talk = conversation("what is this", "the answer is yes", "question?", "hi")
    expected = tokenizer.apply_chat_template([{"role": turn.role, "content": turn.content} for turn in talk.turns])
    encoded = spaced.encode(talk)
    assert encoded.tokens.tolist() == list(expected["input_ids"] if not isinstance(expected, list) else expected)
    first = int(np.flatnonzero(encoded.marks == ANSWER)[0])
    assert spaced.encoder.name(int(encoded.tokens[first])).startswith("▁t")


def test_the_date_stands_still(chat_with: MakeChat) -> None:
    """A template that writes the date gives the same tokens every day."""
    chat = chat_with("{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert chat.render(conversation("a", "b").turns).startswith("26 Jul 2024<|im_start|>")


def test_a_broken_template_is_said(chat_with: MakeChat) -> None:
    """It names the folder."""
    with pytest.raises(SourceError, match="does not parse"):
        chat_with("{% for %}")


def test_templates_cannot_reach_python(chat_with: MakeChat) -> None:
    """The sandbox refuses attributes of the interpreter's."""
    with pytest.raises(Unencodable, match="refuses it"):
        chat_with("{{ ''.__class__.__mro__[1].__subclasses__() }}" + CHATML).encode(conversation("a", "b"))
