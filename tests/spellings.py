"""Every way to spell a cache root that SGLang accepts but does not treat as canonical."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A folder laid out for one test: what the values in ``SPELLINGS`` refer to."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """The home that goes with the place: a link, as on many clusters."""
        return {"HOME": str(self.folder / "home")}


def lay_out(folder: Path) -> Place:
    """Make the links and folders below *folder*, which exists and is canonical."""
    (folder / "deep/real").mkdir(parents=True)
    (folder / "deep/moved-home").mkdir()
    for link, target in {
        "link": "deep/real",
        "home": "deep/moved-home",
        "one": "two",
        "two": "deep/real",
        "dangling": "deep/absent",
        "lïnk-кэш": "deep/real",
        os.fsdecode(b"li\xff\xfe"): "deep/real",
    }.items():
        (folder / link).symlink_to(folder / target)
    return Place(folder)


# {0} is the place's folder, which is the working directory as well.
SPELLINGS = {
    "absolute link": "{0}/link",
    "link to a link": "{0}/one",
    "link with a suffix that does not exist": "{0}/link/not/yet",
    "relative": "here/cache",
    "relative link": "link/cache",
    "dot": "./here",
    "dot dot": "{0}/deep/../there",
    "dot dot through a link": "{0}/link/../beside",
    "two leading slashes": "/{0}/plain",
    "home": "~",
    "below home": "~/cache",
    "home after a dot": "./~/cache",
    "dollar sign": "$HOME/cache",
    "single space": " ",
    "not ASCII": "{0}/lïnk-кэш/ядро",
    "not UTF-8": os.fsdecode(b"{0}/li\xff\xfe/\xfd"),
}


def value(place: Place, name: str) -> str:
    """The value of ``SPELLINGS[name]`` at *place*."""
    return SPELLINGS[name].replace("{0}", str(place.folder))
