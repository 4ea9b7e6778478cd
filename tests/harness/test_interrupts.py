"""A signal at any moment of any command: one sentence, exit code 130, and nothing left half made."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.interrupts import Interrupts
from harness.queries import Reader
from harness.setup import create

PROGRAM = """
import os, signal, sys
number, moment, how, sys.argv[1:] = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]

class Moment:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                if how == "passed on":
                    raise
                elif how == "twice":
                    os.kill(os.getpid(), number)
                raise ImportError("a library's own error")

sys.meta_path.insert(0, Moment())
if how == "ignored":
    signal.signal(number, signal.SIG_IGN)
if moment == "the end":
    import atexit
    atexit.register(os.kill, os.getpid(), number)
from harness.cli import main
sys.exit(main())
"""
"""Runs a command and sends itself a signal when a module is first asked for."""
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def signalled(
    folder: Path, number: signal.Signals, moment: str, *words: str, how: str = "passed on"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(int(number)), moment, how, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def tree(folder: Path) -> list[str]:
    """Return every file but encoded data, which is shared and may stay."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if ".cache" not in path.parts)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts, and with a study of them that has not begun."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "texts").mkdir()
    for number in range(20):
        lines = (f"line {line} of text {number} says {(line + 90 * number) * 7919 % 10007}" for line in range(200))
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))
    create("old", policy="demo", data=[folder / "texts"], budget="1e11flop", runs=folder / "runs", vocabulary=300)
    return folder


INIT = ("init", "new", "--policy", "demo", "--data", "texts", "--budget", "1e11flop")


@pytest.mark.process
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("words", "moment"),
    [
        (INIT, "harness.acting"),
        (INIT, "pydantic"),
        (INIT, "numpy"),
        (INIT, "tokenizers"),
        (INIT, "sqlite_utils"),
        (("run", "old"), "harness.live"),
        (("run", "old"), "harness.search"),
        (("run", "old"), "scipy"),
        (("replay", "old"), "harness.replay"),
        (("verify", "old"), "harness.verify"),
        (("verify", "old"), "harness.audit"),
        (("status", "old"), "harness.queries"),
    ],
)
def test_a_signal_is_one_sentence(place: Path, number: signal.Signals, words: tuple[str, ...], moment: str) -> None:
    """While modules are imported or data is prepared: exit code 130, and no file more or less in any study."""
    before = tree(place)
    done = signalled(place, number, moment, *words)
    assert (done.returncode, done.stderr) == (130, f"overnight: interrupted by {number.name}\n")
    assert tree(place) == before


@pytest.mark.process
@pytest.mark.parametrize("how", ["swallowed", "twice"])
def test_an_interrupted_library_may_raise_what_it_likes(place: Path, how: str) -> None:
    """The signal is the reason, whatever error it became on the way; a second signal waits for nothing."""
    done = signalled(place, signal.SIGTERM, "harness.verify", "verify", "old", how=how)
    assert (done.returncode, done.stderr) == (130, "overnight: interrupted by SIGTERM\n")


@pytest.mark.process
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize(("moment", "how"), [("the end", "passed on"), ("harness.queries", "ignored")])
def test_what_is_done_or_ignored_stays_so(place: Path, number: signal.Signals, moment: str, how: str) -> None:
    """After its work a command's exit code stands; a signal that `nohup` or a shell ignores stays ignored."""
    done = signalled(place, number, moment, "status", "old", "--json", how=how)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"study": "old"' in done.stdout


@pytest.mark.process
def test_a_signal_after_the_search(place: Path) -> None:
    """While the result is put together the search is over, and its end is on record."""
    done = signalled(place, signal.SIGHUP, "harness.report.page", "run", "old", "--hours", "1e-9")
    assert (done.returncode, done.stderr) == (130, "overnight: interrupted by SIGHUP\n")
    with Reader(place / "runs" / "old" / "ledger.db") as reader:
        assert [event.kind for event in reader.events()] == ["agent", "run_began", "run_ended"]


@pytest.mark.process
def test_the_second_signal_of_a_search_ends_it_with_a_sentence() -> None:
    """The owner who asks twice waits for nothing."""
    program = (
        "import signal, sys\nfrom harness.owner import Owner\n"
        "with Owner(None, None, None).signals():\n"
        "    signal.raise_signal(signal.SIGINT)\n    print('goes on', flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM)\n    print('never', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "goes on\n", "overnight: interrupted by SIGTERM\n")


def test_handlers_come_back() -> None:
    """Inside a program of somebody else's, its own handlers are there again afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.came is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_errors_pass() -> None:
    """Without a signal an error is an error."""
    with pytest.raises(ZeroDivisionError), Interrupts():
        raise ZeroDivisionError
