"""Runs the native kernels' tests on a build that checks itself: AddressSanitizer and UBSan.

The build lies in `.build/sanitize`, apart from the installed extension, and is made again only when what
it is made of has changed. Arguments that are not known here go to pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools import interrupts, native
from tools.children import running
from tools.install import ROOT, InstallError, say
from tools.pip import run_pip

SANITIZERS = "address,undefined"
TESTS = "tests/kernels/test_native_*.py"
QUICK = "not slow_native and not system and not model"
SIDE_BY_SIDE = ("-n", "logical", "--maxprocesses", "8", "--dist")
"""pytest's options for tests that measure no time: a process for each core; how to share them out follows."""
_EXTENSION = "kernels/cpu/_native."
_RUNTIME = re.compile(rb"\0(libasan\.so[.\d]*|libclang_rt\.asan[-\w]*\.so)\0")


def main(arguments: list[str]) -> int:
    """Build, then run the tests; the exit code is pytest's, or 3 when it cannot be built here."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--all", action="store_true", help="with the tests marked slow_native")
    options, rest = parser.parse_known_args(arguments)
    try:
        if why := unable():
            raise InstallError(why)
        extension = build(ROOT)
        environment = os.environ | sanitized(extension)
    except InstallError as error:
        say(str(error))
        return 3
    select = [] if options.all else ["-m", QUICK]
    tests = [str(path) for path in sorted(ROOT.glob(TESTS))]
    # What a sanitizer says before it ends the process must not lie in a file of pytest's: capture sys only.
    words = ["-p", "tools.sanitize_plugin", "--capture=sys", *SIDE_BY_SIDE, "worksteal"]
    pytest = [sys.executable, "-m", "pytest", *words, *select, *tests, *rest]
    if not tests:
        say(f"there are no tests {TESTS}")
        return 1
    with running(pytest, stop=signal.SIGINT, cwd=ROOT, env=environment) as child:
        return child.wait()


def unable() -> str | None:
    """Why the sanitizers cannot run on this machine, or None when they can."""
    if sys.platform != "linux":
        return "the sanitizers' run preloads their libraries, which is done for Linux only"
    return native.lacking()


def build(root: Path) -> Path:
    """The extension with sanitizers, built when it is not there; InstallError when that fails."""
    home = root / ".build" / "sanitize"
    place = home / build_key(root)
    if found := _extension_in(place):
        return found
    say("compiling the kernels with sanitizers")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=home) as temporary:
        settings = (f"cmake.define.ESTAFET_SANITIZE={SANITIZERS}", "cmake.build-type=Debug")
        words = [word for setting in settings for word in ("--config-settings", setting)]
        wheels = Path(temporary) / "wheels"
        pip = [sys.executable, "-m", "pip"]
        if code := run_pip(pip, ["wheel", "--no-deps", *words, "--wheel-dir", str(wheels), str(root)]):
            raise InstallError(f"the kernels could not be built with sanitizers: pip's exit code is {code}")
        complete = Path(temporary) / "complete"
        complete.mkdir()
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.startswith(_EXTENSION):
                        (complete / Path(name).name).write_bytes(archive.read(name))
        with contextlib.suppress(OSError):  # another run was faster
            complete.rename(place)
    if found := _extension_in(place):
        return found
    raise InstallError("the kernels were left out of the build with sanitizers: `pip wheel -v .` shows why")


def sanitized(extension: Path) -> dict[str, str]:
    """The environment in which a Python that knows nothing of sanitizers can load `extension`.

    InstallError when it was not built with AddressSanitizer, or when its library is not found.
    """
    named = _RUNTIME.search(extension.read_bytes())
    if named is None:
        raise InstallError(f"{extension} was built without AddressSanitizer")
    # The C++ library too, and after it: loaded later, it would hide `__cxa_throw` from the sanitizer.
    libraries = [_library(named[1].decode()), _library("libstdc++.so.6")]
    return {
        "ESTAFET_NATIVE_PATH": str(extension.parent),
        "LD_PRELOAD": ":".join(libraries),
        # Python keeps memory to its end on purpose, which would all be reported as leaked.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Python's own allocator hands out pieces of arenas, between which nothing is guarded.
        "PYTHONMALLOC": "malloc",
    }


def build_key(root: Path) -> str:
    """A name for what the build depends on: sources, Python and compiler."""
    program = native.compiler()
    version = subprocess.run([str(program), "--version"], capture_output=True, check=False).stdout
    parts = [native.contents(root).encode(), sys.version.encode(), str(program).encode(), version]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _extension_in(folder: Path) -> Path | None:
    return next(folder.glob("_native.*"), None)


def _library(name: str) -> str:
    """Where the compiler has a library; InstallError when it has it not."""
    command = [str(native.compiler()), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(path):
        raise InstallError(f"{command[0]} does not find {name}, without which the sanitizers cannot run")
    return path


if __name__ == "__main__":
    sys.exit(interrupts.guarded(lambda: main(sys.argv[1:])))
