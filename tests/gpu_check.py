"""On a GPU: two of SGLang's kernels through a linked cache root, against torch.

``python tests/gpu_check.py``, with an interpreter that has SGLang, torch and the shim, and
nvcc on PATH. No network, at most five minutes. Each line is one finding; the exit status
is 0 if all are good, 1 if one is not, 77 if there is no CUDA device.

``--without-device`` does all of it but the run on the device, for sm_86.

For a machine that has torch and nvcc but neither SGLang nor a network, collect 50 MB of
wheels for its Python where there is one, and install them there beside torch::

    pip download --no-deps -d wheels -r tests/gpu_requirements.txt  # --python-version 3.x
    python -m hatchling build -t wheel -d "$PWD/wheels"
    pip install --no-index --no-deps wheels/*.whl                   # on the other machine
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sglang_jitfix
from qwen_kernels import (
    ARCHITECTURE,
    FORBID,
    cuda_home,
    linked_root,
    toolkit_version,
    watch_builds,
)
from sglang_jitfix import releases
from support import environment, manifests, staging_entries

NO_DEVICE = 77  # automake's exit status of a test that is skipped
LIMIT = 290.0  # seconds for the whole check
ROWS, WIDTH, EPSILON = 512, 4096, 1e-6
TOLERANCE = 0.01  # bfloat16 keeps 8 bits: rounding alone is up to 0.004
KERNELS = ("silu_and_mul", "rmsnorm")


def run_kernel(name: str) -> float:
    """Run the kernel *name* on the device; its largest error against torch in float32,
    relative to 1 + the value."""
    import torch

    torch.manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    # Not a number everywhere, so that what the kernel leaves out cannot pass.
    got = torch.full((ROWS, WIDTH), torch.nan, device="cuda", dtype=torch.bfloat16)
    if name == "silu_and_mul":
        from sglang.kernels.ops.activation.activation import silu_and_mul

        x = random(ROWS, 2 * WIDTH)
        silu_and_mul(x, got)
        gate, up = x.float().chunk(2, dim=-1)
        want = torch.nn.functional.silu(gate) * up
    else:
        from sglang.kernels.ops.layernorm.norm import rmsnorm

        x, weight = random(ROWS, WIDTH), random(WIDTH)
        rmsnorm(x, weight, got, EPSILON)
        mean = x.float().square().mean(dim=-1, keepdim=True)
        want = x.float() * torch.rsqrt(mean + EPSILON) * weight.float()
    return float(((got.float() - want).abs() / (1 + want.abs())).max())


def only_load(name: str) -> None:
    """Load the module of the kernel *name*, for an RTX 3090 Ti, and run nothing."""
    import torch
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.layernorm.norm import _jit_rmsnorm_module

    with override_jit_cuda_arch(*ARCHITECTURE):
        if name == "silu_and_mul":
            activation_module(torch.bfloat16)
        else:
            _jit_rmsnorm_module(WIDTH, torch.bfloat16)


def work(names: list[str], without_device: bool) -> None:
    """In a process of its own: load and run the kernels *names*, print one JSON object."""
    built = watch_builds()
    report = {}
    for name in names:
        start = time.perf_counter()
        error = None
        if without_device:
            only_load(name)
        else:
            error = run_kernel(name)
        seconds = time.perf_counter() - start
        report[name] = {"compiles": len(built), "seconds": seconds, "error": error}
        built.clear()
    print(json.dumps(report))


class Check:
    """One run of the whole check."""

    def __init__(self, without_device: bool) -> None:
        self.options = ["--without-device"] if without_device else []
        self.end = time.monotonic() + LIMIT
        self.failed = False

    def say(self, good: bool, finding: str) -> None:
        """Print one finding."""
        self.failed = self.failed or not good
        print("ok  " if good else "FAIL", finding, flush=True)

    def start(self, env: dict[str, str], *names: str) -> tuple[dict[str, Any], str]:
        """The report of a fresh process that runs the kernels *names*, or {} and why not."""
        command = [sys.executable, __file__, *self.options, "--work", *names]
        seconds = max(1.0, self.end - time.monotonic())
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {}, f"not done after {LIMIT:.0f} s in all"
        if done.returncode != 0:
            return {}, (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report, ""

    def two_processes(self, folder: Path, home: str) -> None:
        """With the shim: the first process compiles, the second does not."""
        spelled, root = linked_root(folder)
        env = environment(spelled, CUDA_HOME=home)
        for process, compiles, more in (("first", 1, {}), ("second", 0, FORBID)):
            report, why = self.start({**env, **more}, *KERNELS)
            for name in KERNELS:
                if name not in report:
                    self.say(False, f"{process} process, {name}: {why}")
                    continue
                one = report[name]
                finding = f"{one['compiles']} compiles, {one['seconds']:.2f} s"
                good = one["compiles"] == compiles
                if one["error"] is not None:
                    finding += f", error {one['error']:.4f} of {TOLERANCE}"
                    good = good and one["error"] <= TOLERANCE  # false for not a number
                self.say(good, f"{process} process, {name}: {finding}")
        count, staging = len(manifests(root)), len(staging_entries(root))
        self.say(
            (count, staging) == (len(KERNELS), 0), f"{count} manifests, {staging} staging entries"
        )

    def without_shim(self, folder: Path, home: str) -> None:
        """Without it the second process would have to compile: the check can fail."""
        spelled, root = linked_root(folder)
        env = environment(spelled, "off", CUDA_HOME=home)
        report, why = self.start(env, KERNELS[-1])
        self.say(bool(report), f"shim off, first process: {why or 'compiled'}")
        report, why = self.start({**env, **FORBID}, KERNELS[-1])
        self.say(
            "forbids compiling" in why and len(staging_entries(root)) == 1,
            "shim off, second process: " + ("hits" if report else "has to compile"),
        )


def device_exists() -> bool:
    """Whether this machine has a CUDA device, whether or not torch can use it."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()  # or in WSL


@contextlib.contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """Two temporary folders."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for name in ("on", "off"):
            Path(folder, name).mkdir()
        yield Path(folder, "on"), Path(folder, "off")


def main() -> int:
    """Run the check; its exit status."""
    parser = argparse.ArgumentParser(description="Check SGLang's JIT cache on a GPU.")
    parser.add_argument("--without-device", action="store_true", help="build, but run nothing")
    parser.add_argument("--work", nargs="+", metavar="KERNEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.without_device)
        return 0

    check = Check(arguments.without_device)
    if not arguments.without_device:
        import torch

        if not torch.cuda.is_available():
            if not device_exists():
                print("no CUDA device on this machine")
                return NO_DEVICE
            check.say(False, f"there is a CUDA device, but torch {torch.__version__} cannot use it")
            return 1
        major, minor = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        check.say(True, f"{name}, sm_{major}{minor}, torch {torch.__version__}")
    try:
        home = cuda_home()
    except RuntimeError as error:
        check.say(False, str(error))
        return 1
    check.say(True, f"nvcc {toolkit_version(home)}, SGLang {releases.installed()}")
    check.say(bool(sglang_jitfix.found_at_start), "the shim's start-up file ran")
    with folders() as (on, off):
        check.two_processes(on, home)
        check.without_shim(off, home)
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
