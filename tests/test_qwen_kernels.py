"""The CUDA modules of a dense Qwen2.5: built by the real nvcc, found again by a new process."""

from __future__ import annotations

import ast
import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

import qwen_kernels
from qwen_kernels import FORBID, KERNELS, Kernel
from support import environment, manifests, staging_entries

SGLANG = Path(str(distribution("sglang").locate_file("sglang")))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `python tests/qwen_kernels.py` measures."""
    return qwen_kernels.measure(tmp_path_factory.mktemp("kernels"))


def test_every_module_is_built_once_and_then_found(rows: list[dict[str, Any]]) -> None:
    assert [row["kernel"] for row in rows] == list(KERNELS)
    assert [row["compiles again"] for row in rows] == [0] * len(KERNELS)
    assert [row["staging"] for row in rows] == [0] * len(KERNELS)
    assert min(row["dependencies"] for row in rows) > 1, "the manifests are there but empty"


def test_with_the_shim_off_the_second_process_would_compile(tmp_path: Path) -> None:
    spelled, root = qwen_kernels.linked_root(tmp_path)
    env = environment(spelled, "off", CUDA_HOME=qwen_kernels.cuda_home())
    qwen_kernels.load_in_fresh_process(env, ["clamp_position"])
    with pytest.raises(subprocess.CalledProcessError) as failed:
        qwen_kernels.load_in_fresh_process({**env, **FORBID}, ["clamp_position"])
    assert "SGLANG_CRASH_ON_JIT_COMPILE forbids compiling" in failed.value.stderr
    assert len(manifests(root)) == 1
    assert len(staging_entries(root)) == 1


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_sglang_calls_it_from_there(kernel: Kernel) -> None:
    caller_file, caller = kernel.caller.split(":")
    file, operation = kernel.operation.split(":")
    called = Names(SGLANG / caller_file)
    module = "sglang." + file.removesuffix(".py").replace("/", ".")
    assert called.imported[module, operation] in called.reached_from(caller)

    loader_file, loader = kernel.loader.split(":")
    assert loader_file == file
    names = Names(SGLANG / file)
    assert loader in names.reached_from(operation)
    assert "load_jit" in names.reached_from(loader)
    assert kernel.name in names.texts[loader]


class Names:
    """Which names the definitions of one Python file mention."""

    def __init__(self, path: Path) -> None:
        self.mentioned: dict[str, set[str]] = {}
        self.texts: dict[str, set[str]] = {}
        self.imported: dict[tuple[str | None, str], str] = {}
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imported[node.module, alias.name] = alias.asname or alias.name
            elif isinstance(node, ast.ClassDef):
                self._add(node.name, node)
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        self._add(f"{node.name}.{inner.name}", inner)
            elif isinstance(node, ast.FunctionDef):
                self._add(node.name, node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._add(node.targets[0].id, node)

    def _add(self, name: str, node: ast.AST) -> None:
        below = list(ast.walk(node))
        names = {inner.id for inner in below if isinstance(inner, ast.Name)}
        self.mentioned.setdefault(name, set()).update(names)
        texts = {inner.value for inner in below if isinstance(inner, ast.Constant)}
        self.texts.setdefault(name, set()).update(one for one in texts if isinstance(one, str))

    def reached_from(self, start: str) -> set[str]:
        """The names that *start* mentions, what those mention, and so on within the file."""
        found: set[str] = set()
        ahead = {start}
        while ahead:
            found |= ahead
            ahead = set().union(*(self.mentioned.get(name, set()) for name in ahead)) - found
        return found


def test_the_page_lists_these_modules() -> None:
    page = Path(qwen_kernels.__file__).with_suffix(".md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (\w+) \| `(\S+)` \|.* (\d+) \|$", page, re.MULTILINE)
    assert found == [(kernel.name, kernel.when, kernel.caller, "0") for kernel in KERNELS]


def test_a_machine_without_nvcc_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/var/empty")
    with pytest.raises(RuntimeError, match="no nvcc: install the CUDA toolkit"):
        qwen_kernels.cuda_home()
