"""The ``sglang-jitfix`` command line: its parser, its errors, its exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sglang_jitfix.cli import doctor, explain, ls, repair, verify
from sglang_jitfix.cli.errors import CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line *argv* (default: the process's own) and return its exit status.

    0 is success, 1 a finding that the command reports, 2 bad input, which is one
    line on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="sglang-jitfix",
        description="Keep SGLang's JIT kernel cache usable, however its path is spelled.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (verify, doctor, ls, repair, explain):
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
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


def _close_stdout() -> None:
    # What is left in its buffer would fail once more when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
