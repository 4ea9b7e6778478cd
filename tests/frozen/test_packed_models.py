"""Which models keep the documents of a packed row apart, on the installed transformers: packing stands on it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from frozen.loader import Batch, Examples
from frozen.tokens import EncodedSplit

MakeSplit = Callable[..., EncodedSplit]
pytestmark = pytest.mark.process  # imports transformers
LENGTHS = [3, 11, 1, 7, 20, 2, 5, 9, 14, 1]
VOCABULARY = 100


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: on matrices this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(kind: str, attention: str, use_cache: bool) -> Any:
    """Return a random model of two layers in evaluation mode."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, Qwen2Config

    shape = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "hidden_size": 32, "use_cache": use_cache}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    match kind:
        case "llama":
            config: Any = LlamaConfig(**shape, **heads)
        case "qwen2":
            config = Qwen2Config(**shape, **heads, use_sliding_window=True, sliding_window=8, max_window_layers=1)
        case "gpt2":
            config = GPT2Config(
                vocab_size=VOCABULARY, n_layer=2, n_embd=32, n_head=4, n_positions=64, use_cache=use_cache
            )
        case _:
            config = MambaConfig(**shape, state_size=8)
    options = {} if kind == "mamba" else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_config(config, **options).train(False)


def largest_difference(model: Any, batch: Batch) -> float:
    """Return how far the logits of documents in packed rows are from those of each document alone, at most."""
    assert batch.position_ids is not None
    largest = 0.0
    with torch.no_grad():
        together = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
        for row, positions in enumerate(batch.position_ids.tolist()):
            begins = [place for place, position in enumerate(positions) if position == 0]
            for begin, end in zip(begins, [*begins[1:], len(positions)], strict=True):
                alone = model(input_ids=batch.input_ids[row : row + 1, begin:end], use_cache=False).logits[0]
                largest = max(largest, float((together[row, begin:end] - alone).abs().max()))
    return largest


@pytest.fixture
def batch(make_split: MakeSplit) -> Batch:
    """Return three packed rows of several documents each, of one to twenty tokens, with padding at an end."""
    split = make_split([[1 + (7 * number + place) % 98 for place in range(n)] for number, n in enumerate(LENGTHS)])
    loader = Examples(
        split,
        seed=1,
        sequence_length=32,
        batch_sequences=3,
        packing=True,
        fraction=1.0,
        order="shuffled",
        weights={},
        temperature=1.0,
        general_fraction=0.0,
        padding=99,
    )
    batch = next(loader)
    assert batch.position_ids is not None
    assert ((batch.position_ids == 0).sum(dim=1) > 1).all()
    assert (batch.input_ids == 99).any()
    return batch


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_packed_documents_do_not_see_each_other(batch: Batch, kind: str, attention: str) -> None:
    """Logits of a packed document equal those of the document alone to 1e-5, without a cache."""
    assert largest_difference(make_model(kind, attention, use_cache=False), batch) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_cache_lets_them_see_each_other(batch: Batch, attention: str) -> None:
    """The trap: with ``use_cache`` left at the models' own default, positions alone keep nothing apart."""
    assert largest_difference(make_model("llama", attention, use_cache=True), batch) > 1e-3


def test_a_recurrent_model_carries_one_document_into_the_next(batch: Batch) -> None:
    """A state space model knows no positions: its documents must not be packed."""
    model = make_model("mamba", "", use_cache=False)
    with torch.no_grad():
        together = model(input_ids=batch.input_ids).logits
        begin = int((batch.position_ids[0] == 0).nonzero()[1]) if batch.position_ids is not None else 0
        alone = model(input_ids=batch.input_ids[:1, begin:]).logits
    assert float((together[:1, begin:] - alone).abs().max()) > 1e-3


def test_gradients_are_those_of_the_documents_alone(batch: Batch) -> None:
    """The loss of a packed batch and its gradient are the mean over its labels of documents run one by one."""
    model = make_model("llama", "sdpa", use_cache=False)
    assert batch.position_ids is not None
    model(input_ids=batch.input_ids, position_ids=batch.position_ids, labels=batch.labels).loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    count = int((batch.labels != -100).sum())
    for row, positions in enumerate(batch.position_ids.tolist()):
        begins = [place for place, position in enumerate(positions) if position == 0]
        for begin, end in zip(begins, [*begins[1:], len(positions)], strict=True):
            labels = batch.labels[row : row + 1, begin:end]
            if (labels != -100).any():
                logits = model(input_ids=batch.input_ids[row : row + 1, begin:end]).logits
                loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
                (loss / count).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(packed[name], parameter.grad, atol=1e-6), name
