"""What happens at the start of an interpreter: the wheel in fresh environments of each CPython."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import Fresh
from sglang_jitfix import DEBUG, DISABLE, LEGACY_ROOT, ROOT
from spellings import SPELLINGS, Place, lay_out, value
from support import OFF, environment, python

PRINT = "import os; print(os.environ.get('SGLANG_JIT_CACHE_DIR', 'unset'), end='')"


@dataclass(frozen=True)
class Start:
    """Interpreters of a fresh environment, started in a folder full of links."""

    fresh: Fresh
    place: Place

    def env(self, given: str | None = None, **extra: str) -> dict[str, str]:
        return environment(given, **self.place.env | extra)

    def run(self, code: str, given: str | None = None, *options: str, **extra: str) -> str:
        """What *code* prints with *given* as cache root."""
        executable = self.fresh.with_shim
        env = self.env(given, **extra)
        return python(code, env=env, cwd=self.folder, executable=executable, options=options)

    def root(self, given: str | None = None, *options: str, **extra: str) -> str:
        """The cache root once the interpreter has started with *given*."""
        return self.run(PRINT, given, *options, **extra)

    def shell(self, command: str, given: str, cwd: Path, **extra: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a shell *command* in which $PYTHON is ours."""
        env = self.env(given, PYTHON=str(self.fresh.with_shim), **extra)
        done = subprocess.run(["sh", "-c", command], env=env, cwd=cwd, capture_output=True)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    @property
    def folder(self) -> Path:
        return self.place.folder

    @property
    def real(self) -> str:
        """What the link in the folder points to."""
        return f"{self.folder}/deep/real"


@pytest.fixture
def start(fresh: Fresh, tmp_path: Path) -> Start:
    return Start(fresh, lay_out(tmp_path.resolve()))


MAKE = """
import os, pathlib, sys
root = pathlib.Path(sys.argv[1]).expanduser()  # SGLang's cache_root(), and its mkdir
root.mkdir(parents=True, exist_ok=True)
os.chdir(root)
print(os.getcwd(), end="")  # the kernel's word, not realpath's
"""


@pytest.mark.parametrize("name", SPELLINGS)
def test_root_is_the_real_path_of_the_same_directory(start: Start, name: str) -> None:
    given = value(start.place, name)
    before = sorted(start.folder.rglob("*"))
    assert start.root(given, **OFF) == given
    root = start.root(given)
    assert sorted(start.folder.rglob("*")) == before, "the shim made something"
    assert root != given
    env = start.env(None, **OFF)
    assert root == python(MAKE, given, env=env, cwd=start.folder)
    assert start.root(given) == root, "as before, now that it is there"
    assert start.root(root) == root, "a canonical root is left alone"


def test_dangling_link_names_the_directory_it_points_to(start: Start) -> None:
    # SGLang's mkdir refuses such a root, so there is nothing it makes to compare with.
    root = start.root("dangling/x")
    assert root == f"{start.folder}/deep/absent/x"
    Path(root).mkdir(parents=True)
    assert start.root("dangling/x") == root


def test_home_of_a_named_user(start: Start) -> None:
    given = f"~{getpass.getuser()}/sglang-jitfix-test-that-is-not-there/x"
    expected = Path(given).expanduser().resolve()
    assert start.root(given) == str(expected)
    assert not expected.exists()


@pytest.mark.parametrize(
    "given",
    ["~no-such-user-here/cache", "loop", "loop/cache", "absent/../loop", "file/cache", "x" * 5000],
)
def test_what_sglang_cannot_use_is_left_as_it_was(start: Start, given: str) -> None:
    (start.folder / "loop").symlink_to("loop")
    (start.folder / "file").write_text("in the way")
    assert start.root(given) == given


def test_deleted_working_directory(start: Start) -> None:
    for given, expected in ((".", "."), (f"{start.folder}/link", start.real)):
        gone = start.folder / "gone"
        gone.mkdir()
        command = f'rmdir "$PWD" && exec "$PYTHON" -c "{PRINT}"'
        assert start.shell(command, given, gone) == (0, expected, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a name")
def test_no_home_and_no_passwd_entry(start: Start) -> None:
    code = (
        "import os, sglang_jitfix\n"
        "os.environ.pop('HOME'); os.setuid(54321)\n"
        f"os.environ['{ROOT}'] = '~/cache'\n"
        "sglang_jitfix.normalise_environment()\n"
    )
    assert start.run(code + PRINT) == "~/cache"


def test_unset_or_empty_stays_so_without_sglang(start: Start) -> None:
    assert start.root(None) == "unset"
    assert start.root("") == ""


@pytest.mark.parametrize("given", [None, ""])
def test_looking_for_sglang_sets_nothing(given: str | None) -> None:
    code = "import importlib.util, sys; assert importlib.util.find_spec('sglang')\n"
    code += "assert 'sglang' not in sys.modules\n"
    assert python(code + PRINT, env=environment(given)) == ("unset" if given is None else "")


def test_legacy_variable_is_normalised_too(start: Start) -> None:
    code = f"import os; print(os.environ['{LEGACY_ROOT}'], '{ROOT}' in os.environ)"
    assert start.run(code, **{LEGACY_ROOT: "link"}) == f"{start.real} False\n"


MODES = ["-I", "-E", "-s", "-O", "-OO", "-B", "-Xdev", "-Werror", "-Xfrozen_modules=off"]


@pytest.mark.parametrize("option", MODES)
def test_modes_in_which_the_shim_runs(start: Start, option: str) -> None:
    assert start.root("link", option) == start.real


def test_without_site_nothing_runs(start: Start) -> None:
    assert start.root("link", "-S") == "link"


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "anything"])
def test_off_switch(start: Start, value: str) -> None:
    code = PRINT + "; import sys; print('', *[type(f).__module__ for f in sys.meta_path])"
    root, *finders = start.run(code, "link", **{DISABLE: value}).split()
    assert root == "link"
    assert "sglang_jitfix" not in finders


@pytest.mark.parametrize("value", ["", "0", "false", "No", "N", " off "])
def test_off_switch_that_is_not_set(start: Start, value: str) -> None:
    assert start.root("link", **{DISABLE: value}) == start.real


def test_start_loads_one_module(start: Start) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    for given in (None, "link", "~/cache"):
        with_shim = start.run(code, given).split()
        bare = python(code, env=start.env(given), cwd=start.folder, executable=start.fresh.bare)
        assert set(with_shim) - set(bare.split()) == {"sglang_jitfix"}


def test_second_init_changes_nothing(start: Start) -> None:
    code = (
        "import os, sys, sglang_jitfix\n"
        "def state(): return list(sys.modules), list(sys.meta_path), dict(os.environ)\n"
        "before = state()\n"
        "sglang_jitfix.init(); sglang_jitfix.init()\n"
        "assert state() == before\n"
        "print([type(finder).__name__ for finder in sys.meta_path].count('Finder'))"
    )
    assert start.run(code, "link") == "1\n"


def test_debug_is_one_line_an_action_with_the_pid(start: Start) -> None:
    command = '"$PYTHON" -c "import os; print(os.getpid())"'
    status, out, err = start.shell(command, "link", start.folder, **{DEBUG: "1"})
    assert (status, err) == (
        0,
        f"sglang-jitfix[{out.strip()}]: {ROOT}: 'link' -> '{start.real}'\n",
    )


def test_debug_with_stderr_closed_writes_nowhere(start: Start) -> None:
    command = f'exec "$PYTHON" -c "{PRINT}" 2>&-'
    assert start.shell(command, "link", start.folder, **{DEBUG: "1"})[1] == start.real


CHILDREN = """
import json, multiprocessing, os, sys

def root():
    return os.environ["SGLANG_JIT_CACHE_DIR"]

if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["SGLANG_JIT_CACHE_DIR"] = sys.argv[1]
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            found[method] = pool.apply(root)
    print(json.dumps(found))
"""


def test_children_of_multiprocessing(start: Start) -> None:
    """A spawned child starts an interpreter of its own; a forked one has what its parent has."""
    script = start.folder / "parent.py"
    script.write_text(CHILDREN)
    run_it = f'"$PYTHON" {script}'
    for command, extra, expected in (
        (run_it, {}, {"fork": start.real, "spawn": start.real, "forkserver": start.real}),
        (run_it, OFF, {"fork": "link", "spawn": "link", "forkserver": "link"}),
        # Set by the program, too late for the parent's start.
        (f"{run_it} link", {}, {"fork": "link", "spawn": start.real, "forkserver": start.real}),
    ):
        status, out, err = start.shell(command, "link", start.folder, **extra)
        assert status == 0, err
        assert json.loads(out) == expected
