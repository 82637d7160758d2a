"""What the installer decides, with a pip that only writes down what it was asked for."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tools import native
from tools.install import NOT_BUILT, Installer, InstallError, Machine, Options

if TYPE_CHECKING:
    from pathlib import Path

CPU_ONLY = Machine("Linux", "x86_64", nvidia=False)
WITH_DRIVER = Machine("Linux", "x86_64", nvidia=True)
MAC = Machine("Darwin", "arm64", nvidia=False)

FAKE_PIP = """\
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
arguments = sys.argv[2:]
state = json.loads((folder / "pip.json").read_text())
if arguments == ["--version"]:
    sys.exit()
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if "--report" in arguments:
    report = {"install": [{"metadata": {"requires_dist": state["requires"]}}]}
    pathlib.Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))
if any(argument.endswith("+cpu") for argument in arguments) and not state["cpu"]:
    sys.exit("No matching distribution found")
if "--editable" in arguments and state["builds"]:
    packages = folder / ".venv/lib/python3.11/site-packages/kernels/cpu"
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "_native.so").touch()
sys.exit(state["code"])
"""
PROJECT = '[project]\nname = "x"\ndependencies = ["numpy", "torch==2.13.0"]\n'
CUDA = [
    "sympy",
    "nvidia-cublas==13.*; platform_system == 'Linux'",
    "cuda-bindings",
    "opt-einsum; extra == 'o'",
]


class Place:
    """A folder with a project, an environment and the fake pip."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "pyproject.toml").write_text(PROJECT)
        (root / "fake_pip.py").write_text(FAKE_PIP)
        (root / ".venv" / "bin").mkdir(parents=True)
        (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
        self.pip_is()

    def pip_is(
        self, *, cpu: bool = False, requires: list[str] = CUDA, code: int = 0, builds: bool = True
    ) -> None:
        state = {"cpu": cpu, "requires": requires, "code": code, "builds": builds}
        (self.root / "pip.json").write_text(json.dumps(state))

    def ensure(self, machine: Machine = WITH_DRIVER, **options: Any) -> list[list[str]]:
        """The calls of pip that one run makes, without its general options."""
        calls = self.root / "calls"
        calls.unlink(missing_ok=True)
        pip = [sys.executable, str(self.root / "fake_pip.py"), str(self.root)]
        python = Installer(self.root, Options(**options), machine, pip=pip).ensure()
        assert python == self.root / ".venv" / "bin" / "python"
        return self.calls()

    def calls(self) -> list[list[str]]:
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        general = {"--disable-pip-version-check", "--no-input", "--quiet"}
        return [[word for word in json.loads(line) if word not in general] for line in lines]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def package(place: Place, extras: str = "") -> list[str]:
    return ["install", "--editable", f"{place.root}{extras}"]


def test_it_installs_once_and_again_when_the_project_changed(place: Place) -> None:
    assert place.ensure() == [package(place)]
    assert place.ensure() == []
    (place.root / "pyproject.toml").write_text(PROJECT + "# changed\n")
    assert place.ensure() == [package(place)]
    assert place.ensure() == []


def test_extras_are_added_and_kept(place: Place) -> None:
    place.ensure()
    assert place.ensure(extras=("dev",)) == [package(place, "[dev]")]
    assert place.ensure() == []
    assert place.ensure(extras=("dev",)) == []


def test_a_failed_installation_is_tried_again(place: Place) -> None:
    place.pip_is(code=1)
    with pytest.raises(InstallError, match="failed with exit code 1"):
        place.ensure()
    place.pip_is()
    assert place.ensure() == [package(place)]


def test_a_stamp_that_cannot_be_read_is_no_stamp(place: Place) -> None:
    place.ensure()
    (place.root / ".venv" / "estafet-install.json").write_text("{")
    assert place.ensure() == [package(place)]


@pytest.mark.parametrize("machine", [WITH_DRIVER, MAC, Machine("Linux", "aarch64", nvidia=False)])
def test_torch_is_left_to_pip_where_the_usual_wheel_is_right(place: Place, machine: Machine) -> None:
    assert place.ensure(machine) == [package(place)]


def test_the_cpu_build_is_taken_when_there_is_one(place: Place) -> None:
    place.pip_is(cpu=True)
    assert place.ensure(CPU_ONLY) == [
        ["install", "--dry-run", "--no-deps", "torch==2.13.0+cpu"],
        ["install", "torch==2.13.0+cpu"],
        package(place),
    ]


def test_a_cpu_build_that_is_there_is_kept(place: Place) -> None:
    (place.root / ".venv/lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    assert place.ensure(CPU_ONLY) == [package(place)]


def test_cuda_libraries_are_never_downloaded_unasked(place: Place) -> None:
    with pytest.raises(InstallError, match="with 2 CUDA packages") as stopped:
        place.ensure(CPU_ONLY)
    assert "--torch-index URL" in str(stopped.value)
    assert "PIP_EXTRA_INDEX_URL" in str(stopped.value)
    assert "--cuda" in str(stopped.value)
    assert all("--dry-run" in call and "--no-deps" in call for call in place.calls())


def test_a_torch_without_cuda_libraries_is_taken_as_it_is(place: Place) -> None:
    place.pip_is(requires=["sympy", "nvidia-cublas; extra == 'cuda'"])
    assert place.ensure(CPU_ONLY)[-1] == package(place)
    place.pip_is(requires=[])


def test_a_named_index_is_used_for_torch_alone(place: Place) -> None:
    place.pip_is(cpu=True)
    assert place.ensure(CPU_ONLY, torch_index="file:///wheels") == [
        ["install", "torch==2.13.0+cpu", "--extra-index-url", "file:///wheels"],
        package(place),
    ]


def test_cuda_can_be_asked_for(place: Place) -> None:
    assert place.ensure(CPU_ONLY, cuda=True) == [package(place)]


def machine_lacks(monkeypatch: pytest.MonkeyPatch, what: str | None) -> None:
    monkeypatch.setattr(native, "lacking", lambda: what)


def test_a_changed_kernel_is_compiled(place: Place) -> None:
    source = place.root / "kernels" / "cpu" / "src" / "isa_portable.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("int one() { return 1; }\n")
    assert place.ensure() == [package(place)]
    assert place.ensure() == []
    source.write_text("int one() { return 2; }\n")
    assert place.ensure() == [package(place)]
    source.rename(source.with_name("isa_avx2.cpp"))
    assert place.ensure() == [package(place)]
    (place.root / "kernels" / "cpu" / "CMakeLists.txt").write_text("project(x)\n")
    assert place.ensure() == [package(place)]
    assert place.ensure() == []


def test_a_machine_without_compiler_is_told_so_at_each_start(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_lacks(monkeypatch, "there is no compiler")
    place.pip_is(builds=False)
    assert place.ensure() == [package(place)]
    said = capsys.readouterr().err
    assert "there is no compiler" in said
    assert "compiling" not in said
    assert place.ensure() == []
    assert capsys.readouterr().err == "estafet: there is no compiler\n"


def test_kernels_are_added_once_there_is_a_compiler(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_lacks(monkeypatch, "there is no compiler")
    place.pip_is(builds=False)
    place.ensure()
    machine_lacks(monkeypatch, None)
    place.pip_is()
    capsys.readouterr()
    assert place.ensure() == [package(place)]
    assert "compiling the kernels" in capsys.readouterr().err
    machine_lacks(monkeypatch, "there is no compiler")
    assert place.ensure() == []  # what has been built stays
    assert capsys.readouterr().err == ""


def test_kernels_left_out_for_no_known_reason_are_not_tried_for_ever(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_lacks(monkeypatch, None)
    place.pip_is(builds=False)
    assert place.ensure() == [package(place)]
    capsys.readouterr()
    assert place.ensure() == []
    assert NOT_BUILT in capsys.readouterr().err


def test_the_compiler_is_the_one_that_cmake_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("ESTAFET_NATIVE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.compiler() is None
    assert "no C++ compiler was found" in str(native.lacking())
    for name in ("clang++", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert native.compiler() == str(tmp_path / name)
    monkeypatch.setenv("CXX", "clang++ -pipe")
    assert native.compiler() == str(tmp_path / "clang++")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert native.compiler() is None
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setenv("ESTAFET_NATIVE", "off")
    assert "ESTAFET_NATIVE=off" in str(native.lacking())


def test_python_without_headers_lacks_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESTAFET_NATIVE", raising=False)
    monkeypatch.setattr(native, "compiler", lambda: "/usr/bin/c++")
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    assert "headers" in str(native.lacking())
    (tmp_path / "Python.h").touch()
    assert native.lacking() is None
