"""SGLang's whole stack on the CPU: what it needs besides itself, and the life of its processes.

Real are SGLang, its processes, sockets and compiler. Stand-ins are the CUDA driver
library (one symbol, so that SGLang's kernel library loads without a driver) and the
model (the architecture of Qwen2, two small layers, weights that SGLang itself makes up).
To be quicker the processes do not use torch.compile and collect less garbage: see `cpu`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from sglang_jitfix import ROOT
from sglang_jitfix.cli import probe
from support import run

T = TypeVar("T")

# What a server, Runtime, Engine or weight-cache daemon on the CPU is started with,
# by the names of SGLang's ServerArgs. `model_path` is for the caller to add.
ARGUMENTS: dict[str, object] = {
    "device": "cpu",
    "load_format": "dummy",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "max_total_tokens": 2048,
    "context_length": 256,
    "sleep_on_idle": True,  # an idle rank would take a core from whatever else is starting
}

GREEDY = {"temperature": 0, "max_new_tokens": 16}

FORBID = {"SGLANG_CRASH_ON_JIT_COMPILE": "1"}

# Where the processes report the module that they have loaded: see `loads`.
LOADS = "STACK_LOADS"

# Looking for garbage takes a sixth of the time in which a process imports SGLang.
SITECUSTOMIZE = "import gc\n\ngc.set_threshold(100_000)\n"

# SGLang calls `load` once in each launcher and in each scheduler rank. A real kernel
# that is not there ends the process that wanted it, and so does this one: SGLang
# itself goes on after a plugin's Exception, hence SystemExit.
JIT = """
import contextlib
import io
import json
import os
import pathlib

from sglang_jitfix.cli import probe


def load():
    from sglang.kernels.jit.utils.compile import cache

    report = {
        "pid": os.getpid(),
        "given": os.environ.get("SGLANG_JIT_CACHE_DIR"),
        "existed": cache.cache_root().exists(),
    }
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            probe.main(str(pathlib.Path(__file__).with_name("probe.cpp")))
        report.update(json.loads(printed.getvalue().splitlines()[-1]))
    except Exception as error:
        report["error"] = str(error)
    with open(os.environ["STACK_LOADS"], "a") as file:
        file.write(json.dumps(report) + "\\n")
    if "error" in report:
        raise SystemExit(report["error"])
"""


@dataclass(frozen=True)
class Cpu:
    """What every launch on the CPU shares."""

    env: dict[str, str]  # see `cpu`
    plugin: dict[str, str]  # the same, to have the JIT module loaded; wants `LOADS` set
    arguments: dict[str, object]  # as in ServerArgs


def lay_out(folder: Path) -> Cpu:
    """Make in *folder*, which exists, all that a `Cpu` refers to."""
    env = cpu(folder)
    path = f"{jit_plugin(folder / 'plugin')}:{env['PYTHONPATH']}"
    return Cpu(
        env,
        {**env, "PYTHONPATH": path},
        {**ARGUMENTS, "model_path": str(model(folder / "model"))},
    )


def linked(folder: Path) -> Path:
    """Make in *folder*, which may exist, a link ``link`` to ``real``; its canonical path."""
    (folder / "real").mkdir(parents=True)
    (folder / "link").symlink_to("real")
    return folder.resolve()


def libcuda(folder: Path) -> Path:
    """Build the stand-in for the CUDA driver library in *folder*, which is made; *folder*.

    For LD_LIBRARY_PATH. Its one function says that no pointer is one of the GPU's.
    """
    folder.mkdir(parents=True)
    source = folder / "cuda.c"
    source.write_text(
        "int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer)"
        " { return 100; /* CUDA_ERROR_NO_DEVICE */ }\n"
    )
    library = folder / "libcuda.so.1"
    run("cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source)
    return folder


def model(folder: Path) -> Path:
    """Write a tiny Qwen2 in *folder*, which is made: configuration and tokenizer; *folder*.

    A token is one printable ASCII character. The weights are made up by SGLang
    (``load_format`` "dummy"), the same ones at each start.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    vocabulary = {chr(code): number for number, code in enumerate(range(32, 127))}
    unknown, end = "<unk>", "<eos>"
    vocabulary |= {unknown: len(vocabulary), end: len(vocabulary) + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "unk_token": unknown,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eos_token_id": vocabulary[end],
        "bos_token_id": vocabulary[end],
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def distribution(folder: Path, name: str, entry_points: str, **modules: str) -> Path:
    """Lay out an installed distribution in *folder*, to be put on PYTHONPATH; *folder*.

    *entry_points* is the text of its ``entry_points.txt``, *modules* its modules'
    source by their names.
    """
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return folder


def jit_plugin(folder: Path, more_entry_points: str = "", **modules: str) -> Path:
    """The distribution that makes each launcher and each rank load one JIT module; *folder*.

    For PYTHONPATH, with the environment variable ``LOADS`` naming a file: see `loads`.
    Other entry points and modules may go with it.
    """
    entry_points = f"[sglang.srt.plugins]\nstack = stack_jit:load\n{more_entry_points}"
    distribution(folder, "stack-jit", entry_points, stack_jit=JIT, **modules)
    (folder / "probe.cpp").write_text(probe.SOURCE)
    return folder


def loads(file: Path) -> list[dict[str, Any]]:
    """What the processes have reported into *file* so far, in the order of their loads.

    Each: ``pid``; ``given``, the cache-root variable in that process; ``existed``, whether
    the root did before the load; then either ``error`` or what `probe` reports.
    """
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cpu(folder: Path) -> dict[str, str]:
    """The environment variables that all of SGLang's processes need here; for `environment`.

    The driver library is built in *folder*. Temporary files land in there, sockets among
    them, so its path should be short, and so does what is kept in a home.
    """
    cores = sorted(os.sched_getaffinity(0))
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    home = folder / "home"
    home.mkdir()
    start = folder / "start"
    start.mkdir()
    (start / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {
        "PYTHONPATH": str(start),
        "LD_LIBRARY_PATH": str(libcuda(folder / "libcuda")),
        "SGLANG_USE_CPU_ENGINE": "1",
        # Ranks talk by gloo; NCCL does not load without a GPU.
        "SGLANG_NCCL_SO_PATH": str(folder / "no-nccl"),
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        # Some of SGLang's helpers are compiled by torch, at each first use in a new home.
        "TORCH_COMPILE_DISABLE": "1",
        # Of the 200 models, which every rank imports before it looks for its own.
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models()),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
        "TMPDIR": str(temporary),
    }


def other_models() -> list[str]:
    """The names of SGLang's model modules, less that of `model`."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0], "srt", "models")
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "qwen2")


def flags(arguments: Mapping[str, object]) -> list[str]:
    """*arguments*, named as in ServerArgs, as words of a command line."""
    words = []
    for name, value in arguments.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words


def free_port() -> int:
    """A TCP port of the loopback interface on which nothing listens now.

    Below the ports that Linux gives away by itself, so that it stays free, and below
    40000, for the sake of `sglang.Runtime`.
    """
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def start(
    command: Sequence[str], log: Path, cwd: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A Python with the arguments *command*, its output in *log*; to be ended with `end`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # by which `end` finds orphans
        )


def wait_for(
    what: str,
    answer: Callable[[], T],
    process: subprocess.Popen[bytes],
    log: Path,
    seconds: float = 600,
) -> T:
    """The first true *answer*. AssertionError, with *log* and *what* was waited for, if
    *process* ends before it or after so many *seconds*."""
    deadline = time.monotonic() + seconds
    while not (got := answer()):
        if process.poll() is not None and not (got := answer()):
            raise AssertionError(f"ended, waiting for {what}: {text(log)}")
        assert time.monotonic() < deadline, f"waited in vain for {what}: {text(log)}"
        time.sleep(0.05)
    return got


def wait_for_loads(
    file: Path, count: int, process: subprocess.Popen[bytes], log: Path
) -> list[dict[str, Any]]:
    """What *file* holds (see `loads`) once *count* processes have loaded the module."""

    def enough() -> list[dict[str, Any]]:
        reports = loads(file)
        return reports if len(reports) >= count else []

    return wait_for(f"{count} loads", enough, process, log)


def text(log: Path) -> str:
    """What *log* holds so far."""
    return log.read_text(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill *process*, which `start` started, and all that came of it; wait until they are gone.

    AssertionError if one stays. multiprocessing's resource trackers end by themselves
    when the others are gone, and remove what those had in shared memory.
    """
    others = [each for each in family(process) if not is_tracker(each)]
    for each in others:
        try:
            each.suspend()  # so that none starts another meanwhile
        except psutil.NoSuchProcess:
            pass
    others = [each for each in family(process) if not is_tracker(each)]
    trackers = [each for each in family(process) if is_tracker(each)]
    for each in others:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()
    alive = [*others, *trackers]
    deadline = time.monotonic() + 60
    while (alive := [each for each in alive if not is_gone(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for each in alive:
        each.kill()
    assert not alive, f"did not end: {alive}"


def is_gone(process: psutil.Process) -> bool:
    """Whether *process* has ended, though its parent (in a container, whoever is the first
    process) may never ask for its exit status."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_tracker(process: psutil.Process) -> bool:
    """Whether *process* is one of multiprocessing's resource trackers."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def load_snapshots() -> set[Path]:
    """This user's load snapshots of SGLang in shared memory.

    One is left behind whenever a scheduler is killed, as SGLang's own shutdown does it.
    """
    found = set()
    for path in Path("/dev/shm").glob("sglang_loads_*.shm"):
        try:
            if path.stat().st_uid == os.geteuid():
                found.add(path)
        except FileNotFoundError:  # its owner has removed it meanwhile
            pass
    return found


def remove_load_snapshots(besides: set[Path]) -> None:
    """Remove the load snapshots that no process has mapped, *besides* excepted."""
    mapped = set()
    for process in psutil.process_iter():
        try:
            mapped |= {Path(entry.path) for entry in process.memory_maps()}
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # another user's
            pass
    for snapshot in load_snapshots() - besides - mapped:
        snapshot.unlink(missing_ok=True)


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """*process*, its descendants, and the orphans among those that it started."""
    found = set()
    if process.poll() is None:  # otherwise its pid may be another's by now
        leader = psutil.Process(process.pid)
        found |= {leader, *leader.children(recursive=True)}
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == process.pid != each.pid:
                found.add(each)
        except (psutil.NoSuchProcess, ProcessLookupError):
            pass
    return list(found)


def spawned(process: psutil.Process, recursive: bool = False) -> dict[psutil.Process, str | None]:
    """The living children of *process* that multiprocessing has spawned (with *recursive*, their
    children as well) and the cache root that each was started with, None if unset.

    Look while they are starting: SGLang's processes rename themselves once they have
    imported SGLang, and that overwrites the memory in which the system keeps this.
    """
    found = {}
    for child in process.children(recursive=recursive):
        try:
            command = child.cmdline()
            # Before its exec a child still has its parent's command and environment.
            if any("spawn_main(" in word for word in command):
                parent = child.parent()
                if parent is None or parent.cmdline() == command:
                    continue
                environ = child.environ()
                if child.cmdline() == command:
                    found[child] = environ.get(ROOT)
        except psutil.NoSuchProcess:
            pass
    return found


class Witness:
    """Remembers what each process that multiprocessing spawns below *process* was started with."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.seen: dict[psutil.Process, str | None] = {}

    def look(self) -> None:
        """Take note of the processes that are new; to be called while they are starting."""
        try:
            new = spawned(psutil.Process(self.process.pid), recursive=True)
        except psutil.NoSuchProcess:
            return
        self.seen = {**new, **self.seen}

    def roots(self, count: int) -> list[str | None]:
        """The cache roots that the first processes were started with, *count* of them at least."""

        def enough() -> bool:
            self.look()
            return len(self.seen) >= count

        wait_for(f"{count} child processes", enough, self.process, self.log)
        return list(self.seen.values())

    def wait(self, seconds: float) -> None:
        """Look on until the process ends; AssertionError if its exit status is not 0, or after
        so many *seconds*."""

        def ended() -> bool:
            self.look()
            return self.process.poll() is not None

        wait_for(f"the end of process {self.process.pid}", ended, self.process, self.log, seconds)
        assert self.process.returncode == 0, text(self.log)


def post(url: str, body: object, key: str | None = None) -> tuple[int, Any]:
    """The status and the decoded JSON of the answer of *url* to *body*, sent with the API *key*."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    # No proxy: the server is on the loopback interface.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


class Server:
    """A ``python -m sglang.launch_server`` on the loopback interface; a context manager."""

    def __init__(
        self,
        arguments: Mapping[str, object],
        log: Path,
        cwd: Path,
        env: Mapping[str, str],
        key: str | None = None,
    ) -> None:
        """Start it: *arguments* as in ServerArgs, its output in *log*, *key* the API key."""
        self.log = log
        self.key = key
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        mine: dict[str, object] = {"host": "127.0.0.1", "port": port}
        if key is not None:
            mine["api_key"] = key
        command = ["-m", "sglang.launch_server", *flags({**arguments, **mine})]
        self.process = start(command, log, cwd, env)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        end(self.process)

    def wait_until_up(self) -> None:
        """Wait until it has answered its own warm-up request; AssertionError if it ends instead."""

        def up() -> bool:
            return "The server is fired up and ready to roll!" in text(self.log)

        wait_for("the server to be up", up, self.process, self.log)

    def generate(self, prompt: str = "hello", key: str | None = None) -> tuple[int, list[int]]:
        """The status of a greedy ``/generate`` request sent with *key*, and the tokens it gave."""
        status, answer = post(
            f"{self.url}/generate", {"text": prompt, "sampling_params": GREEDY}, key
        )
        return status, answer.get("output_ids", [])
