"""What a launch of SGLang in this environment would find in a cache, asked of SGLang itself.

SGLang looks for the scope that the build key names (``compute_build_key``: the build file,
the units, the sources, the module's arguments, the versions of compilers and packages),
and in it for a leaf whose manifest holds. A leaf keeps its build file and its units; so
``load_jit`` is asked what it would write here for the same request, and
``compute_build_key`` which scope that is. What only the module's caller knows (exports and
further flags) is taken as recorded, and no library is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from sglang_jitfix import leaves
from sglang_jitfix.cli import caches, output, recorded
from sglang_jitfix.cli.errors import CommandError, require_sglang
from sglang_jitfix.cli.recorded import Build, Difference, difference
from sglang_jitfix.on_sglang_import import lookup

PREFIX = "sgl_kernel_jit_"  # of every module's name, spec.py
HIT, MISS, UNKNOWN = "hit", "miss", "unknown"
TARGET = re.compile(r"sm(\d+)(\d)[a-z]?")
MAX_JOINTS = 12  # of a module's name: there are 2**12 ways to split it into arguments
PROGRAMS = {"CUDA_HOME": "{}/bin/nvcc", "CXX": "{}"}  # what a setting means

Settings = dict[str, tuple[str, str]]  # by variable: as a build had it, and as it is here
Listed = Mapping[Path, list[Path]]  # leaves by scope


class UnansweredError(Exception):
    """What keeps SGLang from being asked, in words."""


class AskedError(Exception):
    """Ends ``load_jit`` where it asks for the key of its (spec, build file)."""


class Found(NamedTuple):
    """What a launch finds in a scope: an object for each leaf, and settings that differ."""

    rows: list[dict[str, Any]]
    settings: Settings


def load_sglang() -> bool:
    """Import SGLang, and say whether it sees a GPU; raises CommandError if it cannot."""
    require_sglang()
    output.say("importing SGLang")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            import_module("sglang.kernels.jit.utils.compile")
            arch = import_module("sglang.kernels.jit.utils.arch")
        logging.disable()  # it tells of a missing GPU, for one
        return bool(arch.get_jit_cuda_arch().major)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CommandError(f"SGLang's JIT cache cannot be imported: {reason}") from error


def verdicts(cache: caches.Cache, scopes: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """One object for each leaf of *scopes*, as ``explain --json`` prints them.

    SGLang is imported already.
    """
    for target, group in itertools.groupby(scopes, lambda scope: scope.parent.parent.name):
        listed = {scope: cache.leaves(scope) for scope in group}
        found = ask(target, listed, {})
        advice: dict[Path, str] = {}
        for change, scopes_to_try in other_settings(found).items():
            again = {scope: listed[scope] for scope in scopes_to_try}
            for scope, tried in ask(target, again, dict(change)).items():
                hits = [scope / row["leaf"] for row in tried.rows if row["hit"]]
                for leaf in hits:
                    advice.setdefault(leaf, in_words(change, found[scope].settings))
        for scope, answer in found.items():
            for row in answer.rows:
                yield {**row, "advice": advice.get(scope / row["leaf"])}


def ask(target: str, listed: Listed, change: Mapping[str, str]) -> dict[Path, Found]:
    """What a launch for *target* finds in *listed* scopes, with the variables in *change* set.

    In a process of its own, for SGLang keeps its first answer about target and compilers.
    """
    fork = multiprocessing.get_context("fork")
    interrupt = (signal.SIGINT, signal.SIG_DFL)  # without a traceback
    with ProcessPoolExecutor(1, fork, initializer=signal.signal, initargs=interrupt) as pool:
        answers: dict[Path, Found] = pool.submit(_look, target, listed, change).result()
    return answers


def other_settings(found: Mapping[Path, Found]) -> dict[tuple[tuple[str, str], ...], list[Path]]:
    """The settings to try where a build had others, and the scopes to try each with."""
    tries: dict[tuple[tuple[str, str], ...], list[Path]] = {}
    for scope, (_, settings) in found.items():
        options = []
        for variable, (built, here) in settings.items():
            values = [built, os.path.realpath(here)] if variable == "CUDA_HOME" else [built]
            differing = [value for value in dict.fromkeys(values) if value not in ("", here)]
            options.append([(variable, value) for value in differing])
        # One by one before both at once.
        for change in [*zip(itertools.chain(*options)), *itertools.product(*options)]:
            if all(program(*setting) for setting in change):
                tries.setdefault(change, []).append(scope)
    return dict(sorted(tries.items(), key=lambda item: len(item[0])))


def program(variable: str, value: str) -> str | None:
    """The real path of the compiler that *variable* means if it has *value*; None: not there."""
    path = shutil.which(PROGRAMS[variable].format(value))
    return path and os.path.realpath(path)


def in_words(change: Sequence[tuple[str, str]], settings: Settings) -> str:
    """What to tell of a *change* that was tried and hit."""
    same = all(program(name, value) == program(name, settings[name][1]) for name, value in change)
    names = {"CUDA_HOME": "CUDA toolkit", "CXX": "compiler"}
    what = " and ".join(names[name] for name, _ in change)
    values = " ".join(f"{name}={value}" for name, value in change)
    otherwise = f"the same {what}, spelled otherwise: " if same else ""
    return f"{otherwise}with {values} SGLang would use it"


def _look(target: str, listed: Listed, change: Mapping[str, str]) -> dict[Path, Found]:
    # This and all below runs in the process that ask() made.
    from sglang.kernels.jit.utils import arch
    from sglang.kernels.jit.utils.compile import cache

    os.environ.update(change)
    cuda = TARGET.fullmatch(target)
    has_gpu = arch.get_jit_cuda_arch().major > 0
    answers = {}
    with contextlib.ExitStack() as stack:
        if cuda and not has_gpu:
            major, minor = map(int, cuda.groups())
            stack.enter_context(arch.override_jit_cuda_arch(major, minor))
        here = cache._target_tag()
        for scope, paths in output.counted(listed.items(), "scopes"):
            found = [caches.examine(path) for path in paths]
            differs = [difference("architecture", target, here)]
            settings: Settings = {}
            unknown = None
            try:
                if here == target and cuda:
                    differs, settings = _key(scope, found)
                elif not cuda and not has_gpu:
                    raise UnansweredError("only builds for CUDA are judged")
            except UnansweredError as error:
                differs, unknown = [], str(error)
            except Exception as error:  # an unknown release
                differs, unknown = [], f"SGLang cannot be asked: {error!r}"
            answers[scope] = Found(list(_rows(found, differs, unknown)), settings)
    return answers


def _key(scope: Path, found: Sequence[caches.Leaf]) -> tuple[list[Difference], Settings]:
    """What keeps the key here from being the one that *scope* is named after; and settings."""
    import msgspec
    from sglang.kernels.jit.utils.compile import cache, toolchain

    leaf, built = _recorded(found)
    roots = built.roots()
    spec, here = _request(scope, built)
    paths = {old: here.roots().get(package, old) for package, old in roots.items()}
    home, cxx = toolchain.cuda_home(), toolchain.host_compiler_path()
    settings = {"CUDA_HOME": (built.cuda_home, home), "CXX": (built.word("cxx"), cxx)}
    brought = built.moved({**paths, built.cuda_home: home}).compiled_by(here)
    spec, here = _request(scope, brought)
    differs = recorded.differences(brought, here)
    if differs:
        return differs, settings

    # The sources as they were: whether they have changed is the manifest's to tell.
    digests = {(entry.root, entry.relpath): entry.digest for entry in leaf.entries}
    for source in map(Path, spec.sources):
        if cache._normalize_path(source) not in digests:
            raise UnansweredError(f"its manifest does not list its source {source}")
        cache._digest_cache[source] = digests[cache._normalize_path(source)]
    (name,) = spec.module_args
    for arguments in splits(name):
        one = msgspec.structs.replace(spec, module_args=arguments)
        if scope.name == f"build-{cache.compute_build_key(one, build_file=brought.file)}":
            return [], {}
    for variable in ("nvcc", "cxx"):
        if built.value(variable) != here.value(variable):
            differs.append(difference(variable, built.value(variable), here.value(variable)))
    if not differs and built.cuda_home != home:
        differs.append(
            difference("library path", *(f"-L{x}/lib64" for x in (built.cuda_home, home)))
        )
    if not differs and name.count("_") > MAX_JOINTS:
        raise UnansweredError("its name can be split into arguments in too many ways")
    return differs or [difference("versions", None, _versions())], settings


def _recorded(found: Sequence[caches.Leaf]) -> tuple[caches.Leaf, Build]:
    for leaf in found:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            file = caches.read(leaf.path / "build.ninja").decode()
            names = [name for name in leaves.UNITS if f" {name}\n" in file]
            units = {name: caches.read(leaf.path / name).decode() for name in names}
            if leaf.entries:
                return leaf, Build(file, units)
    raise UnansweredError("no leaf here holds its build.ninja, its units and a manifest")


def _request(scope: Path, built: Build) -> tuple[Any, Build]:
    """The spec that ``load_jit`` makes of what *built* was made for, and what it would write."""
    from sglang.kernels.jit.utils.compile import cache, load_jit

    def stop(spec: Any, *, build_file: str) -> None:
        raise AskedError(spec, build_file)

    compute, cache.compute_build_key = cache.compute_build_key, stop
    try:
        load_jit(scope.parent.name.removeprefix(PREFIX), **built.request())
    except AskedError as asked:
        spec, file = asked.args
    finally:
        cache.compute_build_key = compute
    return spec, Build(file, {u.filename: u.source for u in spec.translation_units() if u.source})


def splits(name: str) -> Iterator[tuple[str, ...]]:
    """The arguments that may have been joined to *name*; all are apart first.

    Of many joints the first are tried: kernels have names of several words, their
    arguments hardly ever.
    """
    first, *rest = name.split("_")
    for joined in range(1 << min(len(rest), MAX_JOINTS)):
        arguments = [first]
        for place, part in enumerate(rest):
            if joined >> place & 1:
                arguments[-1] += f"_{part}"
            else:
                arguments.append(part)
        yield tuple(arguments)


@functools.cache
def _versions() -> str:
    """The versions that the key counts, in words."""
    from sglang.kernels.jit.utils.compile import cache, toolchain

    told = []
    for compiler in (toolchain.device_compiler_path(), toolchain.host_compiler_path()):
        try:
            out = subprocess.check_output([compiler, "--version"], text=True).splitlines()
            told.append(next((line for line in out if "release" in line), out[0]))
        except (OSError, subprocess.SubprocessError, IndexError):
            told.append(f"no {compiler}")
    for package in getattr(cache, "_VERSIONED_PACKAGES", ()):
        with contextlib.suppress(metadata.PackageNotFoundError):
            told.append(f"{package} {metadata.version(package)}")
    return ", ".join(told)


def _rows(
    found: Sequence[caches.Leaf], differs: list[Difference], unknown: str | None
) -> Iterator[dict[str, Any]]:
    """The object of each leaf of one scope: *differs* from its key, if that is not *unknown*."""
    from sglang.kernels.jit.utils.compile import cache
    from sglang.srt.environ import envs

    forced = getattr(envs, "SGLANG_JIT_FORCE_RECOMPILE", None)
    limit = getattr(cache, "_MAX_LEAVES_SCANNED", sys.maxsize)
    ahead = 0  # newer leaves that count towards the limit
    for leaf in found:
        reason, own = leaf.reason or None, False
        gone: dict[str, str | None] = {}
        verdict = MISS if differs else UNKNOWN if unknown else HIT
        try:
            holds, own, gone = _holds(leaf)
            if not holds:
                verdict = MISS
            elif unknown:
                reason = unknown
        except UnansweredError as error:
            verdict, reason = MISS if differs else UNKNOWN, str(error)
        if forced is not None and forced.get():
            verdict, reason = MISS, "SGLANG_JIT_FORCE_RECOMPILE is set: every launch compiles"
        if not own:
            if verdict == HIT and ahead >= limit:
                verdict, reason = MISS, f"SGLang looks at {limit} leaves, and {ahead} are newer"
            ahead += 1
        yield {
            **caches.place(leaf.path),
            "status": leaf.status,
            "verdict": verdict,
            "hit": verdict == HIT,
            "reason": reason,
            "differs": differs,
            "changed": [path for path, digest in gone.items() if digest],
            "vanished": [path for path, digest in gone.items() if not digest],
        }


def _holds(leaf: caches.Leaf) -> tuple[bool, bool, dict[str, str | None]]:
    """Whether SGLang takes *leaf* once it has come to its scope; whether the leaf's unit is gone
    and the shim forgives that; and the dependencies that are not as recorded, by path, with their
    digests. Raises UnansweredError."""
    from sglang.kernels.jit.utils.compile import cache

    if leaf.status == caches.INCOMPLETE:
        return False, False, {}
    if not leaf.entries:
        try:  # SGLang would, but not everything can be read to an end
            caches.read(leaf.path / leaves.MANIFEST)
        except OSError as error:
            raise UnansweredError(f"its manifest: {error.strerror}") from None
    entries = cache._read_deps(leaf.path) or []
    own = set(lookup.vanished_units(cache, entries)) if hasattr(entries, "build") else set()
    now, differing = [], {}
    for index, entry in enumerate(entries):
        digest = entry.digest
        if index not in own:
            digest = _digest_now(entry.root, entry.relpath)
        if digest != entry.digest:
            path = cache._resolve_path(root=entry.root, relpath=entry.relpath)
            differing[str(path or f"{entry.root}:{entry.relpath}")] = digest
        now.append(leaves.Entry(entry.root, entry.relpath, digest or ""))
    holds = leaf.path.name == leaves.LEAF_PREFIX + leaves.deps_key(now)
    return holds and len(own) < len(now) and all(differing.values()), bool(own), differing


@functools.cache
def _digest_now(root: str, relpath: str) -> str | None:
    from sglang.kernels.jit.utils.compile import cache

    path = cache._resolve_path(root=root, relpath=relpath)
    try:
        return path and caches.digest(path)
    except ValueError as error:  # a null character
        raise UnansweredError(f"{path}: {error}") from None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):  # SGLang may not come back from it
            raise UnansweredError(f"{path}: {error.strerror}") from None
        return None
