"""Other engines on this machine: finding their programs, running them, reading what they print.

Known are llama.cpp's `llama-bench` and `llama-batched-bench`, `llama-quantize` for the variants of a
model that they are measured with, and OpenVINO GenAI in whatever Python it is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools import children
from tools.install import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LLAMA_BENCH, LLAMA_BATCHED, LLAMA_QUANTIZE = "llama-bench", "llama-batched-bench", "llama-quantize"
LLAMA_PROGRAMS = (LLAMA_BENCH, LLAMA_BATCHED, LLAMA_QUANTIZE)
OPENVINO = "openvino-genai"
FOLDERS = ("", "bin", "build/bin")
"""Where in the folder that a person names the programs may lie."""
PATIENCE_S = 900.0
"""A run of a peer that takes longer has failed; a loaded machine can make it ten times slower."""
VARIANTS = ("Q8_0", "F16")

HOW_TO_GET = f"""\
llama.cpp ({", ".join(LLAMA_PROGRAMS)}): the source package of llama-cpp-python has it.
    pip download --no-deps --no-binary :all: llama-cpp-python && tar -xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DBUILD_SHARED_LIBS=OFF
    cmake --build build -j2 --target {" ".join(LLAMA_PROGRAMS)}
  and then --llama-bin build/bin, or ESTAFET_PEERS=build/bin in the environment.
OpenVINO GenAI: in an environment of its own,
    python -m venv peers && peers/bin/pip install openvino-genai
  and then --openvino-python peers/bin/python."""


class PeerFailed(Exception):
    """A peer is not there, or did not do what it was asked; one line for a person."""


@dataclass(frozen=True, slots=True)
class Peers:
    """What is installed: programs by their names, and a Python that has OpenVINO GenAI."""

    programs: Mapping[str, Path]
    openvino_python: Path | None

    @property
    def missing(self) -> list[str]:
        """Names of those that are not there."""
        absent = [name for name in LLAMA_PROGRAMS if name not in self.programs]
        return absent if self.openvino_python else [*absent, OPENVINO]

    def program(self, name: str) -> Path:
        """Where a program is; PeerFailed when it is nowhere."""
        if name not in self.programs:
            raise PeerFailed(f"{name} is not installed")
        return self.programs[name]


def find_peers(llama_bin: Path | None, openvino_python: Path | None) -> Peers:
    """Look into the folder given, that of $ESTAFET_PEERS and PATH; for OpenVINO also into our Python.

    PeerFailed when a place that was named has not what it should.
    """
    named = [folder for folder in (llama_bin, _folder_of_environment()) if folder is not None]
    places = [str(folder / inside) for folder in named for inside in FOLDERS]
    path = os.pathsep.join([*places, os.environ.get("PATH", os.defpath)])
    found = {name: Path(where) for name in LLAMA_PROGRAMS if (where := shutil.which(name, path=path))}
    if llama_bin is not None and not any(shutil.which(name, path=os.pathsep.join(places)) for name in found):
        raise PeerFailed(f"--llama-bin {llama_bin}: there is none of {', '.join(LLAMA_PROGRAMS)}")
    if openvino_python is not None:
        if not _has_openvino(openvino_python):
            raise PeerFailed(f"--openvino-python {openvino_python}: it cannot import openvino_genai")
        return Peers(found, openvino_python)
    ours = Path(sys.executable)
    return Peers(found, ours if _has_openvino(ours) else None)


def _folder_of_environment() -> Path | None:
    value = os.environ.get("ESTAFET_PEERS")
    return Path(value).expanduser() if value else None


def _has_openvino(python: Path) -> bool:
    code = "import importlib.util as u; raise SystemExit(u.find_spec('openvino_genai') is None)"
    try:
        return (
            subprocess.run([python, "-c", code], capture_output=True, check=False, timeout=60).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


# ── running them ──────────────────────────────────────────────────────────────────────────────


def output_of(command: Sequence[str | Path], patience_s: float = PATIENCE_S) -> str:
    """What a program prints on stdout; PeerFailed with its last line when it fails or takes too long."""
    words = [str(word) for word in command]
    name = Path(words[0]).name
    try:
        with children.running(
            words, stop=signal.SIGTERM, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            out, errors = child.communicate(timeout=patience_s)
    except OSError as error:
        raise PeerFailed(f"{name}: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"{name}: not done after {patience_s:g} s") from error
    if child.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise PeerFailed(f"{name}: exit code {child.returncode}: {lines[-1] if lines else 'it says nothing'}")
    return out.decode(errors="replace")


class Batched(NamedTuple):
    """What llama-batched-bench tells of one combination; all in tokens a second."""

    prefill: float
    decode: float
    total: float
    """All tokens, of prompts and answers, by the whole time."""
    batch: int
    """Rows of a batch at most, and of one of the parts it is computed in."""
    part: int


def read_bench(text: str, prompt: int, generated: int) -> float:
    """Tokens a second of one test in the JSON of `llama-bench -o json`; PeerFailed when it is not there."""
    try:
        for test in json.loads(text):
            if (test["n_prompt"], test["n_gen"]) == (prompt, generated):
                return float(test["avg_ts"])
    except (ValueError, LookupError, TypeError) as error:
        raise PeerFailed(f"{LLAMA_BENCH}: this is not its JSON ({error})") from error
    raise PeerFailed(f"{LLAMA_BENCH}: no test of {prompt} in and {generated} out in what it printed")


def read_batched(text: str, prompt: int, generated: int, sequences: int) -> Batched:
    """One combination in the lines of `llama-batched-bench --output-format jsonl`.

    It leaves out without a word what does not fit its context: then a PeerFailed.
    """
    try:
        for line in text.splitlines():
            if line.startswith("{"):
                test = json.loads(line)
                if (test["pp"], test["tg"], test["pl"]) == (prompt, generated, sequences):
                    return Batched(
                        prefill=float(test["speed_pp"]),
                        decode=float(test["speed_tg"]),
                        total=float(test["speed"]),
                        batch=int(test["n_batch"]),
                        part=int(test["n_ubatch"]),
                    )
    except (ValueError, LookupError, TypeError) as error:
        raise PeerFailed(f"{LLAMA_BATCHED}: these are not its lines ({error})") from error
    raise PeerFailed(f"{LLAMA_BATCHED}: nothing of {sequences} × ({prompt} + {generated}) in what it printed")


def llama_bench(peers: Peers, model: Path, prompt: int, generated: int, threads: int) -> float:
    """Tokens a second of prefill (`generated` 0) or of decode from an empty context (`prompt` 0)."""
    sizes = {"-m": model, "-p": prompt, "-n": generated, "-r": 1, "-t": threads}
    options = [str(word) for pair in sizes.items() for word in pair]
    text = output_of([peers.program(LLAMA_BENCH), *options, "-o", "json"])
    return read_bench(text, prompt, generated)


def llama_batched(
    peers: Peers, model: Path, prompt: int, generated: int, sequences: int, threads: int
) -> Batched:
    """All prompts in batches of 2,048 rows computed 512 at a time, then decode of all sequences together."""
    # A sequence's share of the context is rounded up to 256 positions.
    context = sequences * -(-(prompt + generated) // 256) * 256
    sizes = {"-m": model, "-c": context, "-npp": prompt, "-ntg": generated, "-npl": sequences, "-t": threads}
    options = [str(word) for pair in sizes.items() for word in pair]
    fixed = ["-b", "2048", "-ub", "512", "--output-format", "jsonl"]
    text = output_of([peers.program(LLAMA_BATCHED), *options, *fixed])
    return read_batched(text, prompt, generated, sequences)


def openvino(
    peers: Peers,
    model: Path,
    prompt: int,
    generated: int,
    sequences: int,
    threads: int,
    vocabulary: int,
    precision: str,
) -> dict[str, Any]:
    """What tools/peer_openvino.py prints of one job."""
    if peers.openvino_python is None:
        raise PeerFailed(f"{OPENVINO} is not installed")
    sizes = {
        "--threads": threads,
        "--sequences": sequences,
        "--input": prompt,
        "--output": generated,
        "--vocabulary": vocabulary,
        "--precision": precision,
    }
    options = [str(word) for pair in sizes.items() for word in pair]
    script = Path(__file__).with_name("peer_openvino.py")
    text = output_of([peers.openvino_python, script, model, *options])
    try:
        found = json.loads(text.strip().splitlines()[-1])
        found["total_tok_s"] = float(found["total_tok_s"])
    except (ValueError, LookupError, TypeError) as error:
        raise PeerFailed(f"{OPENVINO}: unexpected output ({error})") from error
    return dict(found)


# ── variants of the model ─────────────────────────────────────────────────────────────────────


def variant(peers: Peers, source: Path, kind: str, folder: Path, threads: int) -> Path:
    """The model in another weight format, made from the GGUF file `source` unless it is in the folder.

    The file's name has what decides over its content, so that another source gets another file.
    """
    facts = source.stat()
    identity = f"{source.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}"
    key = hashlib.blake2b(os.fsencode(identity), digest_size=4).hexdigest()
    target = folder / f"{source.stem}.{kind}-{key}.gguf"
    if target.exists():
        return target
    program = peers.program(LLAMA_QUANTIZE)
    say(f"making {target.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as temporary:
            part = Path(temporary) / target.name
            output_of([program, "--allow-requantize", source, part, kind, str(threads)])
            part.replace(target)
    except OSError as error:
        raise PeerFailed(
            f"{target}: {error.strerror or error}; set ESTAFET_CACHE to a folder with room"
        ) from error
    return target
