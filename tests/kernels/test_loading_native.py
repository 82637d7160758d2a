"""Where the compiled kernels come from, and what is said when there are none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from engine.errors import StartError
from kernels.cpu import native
from tools import native as check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "kernels.cpu._native"


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    native.cache_clear()
    yield
    native.cache_clear()


def test_another_build_is_taken_when_its_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_native.py").write_text("answer = 42\n")
    monkeypatch.setenv("ESTAFET_NATIVE_PATH", str(tmp_path))
    module = native()
    assert module.answer == 42
    assert module.__name__ == NAME
    assert sys.modules[NAME] is module
    assert native() is module


def test_a_folder_without_one_is_an_error_and_not_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTAFET_NATIVE_PATH", str(tmp_path))
    with pytest.raises(StartError, match="no `_native` in the folder that ESTAFET_NATIVE_PATH names"):
        native()


def test_without_an_extension_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESTAFET_NATIVE_PATH", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NothingNative(), *sys.meta_path])
    with pytest.raises(StartError, match=r"install g\+\+ and run tools/up"):
        native()


def test_one_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_native.py").write_text("raise ImportError('undefined symbol: x')\n")
    monkeypatch.setenv("ESTAFET_NATIVE_PATH", str(tmp_path))
    with pytest.raises(StartError, match="undefined symbol: x"):
        native()


@pytest.mark.parametrize(("lacking", "code"), [(None, 1), ("no compiler", 0)])
def test_the_check_fails_only_where_it_could_be_built(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lacking: str | None,
    code: int,
) -> None:
    monkeypatch.setenv("ESTAFET_NATIVE_PATH", str(tmp_path))
    monkeypatch.setattr(check, "lacking", lambda: lacking)
    assert check.main() == code
    assert (lacking or "there is no `_native`") in capsys.readouterr().out
    (tmp_path / "_native.py").touch()
    assert check.main() == 0


class NothingNative:
    """A finder that does not find the extension."""

    def find_spec(self, name: str, *_where: object) -> None:
        if name == NAME:
            raise ModuleNotFoundError(name=name)
