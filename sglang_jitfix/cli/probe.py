"""Load one small C++ module through SGLang's own ``load_jit`` and say what it took.

``python -m sglang_jitfix.cli.probe FILE``: `sglang-jitfix verify` starts it in fresh
processes, because a second load in one process hits even in a spoiled cache. The
last line of stdout is a JSON object: ``compiles``, ``seconds`` (of the load, SGLang's
import not counted) and ``root`` (the cache root as this process spells it).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

SOURCE = """\
#include <cstdint>
#include <tvm/ffi/tvm_ffi.h>

int64_t add_one(int64_t x) { return x + 1; }
"""


def load(source: str) -> dict[str, Any]:
    """Load the module whose C++ file is *source*, call it, and say what it took."""
    from sglang.kernels.jit.utils.compile import cache, load_jit, ninja

    compiles = 0
    build = ninja.build

    def counted(**arguments: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return build(**arguments)

    ninja.build = counted  # SGLang's loader calls it by this name
    start = time.perf_counter()
    module = load_jit("jitfix_probe", cpp_files=[source], cpp_wrappers=[("add_one", "add_one")])
    seconds = time.perf_counter() - start
    if module.add_one(41) != 42:
        raise RuntimeError("the module that was loaded computes something else")
    root = getattr(cache, "cache_root", lambda: None)()  # absent before 0.5.20
    return {"compiles": compiles, "seconds": seconds, "root": root and str(root)}


def main(source: str) -> None:
    """Print what :func:`load` says, as one line of JSON."""
    print(json.dumps(load(source)))


if __name__ == "__main__":
    main(sys.argv[1])
