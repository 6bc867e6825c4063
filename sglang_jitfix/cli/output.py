"""How the commands print: tables, names, sizes, times, JSON, and progress on a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import TypeVar

Item = TypeVar("Item")

PROGRESS_INTERVAL = 0.1  # seconds


def printable(text: str) -> str:
    """*text*, or its ASCII repr where it could upset a terminal or a reader of lines."""
    return text if text.isascii() and text.isprintable() else ascii(text)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """*rows* below *heads* in columns; a head that begins with ``>`` aligns its column right."""
    lines = [[head.lstrip(">") for head in heads], *([printable(cell) for cell in r] for r in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if head.startswith(">") else cell.ljust(width)
            for head, cell, width in zip(heads, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(aligned)


def show_json(value: object) -> None:
    """Print *value* as JSON for scripts."""
    print(json.dumps(value, indent=2))


def size(count: int) -> str:
    """*count* bytes for people, in decimal units."""
    number, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while number >= 999.95 and len(units) > 1:
        number /= 1000
        del units[0]
    return f"{count} B" if units[0] == "B" else f"{number:.1f} {units[0]}"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """*count* and *noun* in the number it needs."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def age(seconds: float) -> str:
    """*seconds* for people, in the largest unit that gives a whole number."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def moment(nanoseconds: int) -> str:
    """A time stamp of the file system, in UTC as ISO 8601 writes it."""
    try:
        stamp = datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc)
    except (ValueError, OverflowError):  # a file system may hold years that datetime does not
        return f"@{nanoseconds // 10**9}"
    return stamp.strftime("%Y-%m-%dT%H:%M:%SZ")


def say(text: str) -> None:
    """Tell the user on stderr; stdout is for the result."""
    print(printable(text), file=sys.stderr, flush=True)


def finish(problems: Iterable[str], status: int) -> int:
    """The exit status of a command: *status*, or 2 after telling of *problems*."""
    for problem in problems:
        say(f"sglang-jitfix: {problem}")
        status = 2
    return status


def counted(items: Iterable[Item], noun: str) -> Iterator[Item]:
    """The same *items*, counted in place on a terminal as they go by."""
    if not sys.stderr.isatty():
        yield from items
        return
    shown = time.monotonic()
    try:
        for number, item in enumerate(items, 1):
            now = time.monotonic()
            if now - shown >= PROGRESS_INTERVAL:
                shown = now
                print(f"\r{number} {noun}", end="\x1b[K", file=sys.stderr, flush=True)
            yield item
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
