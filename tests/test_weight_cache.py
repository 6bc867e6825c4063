"""The weight-cache daemon: what its ranks inherit, and engines that reload their weights from it.

The daemon loads none of SGLang's general plugins: a start-up file is what reaches it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

import stack
import support

DAEMON = ["-m", "sglang.srt.weight_cache.daemon"]
ENGINE_WITH_DAEMON = ["-m", "sglang.launch_server", "--weight-cache-mode", "daemon"]

# A stand-in: the daemon serves CUDA devices only (daemon.py, load). This is SGLang's own
# CPU platform with three other answers: it may serve, each device has a name of its own,
# and tensors travel as the name of their shared memory. (As a file descriptor, torch's
# default for CPU tensors, they reach children only.) All between the daemon's socket and
# the engine's parameters is SGLang's.
PLATFORM = """
import torch.multiprocessing
from sglang.srt.platforms.cpu import CpuSRTPlatform


class SharedCpu(CpuSRTPlatform):
    def __init__(self):
        torch.multiprocessing.set_sharing_strategy("file_system")

    def is_cuda_alike(self):
        return True

    def get_device_uuid(self, device_id=0):
        return f"cpu-{device_id}"


def activate():
    return "shared_cpu:SharedCpu"
"""

# The life of one engine. The last line of output is a JSON object: the tokens it gave,
# and the shared memory that its scheduler had mapped.
ENGINE = """
import json
import sys

import psutil
import sglang

arguments, sampling = map(json.loads, sys.argv[1:])
engine = sglang.Engine(**arguments)
reply = engine.generate("hello", sampling)
children = {process.name(): process for process in psutil.Process().children()}
maps = children["sglang::scheduler"].memory_maps(grouped=False)
engine.shutdown()
shared = [each.path for each in maps if each.path.startswith("/dev/shm/")]
print(json.dumps({"tokens": reply["output_ids"], "shared": shared}))
"""


@dataclass
class Daemon:
    """A running daemon of one rank, the folder in which all of its files lie, and the
    environment and arguments that its engines must share."""

    launcher: subprocess.Popen[bytes]
    folder: Path
    env: dict[str, str]
    arguments: dict[str, object]

    @property
    def files(self) -> list[Path]:
        return [self.folder / "cpu-0.sock", self.folder / "cpu-0.ready"]

    @property
    def rank(self) -> psutil.Process:
        [rank] = stack.spawned(psutil.Process(self.launcher.pid))
        return rank

    def identity(self) -> object:
        """Equal to an earlier one if this is the same rank with the same socket."""
        ready = self.files[1].read_text()  # names the pid
        return self.rank, [(file, file.stat().st_ino) for file in self.files], ready

    def weights(self) -> set[str]:
        """The shared memory in which the rank keeps the weights."""
        paths = {each.path for each in self.rank.memory_maps(grouped=False)}
        return {path for path in paths if path.startswith(f"/dev/shm/torch_{self.rank.pid}_")}

    def start_engine(
        self, name: str, root: str, shim: str = "on", **settings: str
    ) -> tuple[subprocess.Popen[bytes], Path, Path]:
        """An engine that takes its weights from here, its log, and the file of its JIT loads."""
        log, loads = self.folder / f"{name}.log", self.folder / f"{name}.loads"
        engine = {**self.arguments, "weight_cache_mode": "client"}
        command = ["-c", ENGINE, json.dumps(engine), json.dumps(stack.GREEDY)]
        env = support.environment(root, shim, **self.env, **{stack.LOADS: str(loads)}, **settings)
        return stack.start(command, log, self.folder, env), log, loads

    def engine_life(self, name: str, **settings: str) -> tuple[list[int], list[int], set[str]]:
        """The compiles of each process of an engine, its tokens, and the weights it mapped."""
        engine, log, loads = self.start_engine(name, "link/jit", **settings)
        try:
            stack.wait_for("the engine's end", lambda: engine.poll() is not None, engine, log)
        finally:
            stack.end(engine)
        assert engine.returncode == 0, stack.text(log)
        report = json.loads(stack.text(log).splitlines()[-1])
        shared = {Path(path).name: path for path in report["shared"]}
        for file, path in shared.items():
            if file.startswith("sglang_loads_"):  # the scheduler's, which is killed, not asked
                Path(path).unlink()
        mapped = {path for file, path in shared.items() if file.startswith("torch_")}
        return [load["compiles"] for load in stack.loads(loads)], report["tokens"], mapped


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, cpu: stack.Cpu) -> Iterator[Daemon]:
    """A daemon that serves CPU weights, started through a linked root."""
    folder = stack.linked(tmp_path_factory.mktemp("daemon"))
    plugins = stack.jit_plugin(
        folder / "plugins",
        "[sglang.srt.platforms]\nshared-cpu = shared_cpu:activate\n",
        shared_cpu=PLATFORM,
    )
    env = {
        **cpu.env,
        "PYTHONPATH": f"{plugins}:{cpu.env['PYTHONPATH']}",
        "SGLANG_WEIGHT_CACHE_SOCKET_TEMPLATE": str(folder / "{device_uuid}.sock"),
        "SGLANG_WEIGHT_CACHE_READY_TEMPLATE": str(folder / "{device_uuid}.ready"),
    }
    command, log = [*DAEMON, *stack.flags(cpu.arguments)], folder / "daemon.log"
    launcher = stack.start(command, log, folder, support.environment("link/jit", **env))
    daemon = Daemon(launcher, folder, env, cpu.arguments)
    try:
        stack.wait_for("the daemon to be ready", daemon.files[1].exists, launcher, log)
        yield daemon
    finally:
        stop(launcher)


def stop(launcher: subprocess.Popen[bytes]) -> None:
    """End a daemon, asking first: a rank then removes its socket, and torch its shared memory."""
    try:
        if launcher.poll() is None:
            process = psutil.Process(launcher.pid)
            tree = process.children(recursive=True)
            for rank in stack.spawned(process):
                rank.terminate()
            psutil.wait_procs(tree, timeout=60)
    finally:
        stack.end(launcher)


def roots_of_both_ranks(launcher: subprocess.Popen[bytes]) -> list[str | None]:
    roots = list(stack.spawned(psutil.Process(launcher.pid)).values())
    return roots if len(roots) == 2 else []


@pytest.mark.parametrize("command", [DAEMON, ENGINE_WITH_DAEMON], ids=["alone", "by the engine"])
def test_ranks_start_with_the_physical_path(
    command: list[str], cpu: stack.Cpu, tmp_path: Path
) -> None:
    command = [*command, *stack.flags({**cpu.arguments, "tp_size": 2})]
    launchers: dict[str, subprocess.Popen[bytes]] = {}
    roots = {}
    stack.linked(tmp_path)
    try:
        for shim in support.SHIM:
            env = support.environment("link/jit", shim, **cpu.env)
            launchers[shim] = stack.start(command, tmp_path / shim, tmp_path, env)
        for shim, launcher in launchers.items():
            started = partial(roots_of_both_ranks, launcher)
            roots[shim] = stack.wait_for("both ranks", started, launcher, tmp_path / shim)
    finally:
        for launcher in launchers.values():
            stack.end(launcher)
    physical = str(tmp_path / "real" / "jit")
    assert roots == {"on": [physical, physical], "off": ["link/jit", "link/jit"]}


def test_engines_reload_from_one_daemon_and_compile_once(daemon: Daemon) -> None:
    root = daemon.folder / "real" / "jit"
    assert daemon.rank.environ()["SGLANG_JIT_CACHE_DIR"] == str(root)
    identity, weights = daemon.identity(), daemon.weights()
    assert weights

    compiles, tokens, mapped = daemon.engine_life("first")
    assert compiles == [1, 0]  # in the process that makes the engine, in its scheduler
    assert len(tokens) == stack.GREEDY["max_new_tokens"]
    assert mapped == weights

    for restart in ("second", "third"):
        assert daemon.engine_life(restart, **stack.FORBID) == ([0, 0], tokens, weights)
        assert daemon.identity() == identity

    assert len(support.manifests(root)) == 1
    assert support.staging_entries(root) == []


def test_without_the_shim_an_engine_compiles_again(daemon: Daemon) -> None:
    root = "link/unfixed"
    engine, log, loads = daemon.start_engine("unfixed", root, "off")
    try:
        stack.wait_for("both JIT loads", lambda: len(stack.loads(loads)) == 2, engine, log)
    finally:
        stack.end(engine)
    assert [load["compiles"] for load in stack.loads(loads)] == [1, 1]
    assert len(support.staging_entries(daemon.folder / "real" / "unfixed")) == 2

    engine, log, loads = daemon.start_engine("unfixed-again", root, "off", **stack.FORBID)
    try:
        stack.wait_for("the engine's end", lambda: engine.poll() is not None, engine, log)
    finally:
        stack.end(engine)
    assert engine.returncode != 0
    [load] = stack.loads(loads)
    assert "forbids compiling" in load["error"]
