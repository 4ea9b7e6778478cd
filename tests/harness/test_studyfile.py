import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadInput
from harness.studyfile import Asked, DataSource, Evaluation, GuardSet, StudyFile, named

GOOD: dict[str, Any] = {
    "study": {
        "task": "pretrain",
        "model": "fresh",
        "policy": "demo",
        "budget": "300s",
        "vocabulary": 1024,
        "seed": 0,
        "data": [{"name": "text", "path": "text.txt"}],
    },
    "baseline": {"optim.learning_rate": 1e-3},
    "eval": {"context": 128, "stride": 64, "probe_bytes": 10, "val_bytes": 20, "holdout_bytes": 30},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the good table with one dotted key set."""
    table = {name: dict(section) for name, section in GOOD.items()}
    section, _, key = path.partition(".")
    if key:
        table.setdefault(section, {})[key] = value
    else:
        table[section] = value  # type: ignore[assignment]
    return table


text = st.text(st.characters(codec="utf-8"), max_size=30)
values = st.one_of(
    st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False), text
)


@given(
    policy=text, path=text, knobs=st.dictionaries(text.filter(bool), values, max_size=5), seed=st.integers(0, 2**31 - 1)
)
def test_what_is_written_is_read_back(policy: str, path: str, knobs: dict[str, Any], seed: int) -> None:
    """Whatever a name, a path or a value holds, the file gives it back in value and type."""
    file = StudyFile(
        study=Asked(
            task="pretrain",
            model="fresh",
            policy=policy,
            budget="2Mtok",
            vocabulary=512,
            seed=seed,
            data=(DataSource(name="a", path=path), DataSource(name="b", path="x", format="jsonl")),
        ),
        baseline=knobs,
        eval=Evaluation(context=64, stride=1, probe_bytes=1, val_bytes=2, holdout_bytes=3),
    )
    table = tomllib.loads(file.render())
    back = StudyFile.parse(table)
    assert back == file
    assert [type(value) for value in back.baseline.values()] == [type(value) for value in file.baseline.values()]


@given(
    task=st.sampled_from(["continue", "sft", "dpo"]),
    model=text.filter(bool),
    revision=st.none() | text,
    hub=text,
    options=st.fixed_dictionaries(
        {name: st.none() | text for name in ("revision", "subset", "split", "column")} | {"general": st.booleans()}
    ),
    guard=st.none()
    | st.builds(GuardSet, hub=text, column=st.none() | text, bytes=st.integers(1, 9), max_regression=st.floats(0, 10)),
    beta=st.floats(1e-6, 10),
)
def test_a_study_on_a_base_model_is_read_back(
    task: Any, model: str, revision: str | None, hub: str, options: dict[str, Any], guard: GuardSet | None, beta: float
) -> None:
    """Model, data sets of the Hub with their options, guard set and beta survive the file."""
    file = StudyFile(
        study=Asked(
            task=task,
            model=model,
            revision=revision,
            policy="lora",
            budget="2Mtok",
            vocabulary=512,
            seed=0,
            data=(DataSource(name="a", hub=hub, **options),),
        ),
        eval=Evaluation(
            context=64,
            stride=1,
            probe_bytes=1,
            val_bytes=2,
            holdout_bytes=3,
            precision="bf16",
            preference_beta=beta,
            guard=guard,
        ),
    )
    assert StudyFile.parse(tomllib.loads(file.render())) == file


@given(st.text(max_size=200))
def test_any_text_is_a_study_file_or_bad_input(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    """A damaged file gets a sentence, never a stack trace."""
    path = tmp_path_factory.mktemp("study") / "study.toml"
    path.write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(BadInput, match=r"study\.toml"):
        StudyFile.read(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("studdy", {}, "unknown key 'studdy'; did you mean 'study'?"),
        ("eval.contexts", 3, "unknown key 'eval.contexts'; did you mean 'context'?"),
        ("run.trails", 3, "unknown key 'run.trails'; did you mean 'trials'?"),
        ("study.data", [{"nam": "a", "path": "b"}], "unknown key 'study.data.nam'; did you mean 'name'?"),
        ("study.data", [], "study.data"),
        ("study.data", [{"name": "a", "path": "b"}] * 2, "same name"),
        ("study.data", 3, "study.data"),
        ("study.budget", "5 bananas", "unknown unit 'bananas'"),
        ("study.task", "juggle", "study.task = 'juggle'"),
        ("study.seed", -1, "study.seed = -1"),
        ("eval.guard", {"path": "x", "byte": 3}, "unknown key 'eval.guard.byte'; did you mean 'bytes'?"),
        ("study.data", [{"name": "a", "path": "b", "hub": "c"}], "source a: give one of path and hub"),
        ("eval.stride", 128, "stride 128 must be below context 128"),
        ("eval.val_bytes", "many", "eval.val_bytes = 'many'"),
        ("run.until", "25:00", "run.until = '25:00'"),
        ("run.device", "gpu", "run.device = 'gpu'"),
        ("run.hours", float("nan"), "run.hours"),
        ("baseline", {"optim": {"learning_rate": [1]}}, "optim.learning_rate"),
        ("study", 3, "study = 3"),
    ],
)
def test_mistakes_are_named(key: str, value: object, said: str) -> None:
    """The message has the key, the value or the name that would have been right."""
    with pytest.raises(BadInput, match=re.escape(said)):
        StudyFile.parse(changed(key, value))


def test_budget_is_canonical_and_knobs_may_lack_quotes() -> None:
    """Two spellings of the same request are the same value."""
    table = changed("study.budget", "5min") | {"baseline": {"optim": {"learning_rate": 0.001}}}
    assert StudyFile.parse(table) == StudyFile.parse(GOOD)


def test_names_of_sources(tmp_path: Path) -> None:
    """A name is given, or made of the file's own, and is never taken twice."""
    odd = tmp_path / "a=b.txt"
    odd.write_text("x")
    assert named("wiki=data/x.jsonl", set()) == ("wiki", "data/x.jsonl")
    assert named(str(odd), set()) == ("a-b", str(odd))
    assert named("some/Wörter.txt", set())[0] == "W-rter"
    assert named("x/text.md", {"text", "text-2"})[0] == "text-3"
    with pytest.raises(BadInput, match="two sources are named 'a'"):
        named("a=x", {"a"})
