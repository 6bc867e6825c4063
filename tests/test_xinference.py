"""Xinference's own fix of the same fault beside the shim: what each makes of a cache root, and
``sglang.Runtime`` with an API key, two ranks and both.

Of Xinference one module is used, which needs nothing else of it: ``prepare_jit_cache`` sets
the root variable; ``create_runtime`` calls that, then makes a Runtime whose constructor
sends its server the key, which SGLang 0.5.21's own does not.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import stack
from sglang_jitfix import LEGACY_ROOT, ROOT
from spellings import SPELLINGS, Place, lay_out, value
from stack import FORBID, Cpu, linked
from support import environment, python, staging_entries

# The wheel, whose module is that of the source distribution: nothing has to be built.
PINNED = (
    "xinference==4.1.0"
    " --hash=sha256:40dd71d79e85a86f85c0d8b435fe51111fcf2c09227350d4a452229709528f2d\n"
)
MODULE = "xinference/model/llm/sglang/runtime.py"


@pytest.fixture(scope="module")
def xinference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with nothing but Xinference's module, as ``xinference_runtime``."""
    folder = tmp_path_factory.mktemp("xinference")
    wanted = tmp_path_factory.mktemp("wanted") / "requirements.txt"
    wanted.write_text(PINNED)
    with tempfile.TemporaryDirectory() as package:
        command = ["uv", "pip", "install", "-q", "--target", package, "--no-deps"]
        command += ["--only-binary", ":all:", "--require-hashes", "-r", wanted.name]
        # Not in the repository, whose constraints have no hashes.
        done = subprocess.run(
            command, cwd=wanted.parent, env=environment(), capture_output=True, text=True
        )
        if re.search("Failed to fetch|No solution found", done.stderr):
            pytest.skip(f"Xinference's wheel cannot be had: {done.stderr}")
        assert done.returncode == 0, done.stderr
        module = Path(package, MODULE).read_text()
    (folder / "xinference_runtime.py").write_text(module)
    return folder


# Of each value that is given: what is left of it after each order of the two, each also once
# more. The shim is its hook of SGLang's import, which does what its start does, and sets the
# default.
ORDERS = f"""
import json, os, sys
import xinference_runtime
from sglang_jitfix.on_sglang_import import environ

def shim():
    environ.run(sys)

def after(value, *steps):
    os.environ.pop("{ROOT}", None)
    if value is not None:
        os.environ["{ROOT}"] = value
    try:
        for step in steps:
            step()
    except OSError as error:
        return type(error).__name__
    return os.environ.get("{ROOT}")

xinference = xinference_runtime.prepare_jit_cache
if "deleted" in sys.argv:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
print(json.dumps([
    [
        after(value, shim),
        after(value, xinference),
        after(value, shim, xinference),
        after(value, xinference, shim),
        after(value, shim, xinference, shim, xinference),
        after(value, xinference, shim, xinference, shim),
    ]
    for value in json.loads(sys.argv[1])
]))
"""


def orders(xinference: Path, place: Place, values: list[str | None], *more: str) -> list[list[str]]:
    """For each of *values*: the variable after the shim, Xinference, the shim then Xinference,
    Xinference then the shim, and both orders twice over. An error's name where one raises it."""
    env = environment(shim="off", PYTHONPATH=str(xinference), **place.env)
    said = python(ORDERS, json.dumps(values), *more, env=env, cwd=place.folder)
    found: list[list[str]] = json.loads(said)
    return found


DOT = "home after a dot"


def test_same_root_for_every_spelling(xinference: Path, tmp_path: Path) -> None:
    """In whichever order, and twice; each but one of those that SGLang accepts, and the default."""
    place = lay_out(tmp_path.resolve())
    given = [value(place, name) for name in SPELLINGS if name != DOT]
    values = [*given, "dangling/x", "", None]
    for before, found in zip(values, orders(xinference, place, values), strict=True):
        assert found == [found[0]] * 6, before
        assert found[0] != before
    assert found == [f"{place.folder}/deep/moved-home/.cache/sglang/jit"] * 6


# The value; what the shim alone, Xinference alone, the shim first and Xinference first make of
# it. In the environment of a model the shim is first: it is there when the interpreter starts.
HOME = "{0}/deep/moved-home/cache"  # as pathlib has it, and so SGLang
DIFFERENCES = {
    DOT: (SPELLINGS[DOT], HOME, "{0}/~/cache", HOME, "{0}/~/cache"),
    **{
        # What SGLang cannot use: the shim leaves it, so that SGLang says so.
        name: (given, given, "{0}/" + given, "{0}/" + given, "{0}/" + given)
        for name, given in {
            "unknown user": "~no-such-user-here/cache",
            "loop of links": "loop/cache",
            "file in the way": "file/cache",
            "name too long": "x" * 300,
        }.items()
    },
}


def test_where_they_differ(xinference: Path, tmp_path: Path) -> None:
    """Both orders twice over are as good as once here as well."""
    place = lay_out(tmp_path.resolve())
    (place.folder / "loop").symlink_to("loop")
    (place.folder / "file").touch()
    expected = [
        [each.replace("{0}", str(place.folder)) for each in row] for row in DIFFERENCES.values()
    ]
    found = orders(xinference, place, [row[0] for row in expected])
    assert found == [[*row[1:], *row[3:]] for row in expected]


def test_deleted_working_directory(xinference: Path, tmp_path: Path) -> None:
    """A relative root is left alone by the shim; Xinference's fix raises. No other is touched."""
    place = lay_out(tmp_path.resolve())
    found = orders(xinference, place, ["here", f"{place.folder}/link"], "deleted")
    error = "FileNotFoundError"
    assert found == [["here", *[error] * 5], [f"{place.folder}/deep/real"] * 6]


def test_legacy_variable(xinference: Path, tmp_path: Path) -> None:
    """SGLang copies it over the new one in each child: only the shim sees to that."""
    folder = linked(tmp_path)
    code = "import os, xinference_runtime\nxinference_runtime.prepare_jit_cache()\n"
    code += f"print(os.environ['{LEGACY_ROOT}'], end='')"
    found = {}
    for shim in ("on", "off"):
        extra = {LEGACY_ROOT: "link", "PYTHONPATH": str(xinference)}
        found[shim] = python(code, env=environment(None, shim, **extra), cwd=folder)
    assert found == {"on": f"{folder}/real", "off": "link"}


# All paths of some parts, with homes to match: `real_root`, which hostile_values.py has
# SGLang itself check, against Xinference. Neither makes anything.
PATHS = f"""
import itertools, os, pathlib
import sglang_jitfix, xinference_runtime
from collections import Counter

starts = ["", "./", ".//.", "/", "//", "///", os.getcwd() + "/", "~/"]
names = [
    "link", "one", "dangling", "loop", "file", "absent", "deep/real", "home", "..", ".", "",
    "~", "~root", "~no-such-user-here", "$HOME", " ", "a\\nb", "n" * 256,
]
homes = [os.environ["HOME"], "link", "~", "", "/", "loop", None]

def xinference(value):
    os.environ["{ROOT}"] = value
    xinference_runtime.prepare_jit_cache()
    return os.environ["{ROOT}"]

seen = Counter()
for home, start, one, two, end in itertools.product(homes, starts, names, names, ["", "/", "/."]):
    value = start + one + "/" + two + end
    if home != homes[0] and "~" not in value:
        continue
    os.environ.pop("HOME", None)
    if home is not None:
        os.environ["HOME"] = home
    ours = sglang_jitfix.real_root(value)
    if ours is None:
        seen["unusable"] += 1
        continue
    plain = str(pathlib.Path(value))  # what SGLang looks at for a home
    assert xinference(plain) == ours, (home, value)
    if plain[0] == "~" != value[0]:
        assert xinference(value) == os.path.realpath(value), (home, value)
        seen["home after a dot"] += 1
    else:
        assert xinference(value) == ours, (home, value)
        seen["agreed"] += 1
print(seen["agreed"], seen["home after a dot"], seen["unusable"])
"""


def test_paths_nobody_would_type(xinference: Path, tmp_path: Path) -> None:
    """Where SGLang can use the value and it is no home after a dot, the two agree."""
    place = lay_out(tmp_path.resolve())
    (place.folder / "loop").symlink_to("loop")
    (place.folder / "file").touch()
    env = environment(shim="off", PYTHONPATH=str(xinference), **place.env)
    counts = python(PATHS, env=env, cwd=place.folder)
    assert min(map(int, counts.split())) > 500, "no kind may dry up"


# One Runtime with a key, made by Xinference; its fix of the cache left out if so told. Prints
# the tokens. SGLang's Runtime sends the key with none of its requests: the server is asked.
LIFE = """
import json, multiprocessing, sys
import requests, sglang, xinference_runtime

arguments, greedy, fix = map(json.loads, sys.argv[1:])
if not fix:
    xinference_runtime.prepare_jit_cache = lambda: None
runtime = xinference_runtime.create_runtime(sglang.Runtime, **arguments)
body = {"text": "hello", "sampling_params": greedy}
assert requests.post(runtime.generate_url, json=body).status_code == 401
key = {"Authorization": f"Bearer {arguments['api_key']}"}
print("tokens", requests.post(runtime.generate_url, json=body, headers=key).json()["output_ids"])
runtime.shutdown()
for server in multiprocessing.active_children():
    server.join()
"""


@contextmanager
def life(
    cpu: Cpu, xinference: Path, folder: Path, name: str, shim: str, fix: bool, **settings: str
) -> Iterator[tuple[stack.Witness, Path]]:
    """A process that runs LIFE in *folder* and ends here, and the file its loads go into."""
    log, loads = folder / f"{name}.log", folder / f"{name}.loads"
    env = environment("link/not/yet", shim, **cpu.plugin, **settings, **{stack.LOADS: str(loads)})
    env["PYTHONPATH"] = f"{xinference}:{env['PYTHONPATH']}"
    more = {"tp_size": 2, "host": "127.0.0.1", "port": stack.free_port(), "api_key": "a secret"}
    words = [json.dumps(each) for each in ({**cpu.arguments, **more}, stack.GREEDY, fix)]
    process = stack.start(["-c", LIFE, *words], log, folder, env)
    try:
        yield stack.Witness(process, log), loads
    finally:
        stack.end(process)


def test_runtime_with_two_ranks_and_a_key(cpu: Cpu, xinference: Path, tmp_path: Path) -> None:
    """Xinference's fix and the shim at once: one compile, and one root for all processes."""
    folder = linked(tmp_path)
    physical = str(folder / "real/not/yet")
    tokens: list[list[int]] = []
    compiles = []
    for name, settings in {"cold": {}, "again": FORBID}.items():
        with life(cpu, xinference, folder, name, "on", True, **settings) as (witness, loads):
            witness.wait(800)
        # A server, two schedulers and a detokenizer.
        assert list(witness.seen.values()) == [physical] * 4
        [line] = re.findall(r"^tokens (.*)$", stack.text(witness.log), re.MULTILINE)
        tokens.append(json.loads(line))
        reports = stack.loads(loads)
        assert {report["given"] for report in reports} == {physical}
        compiles.append([report["compiles"] for report in reports])
    assert compiles == [[1, 0, 0], [0, 0, 0]]
    assert staging_entries(folder / "real") == []
    assert len(tokens[0]) == stack.GREEDY["max_new_tokens"]
    assert tokens[1] == tokens[0]


def test_runtime_with_neither_fix(cpu: Cpu, xinference: Path, tmp_path: Path) -> None:
    """The same Runtime compiles in each process once both are left out."""
    folder = linked(tmp_path)
    with life(cpu, xinference, folder, "cold", "off", False) as (witness, loads):
        assert witness.roots(4) == ["link/not/yet"] * 4
        reports = stack.wait_for_loads(loads, 3, witness.process, witness.log)
    assert [report["compiles"] for report in reports] == [1, 1, 1]
    assert len(staging_entries(folder / "real")) == 3
