"""The sanitizers' run: what it preloads, and that it cannot pass without having tested its own build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import checks, native, sanitize
from tools.install import InstallError

needs_gcc = pytest.mark.skipif(
    sys.platform != "linux" or native.compiler() is None, reason="needs a C++ compiler on Linux"
)


@needs_gcc
@pytest.mark.parametrize(
    ("body", "report"),
    [
        ("int *p = new int[4]; volatile int n = 5; int r = p[n]; delete[] p; return r;", "AddressSanitizer"),
        ("volatile int n = 40; return 1 << n;", "shift exponent 40 is too large"),
    ],
)
def test_its_environment_lets_python_load_a_library_with_sanitizers(
    tmp_path: Path, body: str, report: str
) -> None:
    (tmp_path / "x.cpp").write_text(
        "#include <stdexcept>\n"
        f'extern "C" int bad() {{ {body} }}\n'
        'extern "C" int good() { try { throw std::runtime_error("x"); }'
        " catch (std::exception &) { return 7; } }\n"
    )
    library = tmp_path / "_native.so"
    flags = ["-shared", "-fPIC", "-O0", f"-fsanitize={sanitize.SANITIZERS}", "-fno-sanitize-recover=all"]
    subprocess.run([str(native.compiler()), *flags, "-o", library, tmp_path / "x.cpp"], check=True)
    environment = os.environ | sanitize.sanitized(library)
    assert environment["ESTAFET_NATIVE_PATH"] == str(tmp_path)

    def call(function: str) -> subprocess.CompletedProcess[str]:
        program = f"import ctypes; print(ctypes.CDLL({str(library)!r}).{function}())"
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert call("good").stdout == "7\n"
    failed = call("bad")
    assert failed.returncode != 0
    assert report in failed.stderr


def test_an_extension_without_sanitizers_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "_native.so"
    plain.write_bytes(b"\0libstdc++.so.6\0")
    with pytest.raises(InstallError, match="without AddressSanitizer"):
        sanitize.sanitized(plain)


TEST = """\
import sys
import types
def test_kernels():
    module = types.ModuleType("kernels.cpu._native")
    module.__file__ = {file!r}
    sys.modules[module.__name__] = module
    {more}
"""


def run_pytest(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder with the plugin, and with no other that would have to be loaded."""
    words = ["-p", "xdist", "-p", "tools.sanitize_plugin", "-p", "no:cacheprovider", "--rootdir", "."]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "ESTAFET_NATIVE_PATH": str(folder / "checked")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, *more],
        cwd=folder,
        env=os.environ | alone,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("folder", "more", "code", "said"),
    [
        ("checked", "pass", 0, ""),
        ("installed", "pass", 1, "instead of the extension in"),
        ("checked", "del sys.modules[module.__name__]", 1, "the tests used none instead of"),
        ("checked", "sys.modules['torch'] = types.ModuleType('torch')", 1, "must not import torch"),
    ],
)
@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_that_tested_something_else_fails(
    tmp_path: Path, folder: str, more: str, code: int, said: str, processes: str
) -> None:
    file = str(tmp_path / folder / "_native.so")
    (tmp_path / "test_it.py").write_text(TEST.format(file=file, more=more))
    run = run_pytest(tmp_path, "-n", processes)
    assert run.returncode == code, run.stdout
    assert "1 passed" in run.stdout
    assert said in run.stderr


def test_a_process_that_a_sanitizer_ends_fails_the_run_which_goes_on(tmp_path: Path) -> None:
    file = str(tmp_path / "checked" / "_native.so")
    ends = "def test_bad():\n    os.write(2, b'ERROR: AddressSanitizer')\n    os._exit(1)\n"
    (tmp_path / "test_it.py").write_text("import os\n" + ends + TEST.format(file=file, more="pass"))
    run = run_pytest(tmp_path, "-n", "1", "--capture=sys")
    assert run.returncode == 1
    assert "1 failed, 1 passed" in run.stdout
    assert "crashed while running 'test_it.py::test_bad'" in run.stdout
    assert "ERROR: AddressSanitizer" in run.stderr


def test_the_key_follows_sources_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernels" / "cpu" / "src" / "a.h"
    source.parent.mkdir(parents=True)
    source.write_text("// one")
    keys = [sanitize.build_key(tmp_path), sanitize.build_key(tmp_path)]
    source.write_text("// two")
    keys.append(sanitize.build_key(tmp_path))
    other = tmp_path / "c++"
    other.write_text("#!/bin/sh\necho another compiler\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    keys.append(sanitize.build_key(tmp_path))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_build_that_is_there_is_taken(tmp_path: Path) -> None:
    there = tmp_path / ".build" / "sanitize" / sanitize.build_key(tmp_path) / "_native.so"
    there.parent.mkdir(parents=True)
    there.touch()
    assert sanitize.build(tmp_path) == there


def test_checks_have_the_sanitizers_where_kernels_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "lacking", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert "sanitizers" in [check.name for check in checks.checks(fast=True)]
    monkeypatch.setattr(native, "lacking", lambda: "no compiler")
    names = [check.name for check in checks.checks(fast=True)]
    assert "sanitizers" not in names
    assert names[-3:] == ["native kernels", "types", "tests"]


def test_a_test_is_in_one_check_and_no_other() -> None:
    """Those of whole systems alone and last, whose closing lines are then the closing lines."""
    beside, alone = checks.tests(fast=False)
    assert beside.command[5:-1] == sanitize.SIDE_BY_SIDE
    assert (beside.command[3:5], alone.command[3:]) == (("-m", "not system"), ("-m", "system"))
    (fast,) = checks.tests(fast=True)
    assert "not system and not model" in fast.command


def test_a_check_beside_others_is_heard_in_its_turn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first waits for a word of the second, which has begun already and writes beside it."""
    os.mkfifo(pipe := tmp_path / "pipe")
    first = checks.Check("first", ("sh", "-c", f"read word < {pipe}; echo first got $word"))
    script = f"echo second begins; echo it > {pipe}; echo second ends >&2; exit 3"
    second = checks.Check("second", ("sh", "-c", script), beside=True)
    assert checks.run_checks([first, second], str(Path(shutil.which("sh") or "").parent)) == 1
    out = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("==")]
    assert out[:3] == ["first got it", "second begins", "second ends"]
    assert [line.split()[:3] for line in out[3:]][1] == ["second", "FAILED", "(3)"]


def test_every_check_runs_and_one_that_fails_fails_all(capfd: pytest.CaptureFixture[str]) -> None:
    todo = [checks.Check(name, (name,)) for name in ("false", "true")]
    programs = str(Path(shutil.which("true") or "").parent)
    assert checks.run_checks(todo, programs) == 1
    assert checks.run_checks(todo[1:], programs) == 0
    first, _, second = capfd.readouterr().out.rpartition("== true")
    assert [line.split()[:2] for line in first.splitlines() if line.startswith("   ")] == [
        ["false", "FAILED"],
        ["true", "passed"],
    ]
    assert "FAILED" not in second
