"""The console script ``overnight``: arguments in, one of the commands, an exit code out.

Nothing is imported before a command needs it, so that ``--help`` and the reading commands answer at once. Exit codes:
0 done, 1 a failed check, 2 wrong use or nothing could start, 3 stopped early, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sqlite3
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from harness.errors import OvernightError
from harness.interrupts import INTERRUPTED, Interrupts, sentence

COMMANDS = (
    *("init", "run", "propose", "pause", "resume", "stop"),
    *("status", "ledger", "lineage", "show", "compare", "briefing"),
    *("replay", "verify", "report", "mcp", "data", "doctor"),
)
EPILOG = "STUDY is a name under runs/ or a path; where it may be left out, it is the only study or the one that runs."


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` shows what there is)\n")


if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[_Parser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every foreseen error and every signal is one sentence on stderr.

    Without ``argv`` this is the whole program: after its work signals change nothing any more.
    """
    with Interrupts(last=argv is None) as interrupts:
        return _run(list(sys.argv[1:] if argv is None else argv))
    assert interrupts.came is not None
    return _fail(sentence(interrupts.came), INTERRUPTED)


def _run(words: Sequence[str]) -> int:
    known = parser()
    if words and (nearest := _mistyped(words[0])) is not None:
        return _fail(f"there is no command {words[0]!r}{nearest} (`overnight --help` shows what there is)", 2)
    arguments = known.parse_args(words)
    module, _, function = arguments.command.partition(":")
    try:
        code = getattr(importlib.import_module(module), function)(arguments)
        sys.stdout.flush()
    except OvernightError as error:
        return _fail(str(error), error.exit_code)
    except SyntaxError as error:  # a module of ours was changed so that it cannot even be imported
        return _fail(f"{error.filename}, line {error.lineno}, does not parse: the program has changed", 1)
    except BrokenPipeError:  # `overnight ledger | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except sqlite3.DatabaseError as error:
        return _fail(f"the ledger cannot be read: {error}", 2)
    except OSError as error:
        from harness.disk import NOT_WRITABLE

        if error.errno == errno.ENAMETOOLONG:
            return _fail("a name in the command is longer than a file's can be", 2)
        if error.errno not in NOT_WRITABLE:
            raise
        return _fail(f"cannot write {error.filename or 'the study'}: {NOT_WRITABLE[error.errno]}", 2)
    assert isinstance(code, int)
    return code


def _mistyped(word: str) -> str | None:
    """Return ``; did you mean …?`` for a word that is no command, or None for one that is, or for an option."""
    if word.startswith("-") or word in COMMANDS:
        return None
    from difflib import get_close_matches

    close = get_close_matches(word, COMMANDS, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _fail(sentence: str, code: int) -> int:
    print(f"overnight: {' '.join(sentence.split())}", file=sys.stderr)
    return code


SOURCES = """\
A SRC is a file, a folder, or a data set on the Hub: hub:ORG/NAME, hub:ORG/NAME@REVISION,
or a bare ORG/NAME that is no local path. NAME=SRC names it; else its file's name does.
--format, --column, --subset and --split take a VALUE for every source, or NAME=VALUE
for one"""
INIT_SOURCES = f"""\
{SOURCES}. VALUE alone is for those of --data; the guard set is called guard:

  overnight init chat --policy lora --model org/base --budget 300s \\
      --data mine=rows.jsonl hub:org/chats --format mine=alpaca --split chats=train_sft \\
      --general web=folder --guard hub:org/texts --column guard=text --max-regression 0.02
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = _Parser(prog="overnight", description="Searches the hyperparameters of an LLM training job while you sleep.")
    top.epilog = EPILOG
    top.add_argument("--version", action=_Version)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _search_commands(commands)
    _reading_commands(commands)
    _other_commands(commands)
    return top


class _Version(argparse.Action):
    """Prints the installed version; looked up only when asked, because it takes a moment."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"overnight {version('overnight')}")
        parser.exit()


def _add(commands: _Commands, name: str, where: str, text: str) -> argparse.ArgumentParser:
    """Add a command; ``where`` is ``module:function``, imported when it is called."""
    command = commands.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", epilog=EPILOG)
    command.set_defaults(command=where)
    return command


def _search_commands(commands: _Commands) -> None:
    _init_command(commands)

    command = _add(commands, "run", "harness.acting:run", "search; without a study: make and run the demo")
    command.add_argument("study", nargs="?", metavar="STUDY")
    command.add_argument("--trials", type=_positive_int, metavar="N", help="total of the study's trials, every role")
    command.add_argument("--hours", type=_positive, metavar="H", help="total of the driver's time over all its runs")
    command.add_argument("--until", type=_clock, metavar="HH:MM", help="no trial begins that would end later")
    command.add_argument("--proposals", type=_positive_int, metavar="N", help="end after N more proposals are decided")
    command.add_argument("--proposer", metavar="NAME", help="who proposes (default: the study's)")
    command.add_argument("--llm", metavar="MODEL", help="language model that proposes, MODEL or PROVIDER:MODEL")
    command.add_argument("--max-usd", type=_amount, metavar="X", help="most that its calls may cost, study's total")
    command.add_argument("--max-tokens", type=_positive_int, metavar="N", help="most tokens that its calls may use")
    command.add_argument("--cold", action="store_true", help="a fresh interpreter for every job")
    command.add_argument("--plain", action="store_true", help="plain lines even on a terminal")

    command = _add(commands, "propose", "harness.acting:propose", "queue a proposal of your own")
    _study(command)
    _knobs(command, "what to change", required=True)
    command.add_argument("--why", required=True, metavar="TEXT", help="the reason, for the ledger")
    command.add_argument("--watch", metavar="TEXT", help="what to look at (default: the knobs' own)")
    command.add_argument("--parent", type=int, metavar="NODE", help="lineage node to branch from (default: the best)")
    command.add_argument("--source", default="human", metavar="NAME", help="who proposes it (default: %(default)s)")
    command.add_argument("--predict", type=float, metavar="X", help="expected change of the score; negative is better")
    command.add_argument("--confidence", type=float, metavar="P", help="how sure of that, from 0 to 1")
    command.add_argument("--abort-above", type=float, metavar="X", help="end its first run if the probe is above X …")
    command.add_argument("--abort-after", type=float, metavar="SHARE", help="… after this share of the budget")
    for name, text in (
        ("pause", "begin no further trial until resume"),
        ("resume", "go on after pause"),
        ("stop", "end the running search in good order"),
    ):
        _study(_add(commands, name, f"harness.acting:{name}", text))


def _init_command(commands: _Commands) -> None:
    command = _add(commands, "init", "harness.acting:init", "make a study: prepare and seal base model and data")
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = f"{INIT_SOURCES}\n{EPILOG}"
    command.add_argument("study", nargs="?", metavar="STUDY")
    command.add_argument("--from", dest="origin", metavar="OLD", help="a study whose best config is the new baseline")
    command.add_argument("--preset", metavar="NAME", help="a study that many begin with; `--preset list` shows them")
    command.add_argument("--policy", metavar="P", help="name under policies/ (demo, pretrain, lora, …) or a path")
    command.add_argument("--budget", metavar="B", help="of each trial: 300s, 2Mtok, 5e12flop")
    command.add_argument("--task", help="pretrain, continue, sft or dpo (default: the policy's first)")
    command.add_argument("--model", help="what is trained: fresh, a folder, a GGUF file, or an id on the Hub")
    command.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model on the Hub")
    _knobs(command, "your current config, where it differs from the policy's defaults")
    data = command.add_argument_group("data")
    data.add_argument("--data", nargs="+", default=[], metavar="SRC", help="what is trained on and scored")
    data.add_argument("--general", nargs="+", default=[], metavar="SRC", help="general text, trained on only")
    _source_options(data)
    score = command.add_argument_group("evaluation")
    score.add_argument("--guard", metavar="SRC", help="general text on which a kept change must not cost too much")
    score.add_argument(
        "--max-regression", type=_amount, metavar="X", help="bits per byte that it may cost there (default: 0.05)"
    )
    score.add_argument("--beta", type=_positive, metavar="X", help="of bits per preference pair (default: 0.1)")
    score.add_argument(
        "--eval", dest="eval_keys", action="append", default=[], metavar="KEY=VALUE", help="val_bytes, context, …"
    )


def _reading_commands(commands: _Commands) -> None:
    for name, text in (
        ("status", "how a study stands"),
        ("ledger", "every proposal and what became of it"),
        ("lineage", "the way from the baseline to the best config"),
    ):
        command = _add(commands, name, f"harness.reading:{name}", text)
        _study(command)
        _json(command)
    command = _add(commands, "show", "harness.reading:show", "one trial (7) or proposal (p7) in full")
    _study(command)
    command.add_argument("what", metavar="TRIAL", help="a trial's number, or p and a proposal's")
    _json(command)
    command = _add(commands, "compare", "harness.reading:compare", "two scored trials, paired by document")
    _study(command)
    command.add_argument("a", metavar="A", help="a trial's number, or best, baseline, base")
    command.add_argument("b", metavar="B", help="likewise")
    _json(command)
    command = _add(commands, "briefing", "harness.reading:briefing", "what a language model would be shown now")
    _study(command)


def _other_commands(commands: _Commands) -> None:
    command = _add(
        commands, "replay", "harness.acting:replay", "reproduce the best config; with a budget: the full run"
    )
    _study(command)
    budget = command.add_mutually_exclusive_group()
    budget.add_argument("--seconds", metavar="N", help="train the best lineage and the baseline for N seconds each")
    budget.add_argument("--tokens", metavar="N", help="… for N tokens (2000000, 2M)")
    budget.add_argument("--epochs", type=_positive, metavar="N", help="… for N passes over the training split")
    command.add_argument("--ablate", action="store_true", help="also take out every kept change in turn")
    command.add_argument("--merge", action="store_true", help="also make one model of the adapter and its base")
    command.add_argument("--cold", action="store_true", help="a fresh interpreter for every job")
    command = _add(commands, "verify", "harness.acting:verify", "check seal, ledger and best checkpoint, re-scored")
    _study(command)
    _json(command)
    command = _add(commands, "report", "harness.acting:report", "write the report, one HTML file")
    _study(command)
    command.add_argument("-o", "--output", metavar="FILE", help="where to (default: report.html in the study)")
    _study(_add(commands, "mcp", "harness.acting:mcp", "serve a coding agent over stdio (MCP); it starts this itself"))
    command = _add(commands, "data", "harness.data:data", "what would be made of data: formats, duplicates, samples")
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = f"{SOURCES}, as for `overnight init`."
    command.add_argument("sources", nargs="+", metavar="SRC", help="files, folders or Hub data sets; or NAME=SRC")
    _source_options(command)
    command.add_argument("--task", metavar="T", help="also check that it fits: pretrain, continue, sft, dpo")
    command.add_argument("--model", metavar="FOLDER", help="a model's folder: count tokens, try its chat template")
    _json(command)
    command = _add(commands, "doctor", "harness.doctor:doctor", "what this machine offers a search")
    _json(command)


def _source_options(command: argparse._ActionsContainer) -> None:
    for name, text in (
        ("format", "auto, text, jsonl, alpaca, chat, prompt_completion, preference, csv, parquet, saved"),
        ("column", "field that holds the text"),
        ("subset", "configuration of a data set on the Hub"),
        ("split", "split of a data set on the Hub (default: train)"),
    ):
        command.add_argument(f"--{name}", action="append", default=[], metavar="[SRC=]VALUE", help=text)


def _study(command: argparse.ArgumentParser) -> None:
    command.add_argument("study", nargs="?", metavar="STUDY")


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON document instead of text")


def _knobs(command: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
    command.add_argument(
        "--set", dest="knobs", action="append", default=[], required=required, metavar="KNOB=VALUE", help=text
    )


def _positive_int(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return number


def _clock(text: str) -> str:
    hour, colon, minute = text.partition(":")
    if not (colon and hour.isdigit() and minute.isdigit() and len(minute) == 2 and int(hour) < 24 and int(minute) < 60):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of day like 07:00")
    return f"{int(hour):02d}:{minute}"


if __name__ == "__main__":
    sys.exit(main())
