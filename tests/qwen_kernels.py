"""The JIT modules of a dense Qwen2.5 model: build them, load them again, print a table.

``python tests/qwen_kernels.py`` prints ``tests/qwen_kernels.md``. It needs SGLang, the
shim and nvcc, and no GPU: the modules are built for an RTX 3090 Ti (sm_86), for a model
of Qwen2.5-7B's shape in bfloat16, split over two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import environment, manifests, staging_entries

ARCHITECTURE = (8, 6)
FORBID = {"SGLANG_CRASH_ON_JIT_COMPILE": "1"}
BFLOAT16 = "bfloat16"  # a name: pytest reads this file, and importing torch takes seconds
KV_ROW = 4 // 2 * 128 * 2  # bytes: 4 key-value heads over 2 GPUs, 128 wide, 2 bytes each
ALWAYS, LINKED = "always", "NVLink"


@dataclass(frozen=True)
class Kernel:
    """One JIT module, and the way to it, read in SGLang 0.5.21.

    *loader* is the function that calls ``load_jit``. *caller* is the function of the
    serving stack that gets there by way of *operation*. Both are file:function, the
    files below the package ``sglang``.
    """

    name: str
    when: str
    caller: str
    operation: str
    loader: str
    arguments: tuple[Any, ...] = ()

    def load(self) -> None:
        """Load the module as SGLang does; raises what ``load_jit`` raises."""
        import torch

        file, function = self.loader.split(":")
        module = importlib.import_module("sglang." + file.removesuffix(".py").replace("/", "."))
        getattr(module, function)(
            *(getattr(torch, one) if isinstance(one, str) else one for one in self.arguments)
        )


ALL_REDUCE = "kernels/ops/communication/all_reduce.py"
COMMUNICATOR = "srt/distributed/device_communicators/custom_all_reduce_v2.py"

KERNELS = (
    Kernel(
        "activation",
        ALWAYS,
        "srt/layers/activation.py:SiluAndMul.forward_cuda",
        "kernels/ops/activation/activation.py:silu_and_mul",
        "kernels/ops/activation/activation.py:activation_module",
        (BFLOAT16,),
    ),
    Kernel(
        "fused_rope",
        ALWAYS,
        "srt/layers/rotary_embedding/base.py:RotaryEmbedding.forward_cuda",
        "kernels/ops/attention/rope.py:apply_rope_with_cos_sin_cache_inplace",
        "kernels/ops/attention/rope.py:_jit_fused_rope_module",
        (True, 128, BFLOAT16, BFLOAT16),
    ),
    Kernel(
        "kvcache",
        ALWAYS,
        "srt/mem_cache/memory_pool.py:_set_kv_buffer_impl",
        "kernels/ops/kvcache/kvcache.py:store_cache",
        "kernels/ops/kvcache/kvcache.py:_jit_kvcache_module",
        (KV_ROW, KV_ROW, 0),
    ),
    Kernel(
        "clamp_position",
        ALWAYS,
        "srt/model_executor/forward_batch_info.py:ForwardBatch.init_new",
        "kernels/ops/attention/clamp_position.py:clamp_position",
        "kernels/ops/attention/clamp_position.py:_jit_clamp_position_module",
        ("int64",),
    ),
    Kernel(
        "communicator",
        LINKED,
        f"{COMMUNICATOR}:CustomAllReduceV2._init_workspace",
        f"{ALL_REDUCE}:PushPlane",
        f"{ALL_REDUCE}:_init_communicator",
    ),
    Kernel(
        "cuda_ipc",
        LINKED,
        f"{COMMUNICATOR}:CustomAllReduceV2.__init__",
        f"{ALL_REDUCE}:IPCManager",
        f"{ALL_REDUCE}:_init_ipc_manager",
    ),
    Kernel(
        "custom_all_reduce",
        LINKED,
        f"{COMMUNICATOR}:CustomAllReduceV2.custom_all_reduce",
        f"{ALL_REDUCE}:custom_all_reduce",
        f"{ALL_REDUCE}:get_all_reduce_module",
        (BFLOAT16, 2),
    ),
)


def cuda_home() -> str:
    """The root of the CUDA toolkit, asked of nvcc itself.

    SGLang takes the parent of the folder that nvcc is in (``toolchain.py``,
    ``cuda_home``), which is wrong where the nvcc on PATH is a link or a wrapper
    script. Raises RuntimeError if there is no nvcc in ``CUDA_HOME`` or on PATH.
    """
    home = os.environ.get("CUDA_HOME")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if nvcc is None or not os.path.exists(nvcc):
        raise RuntimeError("no nvcc: install the CUDA toolkit and put its nvcc on PATH")
    done = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("#$ TOP="):
            return os.path.realpath(line.removeprefix("#$ TOP="))
    raise RuntimeError(f"{nvcc} --dryrun does not tell its root:\n{done.stdout}")


def toolkit_version(home: str) -> str:
    """The release of the nvcc below *home*, such as ``13.0``."""
    out = subprocess.run([f"{home}/bin/nvcc", "--version"], stdout=subprocess.PIPE, text=True)
    return out.stdout.split("release ")[1].split(",")[0]


def driver(folder: Path) -> dict[str, str]:
    """What the environment needs for ``-lcuda`` and for loading what was linked with it.

    Nothing where there is a CUDA driver. Elsewhere a stand-in made in *folder*: the two
    functions of the driver that ``cuda_ipc`` refers to, and calls only when it opens a
    handle of a GPU's memory.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return {}
    source = folder / "driver.c"
    source.write_text(
        "int cuMemGetAddressRange_v2(void *b, void *s, void *p) { return 100; }\n"
        "int cuGetErrorName(int e, const char **n) { return 100; }\n"
    )
    library = folder / "libcuda.so.1"
    compiler = os.environ.get("CC") or "cc"
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", soname, "-o", library, source], check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    return {
        name: os.pathsep.join(filter(None, [str(folder), os.environ.get(name)]))
        for name in ("LIBRARY_PATH", "LD_LIBRARY_PATH")
    }


def watch_builds() -> list[str]:
    """A list to which every compile in this process adds its module's folder from now on."""
    from sglang.kernels.jit.utils.compile import ninja

    built: list[str] = []
    build = ninja.build

    def watched(**arguments: Any) -> Any:
        built.append(arguments["spec"].module_name)
        return build(**arguments)

    ninja.build = watched  # SGLang's loader calls it by this name
    return built


def load(names: list[str]) -> None:
    """Load the modules *names* in this process and print one JSON object: by name, the
    folder SGLang gives the module, the seconds, and the number of compiles."""
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch

    built = watch_builds()
    report = {}
    with override_jit_cuda_arch(*ARCHITECTURE):
        for kernel in KERNELS:
            if kernel.name in names:
                print(f"loading {kernel.name}", file=sys.stderr, flush=True)
                start = time.perf_counter()
                kernel.load()
                report[kernel.name] = {
                    "seconds": time.perf_counter() - start,
                    "built": list(built),
                }
                built.clear()
    print(json.dumps(report))


def load_in_fresh_process(env: dict[str, str], names: list[str]) -> dict[str, Any]:
    """The report of a fresh process that loads the modules *names*.

    Raises subprocess.CalledProcessError, with SGLang's message in its ``stderr``, if
    one of them does not load.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--load", *names],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def linked_root(folder: Path) -> tuple[Path, Path]:
    """A new cache root below *folder* as it is spelled, through a link, and as it is."""
    (folder / "real").mkdir()
    (folder / "link").symlink_to("real")
    return folder / "link" / "jit", folder / "real" / "jit"


def measure(folder: Path) -> list[dict[str, Any]]:
    """Build all modules in one fresh process through a linked root below *folder*, load
    them in a second one that may not compile; one row of the table for each."""
    names = [kernel.name for kernel in KERNELS]
    spelled, root = linked_root(folder)
    env = environment(spelled, CUDA_HOME=cuda_home(), **driver(folder))
    first = load_in_fresh_process(env, names)
    second = load_in_fresh_process({**env, **FORBID}, names)
    rows = []
    for kernel in KERNELS:
        (built,) = first[kernel.name]["built"]
        (manifest,) = (path for path in manifests(root) if path.parents[2].name == built)
        rows.append(
            {
                "kernel": kernel,
                "seconds": first[kernel.name]["seconds"],
                "again": second[kernel.name]["seconds"],
                "compiles again": len(second[kernel.name]["built"]),
                "dependencies": len(json.loads(manifest.read_bytes())),
                "staging": len(staging_entries(manifest.parent)),
            }
        )
    return rows


PAGE = """\
# The JIT modules of a dense Qwen2.5 model

Printed by `python tests/qwen_kernels.py`: built with the real nvcc (CUDA {cuda}) for an
RTX 3090 Ti (sm_86), Qwen2.5-7B in bfloat16 at TP=2, under a cache root that is spelled
through a symbolic link, with the shim on. Seconds are wall time on two cores, one module
after the other; *again* is a second, fresh process under `SGLANG_CRASH_ON_JIT_COMPILE=1`,
which must load every module and compile none. *Staging* counts the entries of the
manifest that lie in a temporary staging folder: each one means a compile at every start.
`cuda_ipc` links with the CUDA driver; where there is none it is given a stand-in for it.

{table}

{total}

**Called from** is the function of SGLang 0.5.21 that needs the module, in the package
`sglang`. *always*: any number of GPUs. *NVLink*: the all-reduce that SGLang compiles is
used only where the GPUs of the group are linked by NVLink and can read each other's memory
(`can_use_custom_all_reduce_v2`, in the file of its callers). A pair of RTX 3090 Ti with the
bridge is such a group; a pair on PCIe alone uses a prebuilt all-reduce or NCCL and loads
the first four.

What a dense Qwen2.5 does not load, although SGLang has a module for it: RMSNorm calls
`sgl_kernel`, which hands it to FlashInfer (its builds lie in FlashInfer's own cache), and
the JIT `rmsnorm_hf` and `fused_add_rmsnorm` serve norms with `cast_x_before_out_mul` only
(`RMSNorm.forward_cuda`); `rotary_embedding` serves heads that are not 64, 128, 256 or 512
wide (`RotaryEmbedding.__init__`); `qknorm` is for later models; the vocabulary's all-gather
(`nvlink_comm`) needs multicast memory and the GEMVs need sm_90. Attention, embedding,
prefill positions, slot allocation and sampling are FlashInfer, Triton or torch.

**The reference.** A real run on two such GPUs left eight manifests, none with a staging
path. By reading, SGLang's default options account for {count} with NVLink and for four
without. Which modules made up the rest there is not known: `--enable-hierarchical-cache`
adds `hicache` modules, a GPTQ or AWQ checkpoint adds `gptq_marlin` and a repacking, and
other options add others. All of them go through the same `load_jit`.
"""


def page(rows: list[dict[str, Any]], cuda: str) -> str:
    """The Markdown page with the table of *rows*, built by the toolkit of release *cuda*."""
    lines = [
        "| module | when | called from | build, s | again, s | dependencies | staging |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        kernel = row["kernel"]
        lines.append(
            f"| `{kernel.name}` | {kernel.when} | `{kernel.caller}` | {row['seconds']:.1f}"
            f" | {row['again']:.2f} | {row['dependencies']} | {row['staging']} |"
        )
    total = (
        f"{len(rows)} manifests, {sum(row['staging'] for row in rows)} staging entries;"
        f" {sum(row['seconds'] for row in rows):.0f} s for the first process,"
        f" {sum(row['again'] for row in rows):.1f} s and"
        f" {sum(row['compiles again'] for row in rows)} compiles for the second."
    )
    return PAGE.format(cuda=cuda, table="\n".join(lines), total=total, count=len(rows))


def main() -> None:
    """Print the page; with ``--load``, load modules in this process."""
    parser = argparse.ArgumentParser(description="Print tests/qwen_kernels.md.")
    parser.add_argument("--load", nargs="+", metavar="MODULE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load)
        return
    print("building the modules, then loading them again: about two minutes", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="qwen-kernels-") as folder:
        print(page(measure(Path(folder)), toolkit_version(cuda_home())), end="")


if __name__ == "__main__":
    main()
