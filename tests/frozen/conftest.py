from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from frozen.tokens import EncodedSplit, write_split

MakeSplit = Callable[..., EncodedSplit]


@pytest.fixture
def make_split(tmp_path: Path) -> MakeSplit:
    """Return a function that writes documents, given as lists of tokens, as a split."""
    made = 0

    def make(
        documents: Sequence[Sequence[int]],
        *,
        vocabulary: int = 100,
        separator: int = 0,
        byte_counts: Sequence[int] | None = None,
        source_ids: Sequence[int] | None = None,
        sources: tuple[str, ...] = ("one",),
        marks: Sequence[Sequence[int]] | None = None,
        pairs: bool = False,
        general: tuple[str, ...] = (),
    ) -> EncodedSplit:
        nonlocal made
        made += 1
        return write_split(
            tmp_path / f"split{made}",
            documents=documents,
            byte_counts=byte_counts if byte_counts is not None else [3 * len(tokens) for tokens in documents],
            source_ids=source_ids if source_ids is not None else [0] * len(documents),
            sources=sources,
            separator=separator,
            vocabulary=vocabulary,
            marks=marks,
            pairs=pairs,
            general=general,
        )

    return make
