"""What the commands say instead of a traceback."""

import sys
from importlib.util import find_spec


class CommandError(Exception):
    """Bad input or a missing part; its text is one line for the user, exit status 2."""


def require_sglang() -> None:
    """Raise CommandError if SGLang is not installed beside this package."""
    if find_spec("sglang") is None:
        raise CommandError(f"no SGLang in {sys.prefix}: install sglang-jitfix beside it")
