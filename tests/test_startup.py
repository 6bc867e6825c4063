"""What happens at the start of an interpreter that has nothing to do with SGLang."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_jitfix import DEBUG, DISABLE, LEGACY_ROOT, ROOT
from spellings import SPELLINGS, Place, lay_out, value
from support import environment, python

PRINT = "import os; print(os.environ.get('SGLANG_JIT_CACHE_DIR', 'unset'), end='')"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return lay_out(tmp_path.resolve())


def seen(place: Place, given: str | None, shim: str = "on", **extra: str) -> str:
    """The cache root that an interpreter started at *place* with *given* ends up with."""
    env = environment(given, shim, **place.env | extra)
    return python(PRINT, env=env, cwd=place.folder)


def same_directory(place: Place, given: str) -> str:
    """Make the directory as SGLang would for *given*, and return its real path."""
    code = (
        "import os, pathlib, sys\n"
        "root = pathlib.Path(sys.argv[1]).expanduser()\n"
        "root.mkdir(parents=True, exist_ok=True)\n"
        "os.chdir(root)\n"
        "print(os.getcwd(), end='')"  # the kernel's word, not realpath's
    )
    return python(code, given, env=environment(None, "off", **place.env), cwd=place.folder)


@pytest.mark.parametrize("name", SPELLINGS)
def test_root_is_the_real_path_of_the_same_directory(place: Place, name: str) -> None:
    given = value(place, name)
    before = sorted(place.folder.rglob("*"))
    assert seen(place, given, "off") == given
    root = seen(place, given)
    assert sorted(place.folder.rglob("*")) == before, "the shim made something"
    assert root != given
    assert root == same_directory(place, given)
    assert seen(place, root) == root, "a canonical root is left alone"


def test_dangling_link_names_the_directory_it_points_to(place: Place) -> None:
    # SGLang's mkdir refuses such a root, so there is nothing it makes to compare with.
    assert seen(place, "dangling/x") == f"{place.folder}/deep/absent/x"


def test_home_of_a_named_user(place: Place) -> None:
    given = f"~{getpass.getuser()}/sglang-jitfix-test-that-is-not-there/x"
    expected = (Path(given).expanduser()).resolve()
    assert seen(place, given) == str(expected)
    assert not expected.exists()


@pytest.mark.parametrize(
    "given",
    ["~no-such-user-here/cache", "loop", "loop/cache", "absent/../loop", "file/cache", "x" * 5000],
)
def test_what_sglang_cannot_use_is_left_as_it_was(place: Place, given: str) -> None:
    (place.folder / "loop").symlink_to("loop")
    (place.folder / "file").write_text("in the way")
    assert seen(place, given) == given


def test_deleted_working_directory(place: Place) -> None:
    gone = place.folder / "gone"
    gone.mkdir()
    command = f'rmdir "$PWD" && exec "{sys.executable}" -c "{PRINT}"'
    for given, expected in ((".", "."), (f"{place.folder}/link", f"{place.folder}/deep/real")):
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", command], env=environment(given), cwd=gone, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user that does not exist")
def test_no_home_and_no_passwd_entry(place: Place) -> None:
    code = (
        "import os, sglang_jitfix\n"
        "os.environ.pop('HOME'); os.setuid(54321)\n"
        f"os.environ['{ROOT}'] = '~/cache'\n"
        "sglang_jitfix.init()\n"
    )
    assert python(code + PRINT, env=environment(), cwd=place.folder) == "~/cache"


@pytest.mark.parametrize("given", [None, ""])
def test_unset_or_empty_stays_so_where_sglang_is_not_loaded(
    place: Place, given: str | None
) -> None:
    code = "import importlib.util; assert importlib.util.find_spec('sglang')\n" + PRINT
    env = environment(given, **place.env)
    assert python(code, env=env) == ("unset" if given is None else "")


def test_legacy_variable_is_normalised_too(place: Place) -> None:
    code = f"import os; print(os.environ['{LEGACY_ROOT}'], '{ROOT}' in os.environ)"
    env = environment(None, **place.env, **{LEGACY_ROOT: "link"})
    assert python(code, env=env, cwd=place.folder) == f"{place.folder}/deep/real False\n"


@pytest.mark.parametrize("options", [(), ("-I",), ("-E",), ("-O",), ("-X", "dev"), ("-W", "error")])
def test_every_mode_of_the_interpreter_that_reads_pth_files(
    place: Place, options: tuple[str, ...]
) -> None:
    env = environment("link", **place.env)
    root = python(PRINT, env=env, cwd=place.folder, options=options)
    assert root == f"{place.folder}/deep/real"


def test_without_site_nothing_runs(place: Place) -> None:
    env = environment("link", **place.env)
    assert python(PRINT, env=env, cwd=place.folder, options=("-S",)) == "link"


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "anything"])
def test_off_switch(place: Place, value: str) -> None:
    code = PRINT + "; import sys; print('', *[type(f).__module__ for f in sys.meta_path])"
    out = python(code, env=environment("link", **{DISABLE: value}), cwd=place.folder)
    assert out.split()[0] == "link"
    assert "sglang_jitfix" not in out


@pytest.mark.parametrize("value", ["", "0", "false", "No", "N", " off "])
def test_off_switch_that_is_not_set(place: Place, value: str) -> None:
    out = python(PRINT, env=environment("link", **{DISABLE: value}), cwd=place.folder)
    assert out == f"{place.folder}/deep/real"


def test_start_loads_one_module_and_a_second_init_changes_nothing(place: Place) -> None:
    code = (
        "import sys; before = set(sys.modules); path = list(sys.meta_path)\n"
        "import os, sglang_jitfix; env = dict(os.environ)\n"
        "sglang_jitfix.init(); sglang_jitfix.init()\n"
        "assert sys.meta_path == path and dict(os.environ) == env\n"
        "assert set(sys.modules) == before\n"
        "print(*sorted(before))"
    )
    for given in (None, "link", "~/cache"):
        on = python(code, env=environment(given, **place.env), cwd=place.folder).split()
        # The same environment's interpreter with the package out of reach is the measure:
        # -S, then what site does but our file.
        bare = (
            "import os, sys; sys.modules['sglang_jitfix'] = type(sys)('stub')\n"
            "sys.modules['sglang_jitfix'].init = lambda: None\n"
            "import site; site.main(); del sys.modules['sglang_jitfix']\n"
            "print(*sorted(sys.modules))"
        )
        env = environment(given, **place.env)
        off = python(bare, env=env, cwd=place.folder, options=("-S",)).split()
        assert set(on) - set(off) == {"sglang_jitfix"}


def test_debug_is_one_line_an_action_with_the_pid(place: Place) -> None:
    env = environment("link", **place.env, **{DEBUG: "1"})
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        env=env,
        cwd=place.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    first, *others = done.stderr.splitlines()
    pid = done.stdout.strip()
    assert first == f"sglang-jitfix[{pid}]: {ROOT}: 'link' -> '{place.folder}/deep/real'"
    # Before Python 3.13 a virtual environment's .pth files are read twice.
    assert others in ([], [f"sglang-jitfix[{pid}]: {ROOT}: canonical already: {first.split()[-1]}"])


def test_debug_with_stderr_closed(place: Place) -> None:
    command = f'exec "{sys.executable}" -c "{PRINT}" 2>&-'
    env = environment("link", **place.env, **{DEBUG: "1"})
    out = subprocess.run(["sh", "-c", command], env=env, cwd=place.folder, capture_output=True)
    assert out.stdout.decode() == f"{place.folder}/deep/real"


CHILDREN = """
import json, multiprocessing, os, sys
sys.path.insert(0, os.getcwd())
import child_of_test
if __name__ == "__main__":
    os.environ["SGLANG_JIT_CACHE_DIR"] = sys.argv[1]
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            found[method] = pool.apply(child_of_test.root)
    print(json.dumps(found))
"""


def test_children_of_multiprocessing(place: Place) -> None:
    """Set after the start of the parent: a spawned child normalises for itself; a forked one,
    which starts no interpreter, has what its parent has."""
    (place.folder / "child_of_test.py").write_text(
        f"import os\ndef root():\n    return os.environ['{ROOT}']\n"
    )
    script = place.folder / "parent.py"
    script.write_text(CHILDREN)
    real = f"{place.folder}/deep/real"
    for shim, spawned in (("on", real), ("off", "link")):
        done = subprocess.run(
            [sys.executable, str(script), "link"],
            env=environment(None, shim, **place.env),
            cwd=place.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout)
        assert found == {"fork": "link", "spawn": spawned, "forkserver": spawned}
