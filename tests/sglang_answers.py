"""What a process says about the real SGLang: run by test_neighbours.py beside other hooks.

``python sglang_answers.py SOURCE ANSWERS``: loads the module whose C++ file is SOURCE as
`sglang-jitfix verify` does, and writes a JSON object to ANSWERS: ``look`` is what inspect,
traceback, pickle and runpy make of SGLang, which must not depend on the shim; ``patched``
and ``neighbour`` are the shim's and the neighbour's own work. The code in ANSWERS_FIRST is
run before SGLang is imported.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pathlib
import pickle
import runpy
import sys
import traceback
from collections.abc import Callable


class Unresolvable(type(pathlib.Path())):  # type: ignore[misc]
    """A path of the right type that makes SGLang's writer fail."""

    def resolve(self, strict: bool = False) -> pathlib.Path:
        raise ZeroDivisionError


def frames_of(call: Callable[[], object], files: set[str | None]) -> list[str]:
    """File, line and text of each frame in *files* when *call* raises ZeroDivisionError."""
    try:
        call()
    except ZeroDivisionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        return [f"{f.filename}:{f.lineno} {f.name} {f.line}" for f in frames if f.filename in files]
    raise AssertionError("the call should have failed")


def error_of(call: Callable[[], object]) -> str:
    """The name of what *call* raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}"
    return "nothing"


def main(source: str, answers: str) -> None:
    """Ask everything, and write the answers to the file *answers*."""
    exec(os.environ.get("ANSWERS_FIRST", ""), {})  # noqa: S102
    from sglang.kernels.jit.utils.compile import cache
    from sglang.srt import environ

    from sglang_jitfix.cli import probe

    probe.main(source)  # first, so that nothing asked below helps the shim
    said = list(getattr(sys, "said", []))

    objects = [cache._to_entries, cache.commit_build, cache._DepEntry, cache, environ]
    objects += [environ.EnvField, environ._exportable_value, environ.EnvField.get]
    named = [cache._to_entries, cache.commit_build, environ.EnvField, environ._exportable_value]
    bare = [inspect.unwrap(it) if callable(it) else it for it in objects]
    bad = Unresolvable("/x")
    look = {
        "sources": [inspect.getsource(it) for it in objects],
        "places": [(inspect.getsourcefile(it), inspect.getsourcelines(it)[1]) for it in bare],
        "parameters": [[*inspect.signature(it).parameters] for it in named],
        "frames": frames_of(
            lambda: cache._to_entries(dependencies=[bad], build_dir=pathlib.Path(".")),
            {cache.__file__, environ.__file__},
        ),
        "pickles": [pickle.dumps(it).hex() for it in named],
        "pickled": [pickle.loads(pickle.dumps(it)) is it for it in named],
        "as main": sorted(it for it in runpy.run_module(cache.__name__) if not it.startswith("__")),
        "files": [cache.__file__, cache.__spec__.origin, environ.__file__],
    }
    patched = []
    layer = cache._to_entries
    while layer is not None:
        patched.append(type(layer).__name__)
        layer = getattr(layer, "__wrapped__", None)
    packages = [type(finder).__module__.partition(".")[0] for finder in sys.meta_path]
    neighbour = {
        "wrong type": [
            error_of(lambda: cache._normalize_path(3)),
            error_of(lambda: environ._exportable_value(3)),
        ],
        "said": said,
        "distutils": importlib.import_module("distutils").__name__,
        "pydevd": "pydevd" in sys.modules,
        "finders": [name for name in packages if name in ("sglang_jitfix", "wrapt")],
    }
    text = json.dumps({"look": look, "patched": patched, "neighbour": neighbour}, default=str)
    pathlib.Path(answers).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
