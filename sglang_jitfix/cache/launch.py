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
import gc
import itertools
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from sglang_jitfix import leaves
from sglang_jitfix.cache import disk, recorded
from sglang_jitfix.cache.errors import CommandError, require_sglang
from sglang_jitfix.cache.recorded import Build, Difference, difference
from sglang_jitfix.on_sglang_import import lookup

PREFIX = "sgl_kernel_jit_"  # of every module's name, spec.py
HIT, MISS, UNKNOWN = "hit", "miss", "unknown"
TARGET = re.compile(r"sm(\d+)(\d)[a-z]?")
MAX_JOINTS = 12  # of a module's name: there are 2**12 ways to split it into arguments


Progress = Callable[[Iterable[Path]], Iterable[Path]]


class UnansweredError(Exception):
    """What keeps SGLang from being asked, in words."""


class AskedError(Exception):
    """Ends ``load_jit`` where it asks for the key of its (spec, build file)."""


def load_sglang() -> bool:
    """Import SGLang, and say whether it sees a GPU; raises CommandError if it cannot."""
    require_sglang()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            import_module("sglang.kernels.jit.utils.compile")
            arch = import_module("sglang.kernels.jit.utils.arch")
        logging.disable()  # it tells of a missing GPU, for one
        return bool(arch.get_jit_cuda_arch().major)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CommandError(f"SGLang's JIT cache cannot be imported: {reason}") from error


def verdicts(
    cache: disk.Cache, scopes: Iterable[Path], progress: Progress
) -> Iterator[dict[str, Any]]:
    """One object for each leaf of *scopes*, as ``explain --json`` prints them.

    *progress* is given the scopes and gives them on. SGLang is imported already. It keeps
    its first answer about target and compilers, so each target is asked about in a
    process of its own.
    """
    fork = multiprocessing.get_context("fork")
    interrupt = (signal.SIGINT, signal.SIG_DFL)  # without a traceback
    for target, group in itertools.groupby(scopes, lambda scope: scope.parent.parent.name):
        listed = {scope: cache.leaves(scope) for scope in group}
        with ProcessPoolExecutor(1, fork, initializer=signal.signal, initargs=interrupt) as pool:
            yield from pool.submit(_look, target, listed, progress).result()


# From here on all runs in such a process.


def _look(
    target: str, listed: Mapping[Path, list[Path]], progress: Progress
) -> list[dict[str, Any]]:
    from sglang.kernels.jit.utils import arch
    from sglang.kernels.jit.utils.compile import cache

    gc.freeze()  # or the collector goes through all of SGLang again and again
    cuda = TARGET.fullmatch(target)
    has_gpu = arch.get_jit_cuda_arch().major > 0
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        if cuda and not has_gpu:
            major, minor = map(int, cuda.groups())
            stack.enter_context(arch.override_jit_cuda_arch(major, minor))
        here = cache._target_tag()
        for scope in progress(listed):
            found = [disk.examine(path) for path in listed[scope]]
            differs, advice, unknown = [difference("architecture", target, here)], None, None
            try:
                if here == target and cuda:
                    differs, advice = _key(scope, found)
                elif not cuda and not has_gpu:
                    raise UnansweredError("only builds for CUDA are judged")
            except UnansweredError as error:
                differs, unknown = [], str(error)
            except Exception as error:  # an unknown release
                differs, unknown = [], f"SGLang cannot be asked: {error!r}"
            rows += _rows(found, differs, advice, unknown)
    return rows


def _key(scope: Path, found: Sequence[disk.Leaf]) -> tuple[list[Difference], str | None]:
    """What keeps the key here from being the one that *scope* is named after, and which spelling
    of the same toolchain would give it, in words. Raises UnansweredError."""
    import msgspec
    from sglang.kernels.jit.utils.compile import cache, toolchain

    if not scope.parent.name.startswith(PREFIX):
        raise UnansweredError("no module of SGLang's has such a name")
    leaf, built = _recorded(found)
    home, cxx = toolchain.cuda_home(), toolchain.host_compiler_path()
    _, here = _request(scope, built)
    roots = {old: here.roots().get(package, old) for package, old in built.roots().items()}
    brought = built.brought(roots, home, cxx)
    spec, here = _request(scope, brought)
    differs = recorded.differences(brought, here)
    if differs:
        return differs, None

    # The sources as they were: whether they have changed is the manifest's to tell.
    digests = {(entry.root, entry.relpath): entry.digest for entry in leaf.entries}
    for source in map(Path, spec.sources):
        if cache._normalize_path(source) not in digests:
            raise UnansweredError(f"its manifest does not list its source {source}")
        cache._digest_cache[source] = digests[cache._normalize_path(source)]
    (name,) = spec.module_args
    specs = [msgspec.structs.replace(spec, module_args=one) for one in splits(name)]

    def is_key_with(home: str, cxx: str) -> bool:
        file = built.brought(roots, home, cxx).file
        keys = (cache.compute_build_key(one, build_file=file) for one in specs)
        return any(scope.name == f"build-{key}" for key in keys)

    if is_key_with(home, cxx):
        return [], None
    for variable in ("nvcc", "cxx"):
        if built.value(variable) != here.value(variable):
            differs.append(difference(variable, built.value(variable), here.value(variable)))
    if not differs and built.cuda_home != home:
        paths = (f"-L{root}/lib64" for root in (built.cuda_home, home))
        differs.append(difference("library path", *paths))
    if not differs and name.count("_") > MAX_JOINTS:
        raise UnansweredError("its name can be split into arguments in too many ways")
    # Another name of the same compiler leaves the rest of the key as it is.
    homes = [one for one in (home, built.cuda_home, os.path.realpath(home)) if same_nvcc(one, home)]
    compilers = [one for one in (cxx, built.word("cxx")) if same_file(one, cxx)]
    for one in dict.fromkeys(itertools.product(homes, compilers)):
        if one != (home, cxx) and is_key_with(*one):
            return differs, spelled_otherwise(*one, home, cxx)
    return differs or [difference("versions", None, _versions())], None


def spelled_otherwise(home: str, cxx: str, home_here: str, cxx_here: str) -> str:
    """The advice to use the other spelling of what is here."""
    toolkit = [("CUDA toolkit", f"CUDA_HOME={home}")] if home != home_here else []
    compiler = [("compiler", f"CXX={cxx}")] if cxx != cxx_here else []
    what, how = zip(*toolkit, *compiler, strict=True)
    otherwise = f"the same {' and '.join(what)}, spelled otherwise"
    return f"{otherwise}: with {' '.join(how)} SGLang would use it"


def same_nvcc(home: str, other: str) -> bool:
    """Whether two roots hold the same toolkit."""
    return same_file(f"{home}/bin/nvcc", f"{other}/bin/nvcc")


def same_file(program: str, other: str) -> bool:
    """Whether two names mean the same program."""
    paths = [shutil.which(one) for one in (program, other)]
    return all(paths) and len({os.path.realpath(path) for path in paths if path}) == 1


def _recorded(found: Sequence[disk.Leaf]) -> tuple[disk.Leaf, Build]:
    for leaf in found:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            file = disk.read(leaf.path / "build.ninja").decode()
            names = [name for name in leaves.UNITS if f" {name}\n" in file]
            units = {name: disk.read(leaf.path / name).decode() for name in names}
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
    found: Sequence[disk.Leaf],
    differs: list[Difference],
    advice: str | None,
    unknown: str | None,
) -> Iterator[dict[str, Any]]:
    """The object of each leaf of a scope, of which is known what :func:`_look` has found."""
    from sglang.kernels.jit.utils.compile import cache
    from sglang.srt.environ import envs

    forced = getattr(envs, "SGLANG_JIT_FORCE_RECOMPILE", None)
    limit = getattr(cache, "_MAX_LEAVES_SCANNED", sys.maxsize)
    ahead = 0  # newer leaves that count towards the limit
    for leaf in found:
        reason, own = leaf.reason or None, False
        holds = False
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
            **disk.place(leaf.path),
            "status": leaf.status,
            "verdict": verdict,
            "hit": verdict == HIT,
            "reason": reason,
            "differs": differs,
            "changed": [path for path, digest in gone.items() if digest],
            "vanished": [path for path, digest in gone.items() if not digest],
            "advice": advice if holds else None,
        }


def _holds(leaf: disk.Leaf) -> tuple[bool, bool, dict[str, str | None]]:
    """Whether SGLang takes *leaf* once it has come to its scope; whether the leaf's unit is gone
    and the shim forgives that; and the dependencies that are not as recorded, by path, with their
    digests. Raises UnansweredError."""
    from sglang.kernels.jit.utils.compile import cache

    if leaf.status == disk.INCOMPLETE:
        return False, False, {}
    if not leaf.entries:
        try:  # SGLang would, but not everything can be read to an end
            disk.read(leaf.path / leaves.MANIFEST)
        except OSError as error:
            raise UnansweredError(f"its manifest: {error.strerror}") from None
    entries = cache._read_deps(leaf.path) or []
    own = set(lookup.vanished_units(cache, entries)) if hasattr(entries, "build") else set()
    differing = {}
    for index, entry in enumerate(entries):
        if index in own:
            continue
        digest = _digest_now(entry.root, entry.relpath)
        if digest != entry.digest:
            differing[entry.root, entry.relpath] = digest
    named = {
        str(cache._resolve_path(root=root, relpath=relpath) or f"{root}:{relpath}"): digest
        for (root, relpath), digest in differing.items()
    }
    if len(own) == len(entries) or not all(differing.values()):
        return False, bool(own), named
    if not differing:  # its own list names it, or not
        return leaf.status in (disk.OK, disk.POISONED), bool(own), named
    now = [
        leaves.Entry(one.root, one.relpath, differing.get((one.root, one.relpath)) or one.digest)
        for one in entries
    ]
    return leaf.path.name == leaves.LEAF_PREFIX + leaves.deps_key(now), bool(own), named


@functools.cache
def _digest_now(root: str, relpath: str) -> str | None:
    from sglang.kernels.jit.utils.compile import cache

    path = cache._resolve_path(root=root, relpath=relpath)
    try:
        return path and disk.digest(path)
    except ValueError as error:  # a null character
        raise UnansweredError(f"{path}: {error}") from None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):  # SGLang may not come back from it
            raise UnansweredError(f"{path}: {error.strerror}") from None
        return None
