"""Puts the package into `.venv`: once, and again when `pyproject.toml` or the native kernels have changed.

Standard library only, because it runs before anything is installed. On Linux x86_64 without an
NVIDIA driver it takes PyTorch's CPU build, and stops rather than let pip download gigabytes of
CUDA libraries that could not be used. On a machine without a C++ compiler the package comes without
its native kernels, and that is said at each start until there is one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import native
from tools.children import running
from tools.pip import run_pip

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
STAMP = "estafet-install.json"
NOT_BUILT = (
    "the native kernels were left out although there is a C++ compiler: the slow backend will be used; "
    "`.venv/bin/pip install --verbose --editable .` shows why"
)


class InstallError(Exception):
    """The package could not be installed: what a person can do about it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What of this machine decides which PyTorch to take."""

    system: str
    architecture: str
    nvidia: bool

    @classmethod
    def here(cls) -> Machine:
        """The machine that this runs on."""
        driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
        return cls(platform.system(), platform.machine(), driver)

    def takes_cpu_build(self) -> bool:
        """Whether PyTorch's usual wheel would bring CUDA libraries for nothing."""
        return (self.system, self.architecture) == ("Linux", "x86_64") and not self.nvidia


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may say about the installation."""

    extras: tuple[str, ...] = ()
    torch_index: str | None = None
    cuda: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """The installation's options, for every tool that installs."""
    group = parser.add_argument_group("installation")
    group.add_argument("--torch-index", metavar="URL", help="where to find PyTorch's CPU build")
    group.add_argument("--cuda", action="store_true", help="take PyTorch's CUDA build even without a driver")


class Installer:
    """One virtual environment in `root`, and the package in it."""

    def __init__(
        self,
        root: Path,
        options: Options,
        machine: Machine,
        *,
        pip: Sequence[str] | None = None,
    ) -> None:
        self._root = root
        self._options = options
        self._machine = machine
        self._venv = root / ".venv"
        self.python = self._venv / "bin" / "python"
        self._packages = self._venv / "lib" / "python3.11" / "site-packages"
        self._pip = list(pip) if pip is not None else [str(self.python), "-m", "pip"]

    def ensure(self) -> Path:
        """Install what is missing; the environment's interpreter. InstallError when it cannot be done."""
        with self._only_one():
            left_out = native.lacking() or NOT_BUILT
            stamp = self._stamp()
            extras = set(stamp["extras"]) if stamp else set()
            if stamp and extras >= set(self._options.extras):
                if self._has_native():
                    return self.python
                if stamp["left_out"] == left_out:  # else it can be built now, or fails for another reason
                    say(left_out)
                    return self.python
            self._ensure_venv()
            kernels = ", and compiling the kernels" if left_out == NOT_BUILT else ""
            say(f"step 2 of 3: installing packages (PyTorch and others, about a minute){kernels}")
            self._ensure_torch()
            contents = self._contents()  # before pip reads them: what is changed meanwhile is not in it
            wanted = sorted(set(self._options.extras) | extras)
            brackets = f"[{','.join(wanted)}]" if wanted else ""
            self._run_pip("install", "--editable", f"{self._root}{brackets}")
            built = self._has_native()
            if not built:
                say(left_out)
            stamp = {"contents": contents, "extras": wanted, "left_out": None if built else left_out}
            (self._venv / STAMP).write_text(json.dumps(stamp))
        return self.python

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[None]:
        """Hold a lock while installing; on the project file, so that no lock file is left behind."""
        with (self._root / "pyproject.toml").open() as project:
            try:
                fcntl.flock(project, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another installation to end")
                fcntl.flock(project, fcntl.LOCK_EX)
            yield

    def _contents(self) -> str:
        """What an installation depends on: the project file, the kernels' sources, where the folder lies."""
        digest = hashlib.sha256(native.contents(self._root).encode())
        digest.update(os.fsencode(self._root))
        return digest.hexdigest()

    def _has_native(self) -> bool:
        """Whether pip has put the compiled kernels into the environment."""
        return any((self._packages / "kernels" / "cpu").glob("_native.*"))

    def _stamp(self) -> dict[str, Any] | None:
        """What is known of an installation that is still right, or None when there is none.

        Its `left_out` is why it came without native kernels, None when it has them.
        """
        try:
            stamp: dict[str, Any] = json.loads((self._venv / STAMP).read_text())
        except (OSError, ValueError):
            return None
        if stamp.get("contents") != self._contents() or not os.access(self.python, os.X_OK):
            return None
        return stamp

    def _ensure_venv(self) -> None:
        if os.access(self.python, os.X_OK) and _succeeds([*self._pip, "--version"]):
            return
        say(f"step 1 of 3: making a virtual environment in {self._venv}")
        command = [sys.executable, "-m", "venv", "--clear"]
        if _succeeds([*command, str(self._venv)]):
            return
        # Debian keeps ensurepip in a package of its own; a pip beside this interpreter will do.
        made = _run([*command, "--without-pip", str(self._venv)]) == 0
        helper = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "pip"]
        if not made or _run(helper) != 0:
            raise InstallError(
                f"{sys.executable} could not make a virtual environment with pip (its messages are above); "
                "on Debian and Ubuntu: apt install python3.11-venv"
            )

    def _ensure_torch(self) -> None:
        """Have the CPU build in place before pip would choose the CUDA one."""
        if self._options.cuda or not self._machine.takes_cpu_build():
            return
        pin = self._torch_pin()
        name, _, version = pin.partition("==")
        if list(self._packages.glob(f"{name}-{version}+*.dist-info")):
            return
        cpu = f"{pin}+cpu"
        if index := self._options.torch_index:
            self._run_pip("install", cpu, "--extra-index-url", index)
        elif _succeeds([*self._pip, "install", "--dry-run", "--no-deps", "--quiet", cpu]):
            self._run_pip("install", cpu)
        elif unwanted := self._cuda_requirements(pin):
            raise InstallError(
                f"there is no NVIDIA driver here, and pip's package sources offer {name} {version} only with "
                f"{len(unwanted)} CUDA packages ({unwanted[0]}, …), gigabytes that would be of no use. "
                "Either name the index of PyTorch's CPU wheels (its installation page shows it):\n"
                "    tools/up --torch-index URL      or set PIP_EXTRA_INDEX_URL=URL\n"
                "or accept the download:\n"
                "    tools/up --cuda"
            )

    def _torch_pin(self) -> str:
        project = tomllib.loads((self._root / "pyproject.toml").read_text())
        pins: list[str] = [pin for pin in project["project"]["dependencies"] if pin.startswith("torch==")]
        return pins[0]

    def _cuda_requirements(self, pin: str) -> list[str]:
        """The CUDA packages that this torch asks for, from its own metadata and without fetching them."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            self._run_pip("install", "--dry-run", "--no-deps", "--quiet", "--report", str(report), pin)
            plan = json.loads(report.read_text())
        required = [need for item in plan["install"] for need in item["metadata"].get("requires_dist", [])]
        return [
            need.split(";")[0].strip()
            for need in required
            if need.startswith(("nvidia-", "cuda-")) and "extra ==" not in need
        ]

    def _run_pip(self, *arguments: str) -> None:
        if code := run_pip(self._pip, arguments):
            raise InstallError(f"`pip {' '.join(arguments)}` failed with exit code {code}; see above")


def say(text: str) -> None:
    """Tell the person at the terminal what is going on; stdout is for results."""
    print(f"estafet: {text}", file=sys.stderr, flush=True)


def _run(command: Sequence[str]) -> int:
    """Run to the end with all output on stderr; the exit code."""
    with running(command, stop=signal.SIGTERM, stdout=2) as child:
        return child.wait()


def _succeeds(command: Sequence[str]) -> bool:
    """Run quietly, where failing is an answer and not an error."""
    null = subprocess.DEVNULL
    with running(command, stop=signal.SIGINT, stdout=null, stderr=null) as child:
        return child.wait() == 0
