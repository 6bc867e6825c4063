"""The ``sglang-jitfix`` command line: its parser, its errors, its exit status."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType

from sglang_jitfix.cache.errors import CommandError
from sglang_jitfix.cli import doctor, explain, ls, repair, verify

AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line *argv* (default: the process's own) and return its exit status.

    0 is success, 1 a finding that the command reports, 2 bad input, which is one
    line on stderr.
    """
    arguments = make_parser().parse_args(argv)
    try:
        if getattr(arguments, "root", None) == "":  # pathlib's working directory
            raise CommandError("the root is empty")
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except CommandError as error:
        print(f"sglang-jitfix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sglang-jitfix: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`: the reader has seen enough
        _close_stdout()
        return 0
    except OSError as error:  # a full disk, no permission, ...
        if error.filename is None:
            _close_stdout()  # most likely it was the output that could not be written
        place = "" if error.filename is None else f"{os.fspath(error.filename)!a}: "
        print(f"sglang-jitfix: {place}{error.strerror or error}", file=sys.stderr)
        return 2
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each leaves its module's ``run`` in ``arguments.run``."""
    parser = argparse.ArgumentParser(
        prog="sglang-jitfix",
        description="Keep SGLang's JIT kernel cache usable, however its path is spelled.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(command: ModuleType, text: str, more: str) -> argparse.ArgumentParser:
        name = command.__name__.rpartition(".")[2]
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=more)
        added.set_defaults(run=command.run)
        return added

    add(
        verify,
        "prove on this machine that the shim works (a minute or two)",
        "Builds one small C++ module with the installed SGLang under a temporary linked cache"
        " root, in three fresh processes with the shim off and three with it on. Exit status 0"
        " if the shim makes it one compile and then none.",
    )
    doctor_parser = add(
        doctor,
        "show the shim's state, the cache root link by link, and hints",
        "Shows what the shim does here. Imports neither SGLang nor torch.",
    )
    ls_parser = add(
        ls,
        "list the builds in a cache and tell the poisoned ones",
        "Lists every leaf, newest first in its scope, and left-over staging folders. Status ok:"
        " complete. poisoned: good, but without the shim never found. unreadable: the manifest"
        " is not what SGLang wrote. incomplete: a part is missing. staging: a build in progress"
        " or its left-over. Imports neither SGLang nor torch.",
    )
    repair_parser = add(
        repair,
        "mend the poisoned builds in a cache, for SGLang without the shim too",
        "Rewrites each poisoned leaf into the leaf that SGLang should have written. Holds"
        " SGLang's lock of the scope meanwhile, so servers may run. Exit status 0 if nothing is"
        " left to mend, 1 if something is. Imports neither SGLang nor torch.",
    )
    repair_parser.add_argument("--dry-run", action="store_true", help="show it, change nothing")
    repair_parser.add_argument(
        "--staging-older-than",
        type=seconds,
        metavar="AGE",
        help="also remove staging left-overs older than this, e.g. 90s, 30m, 1h, 2d",
    )
    explain_parser = add(
        explain,
        "tell for each build whether a launch here would use it, and why not",
        "Tells for each leaf whether SGLang, launched in this environment, would use it (hit) or"
        " compile (miss), and what differs. Imports SGLang, which takes a while.",
    )
    explain_parser.add_argument(
        "module", nargs="?", metavar="MODULE", help="with or without its prefix; default: all"
    )
    explain_parser.add_argument(
        "--check",
        action="store_true",
        help="exit status 0 if every module has a build that a launch here would use, 1 if one"
        " has none, 2 if that cannot be told",
    )
    explain_parser.add_argument("--root", metavar="ROOT", help="default: SGLang's own")
    for command in (doctor_parser, ls_parser, repair_parser):
        command.add_argument("root", nargs="?", metavar="ROOT", help="default: SGLang's own")
    for command in (doctor_parser, ls_parser, repair_parser, explain_parser):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def seconds(text: str) -> int:
    """An age such as ``1h`` in seconds; raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"not an age such as 90s, 30m, 1h or 2d: {text!a}")
    return int(match[1]) * AGE_UNITS[match[2]]


def _close_stdout() -> None:
    # What is left in its buffer would fail once more when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
