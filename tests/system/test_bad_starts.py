"""What cannot start says why in one line, at once, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import socket
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGUFReader
from gguf_files import write_tiny_gguf
from launches import Launch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]

PROMISED_S = 2.0
SLACK_S = 2.0
"""For a test machine that is busy with other things."""


def refused(
    tmp_path: Path, code: int, *says: str, topology: str = "local", settings: tuple[str, ...]
) -> None:
    """The launch ends with this code and exactly one line that says all this."""
    with Launch(tmp_path, topology, *settings, ESTAFET_CACHE=str(tmp_path / "cache")) as launch:
        assert launch.wait() == code, launch.said
        took = time.monotonic() - launch.began
        line, *more = launch.said.splitlines()
        assert more == [], launch.said
        assert line.startswith("estafet: ")
        for text in says:
            assert text in line
        print(f"exit code {code} after {took:.2f} s: {line}")
        assert took < PROMISED_S + SLACK_S


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param(("kv.pagez=7",), ("kv.pagez = 7", "unknown key", "pages"), id="unknown key"),
        pytest.param(('kv.pages="many"',), ("kv.pages = 'many'", "expected int"), id="wrong type"),
        pytest.param(("gateway.frnt.port=0",), ("no gateway 'frnt'", "front"), id="unknown actor"),
        pytest.param(('worker.prefill.role="decode"',), ("no worker can prefill",), id="nobody prefills"),
    ],
)
def test_a_wrong_topology(tmp_path: Path, settings: tuple[str, ...], says: tuple[str, ...]) -> None:
    refused(tmp_path, 2, *says, settings=settings)


def test_two_gateways_on_one_port(tmp_path: Path) -> None:
    path = tmp_path / "twins.toml"
    path.write_text("[gateway.front]\nport = 8123\n[gateway.back]\nport = 8123\n[worker.w]\nrole = 'both'\n")
    settings = ("gateway.front.port=8123",)  # back from the 0 that every launch of the tests is given
    refused(tmp_path, 2, "gateway.back.port = 8123", "gateway.front", topology=str(path), settings=settings)


def test_a_missing_topology_file(tmp_path: Path) -> None:
    refused(tmp_path, 2, "nowhere.toml", "no such topology file", topology="nowhere.toml", settings=())


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(tmp_path, 3, f"127.0.0.1:{port}", "in use", settings=(f"gateway.front.port={port}",))


def test_a_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "absent.gguf"
    refused(tmp_path, 3, str(path), "no such file", settings=(f'model.path="{path}"',))


def test_a_truncated_model(tmp_path: Path, model_file: Path) -> None:
    path = tmp_path / "half.gguf"
    shutil.copyfile(model_file, path)
    os.truncate(path, model_file.stat().st_size // 2)
    refused(tmp_path, 3, str(path), settings=(f'model.path="{path}"',))


def test_scales_that_are_not_numbers(tmp_path: Path, model_file: Path) -> None:
    """One Q8_0 block of the real model has NaN for a scale; it lies in the last such tensor."""
    path = tmp_path / "nan.gguf"
    shutil.copyfile(model_file, path)
    tensor = [tensor for tensor in GGUFReader(path).tensors if tensor.tensor_type.name == "Q8_0"][-1]
    with path.open("r+b") as stream:
        stream.seek(int(tensor.data_offset))
        stream.write(np.array([np.nan], np.float16).tobytes())
    refused(tmp_path, 3, str(path), tensor.name, "NaN", settings=(f'model.path="{path}"',))


def test_a_small_model_with_a_number_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, edit=lambda tensors: tensors["output_norm.weight"].fill(np.inf))
    refused(tmp_path, 3, str(path), "output_norm.weight", settings=(f'model.path="{path}"',))
