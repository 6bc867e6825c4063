"""A process that has imported SGLang and forks launches: each loads modules, or asks `explain`.

``python launches.py SOURCE``, driven through :class:`Launches`. The modules are those in
MODULES, of the files that :func:`write_sources` makes; some are built for sm_86, as on a
machine with such a GPU, by a process that loads nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forks import Forker

SOURCES = {
    "scale.h": "#define SCALE 3\n",
    "scale_cpp.h": """\
#include <cstdint>
#include <tvm/ffi/tvm_ffi.h>
#include "scale.h"

inline int64_t scale_cpp(int64_t x) { return x * SCALE; }
""",
    "scale.cuh": """\
#include <cstdint>

inline int64_t scale_cuda(int64_t x) { return x; }
""",
    "whole.cpp": """\
#include <cstdint>
#include <tvm/ffi/tvm_ffi.h>
#include "scale.h"

static int64_t scale(int64_t x) { return x * SCALE; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, scale);
""",
}
CPP: dict[str, Any] = {"cpp_files": ["scale_cpp.h"], "cpp_wrappers": [["scale", "scale_cpp"]]}
CUDA: dict[str, Any] = {
    **CPP,
    "cuda_files": ["scale.cuh"],
    "cuda_wrappers": [["scale_cu", "scale_cuda"]],
}
# By name: the arguments of load_jit, those in files relative to the sources.
MODULES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": (("plain",), CPP),
    "poisoned": (("poisoned",), CPP),
    "underscores": (
        ("of_two_words", "bf16_t", "128", "a_b"),
        {**CPP, "extra_cflags": ["-DMORE=1"], "extra_include_paths": ["."]},
    ),
    "whole": (("whole",), {"cpp_files": ["whole.cpp"], "header_only": False}),
    "cuda": (("cuda",), {**CUDA, "extra_cuda_cflags": ["--use_fast_math"]}),
    "cuda_poisoned": (("cuda_poisoned",), CUDA),
}
ON_THE_GPU = ("cuda", "cuda_poisoned")


def write_sources(folder: Path) -> Path:
    """Make *folder* with the files of the modules."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    return folder


def module_of(name: str) -> str:
    """What SGLang calls the module's folder."""
    return "sgl_kernel_jit_" + "_".join(MODULES[name][0])


class Launches(Forker):
    """A running ``launches.py``."""

    def __init__(
        self, source: Path, env: Mapping[str, str], executable: str = sys.executable
    ) -> None:
        super().__init__(__file__, source, env, executable=executable)
        assert self.answer() == "ready"

    def load(self, names: list[str], variables: Mapping[str, str], path: str = "") -> Any:
        """For each module, in a launch with *variables* and *path* in front of sys.path:
        "built", "hit" or, where compiling is forbidden, "miss"."""
        found: dict[str, str] = {}
        for group in (
            [name for name in names if name not in ON_THE_GPU],
            [name for name in names if name in ON_THE_GPU],
        ):
            if group:
                self.ask(load=group, variables=dict(variables), path=path)
                found |= self.answer()
        return found

    def explain(self, variables: Mapping[str, str], *arguments: str, path: str = "") -> Any:
        """The status of `sglang-jitfix explain --json`, what it prints, and its errors."""
        command = ["explain", "--json", *arguments]
        self.ask(explain=command, variables=dict(variables), path=path)
        return self.answer()


def load(names: list[str], source: str) -> dict[str, str]:
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
    from sglang.kernels.jit.utils.compile import load_jit, ninja

    found = {}
    compiled = False
    build = ninja.build

    def counted(**arguments: Any) -> Any:
        nonlocal compiled
        compiled = True
        return build(**arguments)

    ninja.build = counted  # SGLang's loader calls it by this name
    for name in names:
        compiled = False
        arguments, given = MODULES[name]
        options = {
            key: [os.path.normpath(f"{source}/{file}") for file in value]
            if key.endswith(("files", "paths"))
            else value
            for key, value in given.items()
        }
        try:
            with override_jit_cuda_arch(8, 6) if name in ON_THE_GPU else contextlib.nullcontext():
                module = load_jit(*arguments, **options)
        except RuntimeError as error:
            if "has no usable cached build" not in str(error):
                raise
            found[name] = "miss"
        else:
            assert module.scale(2) % 2 == 0
            found[name] = "built" if compiled else "hit"
    return found


def explain(arguments: list[str]) -> tuple[int, Any, str]:
    from sglang_jitfix.cli.main import main

    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main(arguments)
    return status, json.loads(out.getvalue() or "null"), err.getvalue()


def serve(source: str) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.environ.update(request["variables"])
            if request["path"]:
                sys.path.insert(0, request["path"])
            try:
                if "load" in request:
                    print("answer", json.dumps(load(request["load"], source)), flush=True)
                else:
                    print("answer", json.dumps(explain(request["explain"])), flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    import sglang.kernels.jit.utils.compile  # noqa: F401

    print('answer "ready"', flush=True)
    serve(sys.argv[1])
