"""What a leaf tells of the build that made it, and where one made here would differ; pure text.

As SGLang 0.5.18 to 0.5.23 writes it: ``build.ninja`` by ``ninja.generate``, the units by
``_wrapper_source`` (spec.py). A module of ``header_only=False`` has no units, and its build
file names the sources.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_jitfix import leaves

Difference = dict[str, str | None]

FLAGS = ("cxxflags", "cudaflags", "ldflags")
KINDS = {"-I": "include path", "-L": "library path"}
# load_jit's own, under SGLANG_JIT_LOG_RESOURCE_USAGE; no kernel asks for it.
REPORT_FLAG = "-Xptxas=-v"
COMPILED = re.compile(r"^build \S+: compile_\w+ (.*)$", re.MULTILINE)
SOURCE = re.compile(r'^#include "(.*)"$', re.MULTILINE)
EXPORT = re.compile(r"^TVM_FFI_DLL_EXPORT_TYPED_FUNC\((.*?), \((.*)\)\);$", re.MULTILINE)
# Where a package is installed, as the include path of its headers tells.
INSTALLED = re.compile(r"(/.*)(/sglang/kernels/jit|/tvm_ffi)/include")


class Build(NamedTuple):
    """The text of a build file, and that of the units which it names, by their names."""

    file: str
    units: Mapping[str, str]

    def value(self, variable: str) -> str:
        """What the build file assigns to *variable*; empty if nothing."""
        match = re.search(rf"^{variable} = (.*)$", self.file, re.MULTILINE)
        return match[1] if match else ""

    def words(self, variable: str) -> list[str]:
        """That value as the compiler gets it; raises ValueError for a quote that is not closed."""
        return shlex.split(self.value(variable).replace("$$", "$"))

    def word(self, variable: str) -> str:
        """The first of them."""
        return (self.words(variable) or [""])[0]

    @property
    def cuda_home(self) -> str:
        """The toolkit's root as it was spelled (``toolchain.py``).

        It shows in ``nvcc = <root>/bin/nvcc``, where a trailing slash is lost, and in
        ``-L<root>/lib64`` of modules with CUDA code, where it is not.
        """
        home = self.word("nvcc").removesuffix("/bin/nvcc")
        with_slash = f"-L{quoted(f'{home}//lib64')}" in self.value("ldflags").split(" ")
        return f"{home}/" if with_slash else home

    def request(self) -> dict[str, Any]:
        """The arguments of ``load_jit`` that it was made for, but for flags."""
        if not self.units:
            files = [re.sub(r"\$(.)", r"\1", name) for name in COMPILED.findall(self.file)]
            return {"cpp_files": files, "header_only": False}
        request: dict[str, Any] = {}
        for kind, name in zip(("cpp", "cuda"), leaves.UNITS, strict=True):
            request[f"{kind}_files"] = SOURCE.findall(self.units.get(name, ""))
            request[f"{kind}_wrappers"] = EXPORT.findall(self.units.get(name, ""))
        return request

    def roots(self) -> dict[str, str]:
        """By package, the folder that SGLang and tvm_ffi are installed in."""
        words = filter(None, map(INSTALLED.fullmatch, (w[2:] for w in self.words("cxxflags"))))
        return {match[2]: match[1] for match in words}

    def brought(self, roots: Mapping[str, str], home: str, cxx: str) -> Build:
        """The same with packages moved from and to *roots*, the toolkit at *home*, and *cxx*.

        Paths are replaced as ``_normalize_text`` does it, without a look at words.
        """
        paths = {**roots, self.cuda_home: home}
        known = "|".join(re.escape(f"{path}/") for path in sorted(paths, key=len)[::-1] if path)

        def replaced(text: str) -> str:
            return re.sub(known, lambda match: f"{paths[match[0][:-1]]}/", text) if known else text

        lines = [
            f"{name} = {quoted(path)}"
            for name, path in (("cxx", cxx), ("nvcc", os.path.join(home, "bin", "nvcc")))
        ]
        file = re.sub(r"(?m)^cxx = .*\nnvcc = .*$", lambda _: "\n".join(lines), replaced(self.file))
        return Build(file, {name: replaced(unit) for name, unit in self.units.items()})


def differences(built: Build, here: Build) -> list[Difference]:
    """What keeps *here* from being *built* with further flags, which are its caller's own."""
    found = []
    for was, now in zip(built.file.split("\n"), here.file.split("\n"), strict=False):
        words, wanted = was.split(" "), now.split(" ")
        if wanted[0] not in FLAGS:
            if was != now:
                found.append(difference("build rule", was, now))
            continue
        ahead = iter(words)
        if not all(word in ahead for word in wanted):
            missing = [word for word in wanted if word not in words]
            found += [difference(KINDS.get(word[:2], "flag"), None, word) for word in missing]
            found += [] if missing else [difference("order of flags", was, now)]
        if REPORT_FLAG in words and REPORT_FLAG not in wanted:
            found.append(difference("flag", REPORT_FLAG, None))
    found += [
        difference("unit", None, name)
        for name in built.units.keys() | here.units.keys()
        if built.units.get(name) != here.units.get(name)
    ]
    return found


def difference(what: str, built: str | None, here: str | None) -> Difference:
    """One difference; None where there is nothing, or where it is not known."""
    return {"what": what, "built": built, "here": here}


def quoted(path: str) -> str:
    """*path* as one word of a command in a build file."""
    return shlex.quote(path).replace("$", "$$")
