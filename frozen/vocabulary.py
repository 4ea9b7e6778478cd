"""A tokenizer of our own: byte-level BPE, trained on the train split."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frozen.encoder import Encoder
from frozen.splits import write_text_durably

SEPARATOR = "<|endoftext|>"
"""The one special token, id 0: stands before every document, in training and in evaluation alike."""
LEAST_VOCABULARY = 257
"""256 bytes and the separator: any text can be encoded."""
LARGEST_VOCABULARY = 1 << 20


def train_tokenizer(texts: Iterable[str], vocabulary: int, folder: Path) -> int:
    """Train a byte-level BPE tokenizer and save it where ``AutoTokenizer.from_pretrained`` finds it.

    Any text can be encoded and decodes to itself. Returns the size of the vocabulary, which is smaller than asked for
    if the texts do not hold enough different pairs. The same texts give the same files.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    refuse_vocabulary(vocabulary)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True)
    write_text_durably(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "pad_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
    }
    write_text_durably(folder / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
    return int(tokenizer.get_vocab_size())


def encode(texts: Sequence[str], tokenizer: Path) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield each text's tokens. A text that spells out the separator is encoded as the characters it is made of."""
    yield from Encoder(tokenizer).texts(texts)


def refuse_vocabulary(vocabulary: int) -> None:
    """Raise `ValueError` for a size that a trained tokenizer cannot have."""
    if not LEAST_VOCABULARY <= vocabulary <= LARGEST_VOCABULARY:
        raise ValueError(
            f"a vocabulary of {vocabulary} is not possible: {LEAST_VOCABULARY} to {LARGEST_VOCABULARY} are"
        )
