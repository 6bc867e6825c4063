"""Measures, by hand: ``python tests/benchmarks/cache_10k.py [FOLDER]``.

Time and peak memory of the commands on a cache of 10,000 leaves that no compiler made,
with manifests of 400 entries like those of real CUDA modules, half of them poisoned.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from cachekit import Entry, own_unit, set_age, write_leaf, write_scope
from support import environment, python

SCOPES, LEAVES, ENTRIES = 1000, 10, 400


UNIT = """\
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include "/kernels/{number}.cuh"
namespace sglang {{
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, (run_{number}));
}}  // namespace sglang
"""
BUILD = """\
import sys
from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
from sglang.kernels.jit.utils.compile import load_jit, ninja
ninja.build = lambda build_file, **other: sys.exit(print(build_file, end=""))
with override_jit_cuda_arch(9, 0):
    load_jit("MODULE", cuda_files=["/kernels/0.cuh"], cuda_wrappers=[("run", "run_0")])
"""


def make(root: Path) -> None:
    """1,000 scopes of 10 leaves: 5 good ones, and of two contents 5 poisoned ones.

    The build files are what SGLang would write here and their headers are real ones, but
    no key is right, which is most work for `explain`; its SGLang is imported in any case.
    """
    site = Path(msgspec.__file__).parents[1]
    headers = sorted((site / "nvidia/cu13/include").rglob("*.h*"))[:ENTRIES]
    real: list[Entry] = [
        ("sitepkgs", str(header.relative_to(site)), digest(header.read_bytes()))
        for header in headers
    ]
    with tempfile.TemporaryDirectory() as empty:
        build_file = python(BUILD, env=environment(empty)).partition("ninja_required")
    for number in range(SCOPES):
        scope = write_scope(root, f"module_{number % 50}_bf16_t_128_true", f"{number:016x}")
        source: Entry = ("abs", f"/kernels/{number}.cuh", digest(b"a kernel"))
        for leaf in range(LEAVES):
            poisoned = leaf % 2
            content = leaf % 4 if poisoned else 10 + leaf
            changed: Entry = (*real[0][:2], digest(str(content).encode()))
            entries = [source, changed, *real[1 : ENTRIES - 1 - poisoned]]
            made = write_leaf(scope, [own_unit(scope), *entries] if poisoned else entries)
            text = "".join(build_file[1:]).replace("sgl_kernel_jit_MODULE", scope.parent.name)
            (made / "build.ninja").write_text(text)
            (made / "cuda.cu").write_text(UNIT.format(number=number))
            for name in ("cuda_0.o", "cuda_0.o.d", ".ninja_log"):
                (made / name).write_text("text")
            set_age(made, leaf)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def measure(*arguments: str) -> None:
    """Print the seconds and the peak memory of one command, in a process of its own."""
    # The peak of a child counts from its parent's at the fork, so a small one starts it.
    code = (
        "import resource, subprocess, sys\n"
        "assert subprocess.run(sys.argv[1:], stdout=-3).returncode in (0, 1)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-m", "sglang_jitfix", *arguments]
    start = time.perf_counter()
    out = subprocess.check_output([sys.executable, "-c", code, *command], env=environment())
    seconds = time.perf_counter() - start
    name = " ".join(argument for argument in arguments if "/" not in argument)
    print(f"{name:20}{seconds:8.1f} s{int(out) / 1024:8.0f} MiB", flush=True)


def main() -> None:
    """Make the cache in a temporary folder, measure, and remove it."""
    where = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        root = Path(name).resolve() / "cache"
        print(f"making {SCOPES * LEAVES} leaves of {ENTRIES} entries", flush=True)
        make(root)
        for arguments in (
            ["ls"],
            ["explain", "--root"],
            ["explain", "module_0_bf16_t_128_true", "--root"],  # SGLang's import, above all
            ["repair", "--dry-run"],
            ["repair"],
            ["repair"],
            ["ls"],
        ):
            measure(*arguments, str(root))


if __name__ == "__main__":
    main()
