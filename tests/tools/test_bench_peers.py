"""The comparison with other engines: what they print, its rounds and ratios, its table, and a run of it all.

The peers of these tests are small programs that print what the real ones printed on some machine.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf_files import write_tiny_gguf
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EstafetError
from engine.model import ModelConfig
from kernels.cpu import native
from kernels.formats import WeightFormat
from kernels.prepare import prepare
from tools import bench, bench_pinned, figures
from tools.bench_client import Outcome
from tools.bench_load import BenchFailed
from tools.bench_ours import Driven, Piece, Spent, first_rows, job_flops, matrix_bytes
from tools.bench_ratios import ROWS, markdown, missing, ratios
from tools.bench_rounds import Contender, Cores, Findings
from tools.peers import (
    HOW_TO_GET,
    LLAMA_PROGRAMS,
    PeerFailed,
    Peers,
    find_peers,
    llama_batched,
    llama_bench,
    openvino,
    output_of,
    read_batched,
    read_bench,
    variant,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]

# What the programs printed, some lines of no interest left out.
BENCH = """[
  {
    "build_commit": "0c1e570",
    "model_filename": "SmolLM2-135M-Instruct.Q8_0.gguf",
    "n_threads": 2, "type_k": "f16", "flash_attn": -1,
    "n_prompt": 512,
    "n_gen": 0,
    "avg_ns": 1022612208, "avg_ts": 500.741794, "stddev_ts": 6.865668,
    "samples_ts": [ 492.841, 504.125, 505.259 ]
  },
  {
    "build_commit": "0c1e570",
    "n_prompt": 0,
    "n_gen": 128,
    "avg_ns": 1015927030, "avg_ts": 126.164937, "stddev_ts": 5.660769,
    "samples_ts": [ 131.171, 120.022, 127.302 ]
  }
]
"""
BATCHED = (
    '{"n_kv_max": 8192, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, '
    '"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 128, "tg": 64, "pl": 32, "n_kv": 6144, '
    '"t_pp": 5.646887, "speed_pp": 725.353699, "t_tg": 4.978227, "speed_tg": 411.391357, "t": 10.625114, '
    '"speed": 578.251892}\n\n'
)
OPENVINO = {
    "version": "2026.4.1.0-3408-ab01d1771e4",
    "seconds": 6.123,
    "total_tok_s": 1003.3851676062884,
    "precision": "bf16",
    "batched_tokens": 256,
    "prefix_caching": False,
}

# ── what they print ───────────────────────────────────────────────────────────────────────────


def test_llama_bench_is_read_by_its_sizes() -> None:
    assert read_bench(BENCH, 512, 0) == 500.741794
    assert read_bench(BENCH, 0, 128) == 126.164937
    with pytest.raises(PeerFailed, match="no test of 0 in and 64 out"):
        read_bench(BENCH, 0, 64)


def test_llama_batched_bench_is_read_by_its_sizes() -> None:
    found = read_batched(BATCHED, 128, 64, 32)
    assert found == (725.353699, 411.391357, 578.251892, 2048, 512)
    assert found.total == 578.251892
    with pytest.raises(PeerFailed, match=r"nothing of 16 × \(128 \+ 64\)"):
        read_batched(BATCHED, 128, 64, 16)
    with pytest.raises(PeerFailed, match="nothing of 32"):
        read_batched("\n", 128, 64, 32)


@pytest.mark.parametrize("text", ["", "[", "no", '[{"n_prompt": 0}]', "[1]", '{"a": 1}', "3"])
def test_what_is_not_their_output_is_told(text: str) -> None:
    with pytest.raises(PeerFailed, match="llama-bench"):
        read_bench(text, 0, 128)
    with pytest.raises(PeerFailed, match="llama-batched-bench"):
        read_batched(text, 128, 64, 32)


# ── programs ──────────────────────────────────────────────────────────────────────────────────

FAKE_BENCH = f"""
sizes = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert open(sizes["-m"], "rb").read(), sizes
assert (sizes["-t"], sizes["-r"], sizes["-o"]) == ("2", "1", "json")
assert (sizes["-p"], sizes["-n"]) in (("0", "128"), ("512", "0"))
print({BENCH!r})
"""
FAKE_BATCHED = f"""
sizes = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert open(sizes["-m"], "rb").read(), sizes
assert int(sizes["-c"]) == 32 * 256, "a sequence's share is rounded up"
speed = 578.251892 if "Q8_0" in sizes["-m"] else 500.5
print({BATCHED!r}.replace("578.251892", str(speed)))
"""
FAKE_QUANTIZE = """
allow, source, target, kind, threads = sys.argv[1:]
assert allow == "--allow-requantize" and threads == "2"
open(target, "wb").write(kind.encode() + open(source, "rb").read())
"""
FAKE_PYTHON = f"""
if sys.argv[1] == "-c":
    sys.exit("openvino_genai" not in sys.argv[2])
import json
sizes = dict(zip(sys.argv[3::2], sys.argv[4::2]))
assert sys.argv[1].endswith("peer_openvino.py") and "F16" in sys.argv[2]
assert [sizes[name] for name in ("--sequences", "--input", "--output")] == ["32", "128", "64"]
found = dict({OPENVINO!r}, precision=sizes["--precision"].replace("default", "bf16"))
if sizes["--precision"] == "f32":
    found["total_tok_s"] = 646.8
print("a line of somebody else's", json.dumps(found), sep=chr(10))
"""


def program(path: Path, code: str) -> Path:
    """An executable that runs the code."""
    path.write_text(f"#!{sys.executable}\nimport sys\n{code}")
    path.chmod(0o755)
    return path


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder with fake peers: llama.cpp's programs, and `python` which has OpenVINO."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    codes = zip(LLAMA_PROGRAMS, (FAKE_BENCH, FAKE_BATCHED, FAKE_QUANTIZE), strict=True)
    for name, code in codes:
        program(folder / name, code)
    program(folder / "python", FAKE_PYTHON)
    return folder


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No peer on PATH or in the environment; a cache of our own."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("ESTAFET_PEERS", raising=False)
    monkeypatch.setenv("ESTAFET_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("nothing_installed")
def test_peers_are_found_where_they_may_be(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = find_peers(None, None)
    assert none == Peers({}, None)
    assert none.missing == [*LLAMA_PROGRAMS, "openvino-genai"]
    everything = {name: fakes / name for name in LLAMA_PROGRAMS}
    assert find_peers(fakes, fakes / "python") == Peers(everything, fakes / "python")
    monkeypatch.setenv("PATH", str(fakes))
    assert find_peers(None, None).programs == everything
    monkeypatch.setenv("PATH", "/bin")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "bin").symlink_to(fakes)
    monkeypatch.setenv("ESTAFET_PEERS", str(tmp_path / "built"))
    assert set(find_peers(None, None).programs) == set(everything)


@pytest.mark.usefixtures("nothing_installed")
def test_a_place_that_was_named_must_have_them(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="there is none of llama-bench"):
        find_peers(tmp_path, None)
    for python in (tmp_path / "absent", Path(sys.executable)):
        with pytest.raises(PeerFailed, match="cannot import openvino_genai"):
            find_peers(None, python)


def test_how_to_get_names_every_program() -> None:
    assert all(name in HOW_TO_GET for name in (*LLAMA_PROGRAMS, "openvino-genai", "--openvino-python"))


def test_programs_that_fail_say_why(tmp_path: Path) -> None:
    broken = program(tmp_path / "broken", "print('out'); sys.exit('first\\nno such model')")
    with pytest.raises(PeerFailed, match=r"^broken: exit code 1: no such model$"):
        output_of([broken])
    silent = program(tmp_path / "silent", "sys.exit(3)")
    with pytest.raises(PeerFailed, match="silent: exit code 3: it says nothing"):
        output_of([silent])
    with pytest.raises(PeerFailed, match="absent: No such file"):
        output_of([tmp_path / "absent"])
    endless = program(tmp_path / "endless", "import signal; signal.pause()")
    with pytest.raises(PeerFailed, match=r"endless: not done after 0\.5 s"):
        output_of([endless], patience_s=0.5)


@pytest.mark.usefixtures("nothing_installed")
def test_peers_are_run_with_their_own_options(fakes: Path, tmp_path: Path) -> None:
    model = tmp_path / "model-F16.gguf"
    model.write_bytes(b"weights")
    peers = find_peers(fakes, fakes / "python")
    assert llama_bench(peers, model, 0, 128, 2) == 126.164937
    assert llama_batched(peers, model, 128, 64, 32, 2).total == 500.5
    assert openvino(peers, model, 128, 64, 32, 2, 320, "f32")["precision"] == "f32"
    for call in (
        functools.partial(llama_bench, Peers({}, None), model, 0, 128, 2),
        functools.partial(openvino, Peers({}, None), model, 128, 64, 32, 2, 320, "f32"),
    ):
        with pytest.raises(PeerFailed, match="is not installed"):
            call()


@pytest.mark.usefixtures("nothing_installed")
def test_variants_are_made_once_for_each_source(fakes: Path, tmp_path: Path) -> None:
    source, folder = tmp_path / "m.Q4_1.gguf", tmp_path / "variants"
    source.write_bytes(b"one")
    peers = find_peers(fakes, None)
    made = variant(peers, source, "Q8_0", folder, 2)
    assert made.read_bytes() == b"Q8_0one"
    assert variant(Peers({}, None), source, "Q8_0", folder, 2) == made, "it is there: nobody is asked"
    source.write_bytes(b"another")
    other = variant(peers, source, "Q8_0", folder, 2)
    assert (other != made, other.read_bytes()) == (True, b"Q8_0another")
    program(fakes / "llama-quantize", "open(sys.argv[3], 'w').write('half'); sys.exit('disk full')")
    with pytest.raises(PeerFailed, match="disk full"):
        variant(peers, source, "F16", folder, 2)
    assert sorted(folder.iterdir()) == sorted([made, other]), "nothing half made stays"


FAKE_GENAI = """
class SchedulerConfig:
    max_num_batched_tokens = 256
    enable_prefix_caching = False
class GenerationConfig:
    pass
class _Result:
    def __init__(self, length):
        self.m_generation_ids = [[7] * length]
class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        assert device == "CPU" and properties["INFERENCE_NUM_THREADS"] == 2, properties
        self.hint = properties.get("INFERENCE_PRECISION_HINT")
    def generate(self, prompts, configs):
        assert len(prompts) == len(configs) == 3
        for prompt, config in zip(prompts, configs):
            assert prompt.shape == (1, 8) and 0 <= prompt.min() and prompt.max() < 50
            assert config.ignore_eos is True and config.do_sample is False
        return [_Result(config.max_new_tokens - SHORT) for config in configs]
__version__ = "1.2"
"""
FAKE_CORE = """
def Tensor(array):
    return array
class Core:
    def get_property(self, device, name):
        return {("CPU", "INFERENCE_PRECISION_HINT"): "bf16"}[device, name]
"""


@pytest.mark.parametrize("short", [0, 1])
def test_the_openvino_script_counts_what_came(short: int, tmp_path: Path) -> None:
    (tmp_path / "openvino_genai.py").write_text(f"SHORT = {short}\n{FAKE_GENAI}")
    (tmp_path / "openvino.py").write_text(FAKE_CORE)
    sizes = ["--threads", "2", "--sequences", "3", "--input", "8", "--output", "4", "--vocabulary", "50"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "peer_openvino.py", "model.gguf", *sizes],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if short:
        assert (done.returncode, done.stdout) == (1, "")
        assert "answers have [3] tokens, not 4" in done.stderr
    else:
        found = json.loads(done.stdout)
        assert found["total_tok_s"] == pytest.approx(3 * 12 / found["seconds"])
        assert (found["version"], found["precision"], found["batched_tokens"]) == ("1.2", "bf16", 256)


# ── our side ──────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 20))
def test_prompts_are_cut_into_steps_without_loss(lengths: list[int], most: int) -> None:
    left = [Piece(n, 0, np.arange(length, dtype=np.int32)) for n, length in enumerate(lengths)]
    steps = []
    while left:
        now, left = first_rows(left, most)
        steps.append(now)
    assert all(sum(len(piece.tokens) for piece in step) == most for step in steps[:-1])
    assert 0 < sum(len(piece.tokens) for piece in steps[-1]) <= most
    rows = [
        (piece.sequence, piece.position + n, int(token), bool(piece.samples and n == len(piece.tokens) - 1))
        for step in steps
        for piece in step
        for n, token in enumerate(piece.tokens)
    ]
    assert rows == [(n, at, at, at == length - 1) for n, length in enumerate(lengths) for at in range(length)]


CONFIG = ModelConfig(
    name="m",
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn_size=1536,
    context_length=8192,
    rope_theta=1e5,
    rms_eps=1e-5,
    tied_embeddings=True,
    bos_token=1,
    eos_tokens=(2,),
    weights_id="",
)


def test_what_work_costs_at_least() -> None:
    assert matrix_bytes(CONFIG, WeightFormat("bf16", "bf16")) == 2 * 134_479_872
    assert matrix_bytes(CONFIG, WeightFormat("fp8", "bf16")) == 106_168_320 + 2 * 28_311_552
    # One token of one sequence after a prompt of one: both pass the layers and are sampled; they see 1 and 2.
    attention = 2 * 30 * 576 * (1 + 2)
    assert job_flops(CONFIG, 1, 1, 1) == 2 * (2 * 134_479_872 + attention)
    # Of a prompt of two the first row ends with the last layer's keys and values.
    more = job_flops(CONFIG, 1, 2, 1) - job_flops(CONFIG, 1, 1, 1)
    assert more == 2 * (29 * 106_168_320 // 30 + 576 * (576 + 2 * 192) + 2 * 30 * 576 * 3 - 2 * 576)
    assert job_flops(CONFIG, 32, 128, 64) == 32 * job_flops(CONFIG, 1, 128, 64)
    per_token = job_flops(CONFIG, 1, 128, 64) / 192
    assert 230e6 < per_token < 270e6


def test_what_is_spent() -> None:
    phases = {"qkv": 1.0, "output": 0.5, "ffn": 2.0, "head": 0.5, "attention": 0.25, "sample": 0.25}
    spent = Spent(wall_s=6.0, tokens=12, steps_wall_s=5.0, phases=phases)
    assert (spent.rate, spent.matrices_s) == (2.0, 4.0)
    assert spent.outside_native == pytest.approx(0.1)
    assert Spent(6.0, 12, 5.0, None).outside_native is None


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny model's GGUF file."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_a_driven_backend_is_given_every_position_once(tiny: Path, tmp_path: Path) -> None:
    driven = Driven("torch", prepare(tiny, tmp_path), 3, 40, threads=1, kv="float32")
    steps: list[Any] = []
    real = driven.backend.step

    def step(rows: Any) -> Any:
        steps.append((rows, real(rows)))
        return steps[-1][1]

    driven.backend.step = step  # type: ignore[method-assign]
    job = driven.job(prompt=10, generated=4, prefill_rows=16)
    assert (job.prefill.tokens, job.decode.tokens) == (30, 12)
    assert job.rate == pytest.approx(42 / (job.prefill.wall_s + job.decode.wall_s))
    assert [len(rows.token) for rows, _ in steps] == [16, 14, 3, 3, 3, 3]
    assert [int(rows.needs_logits.sum()) for rows, _ in steps] == [1, 2, 3, 3, 3, 3]
    fed = [rows.token.tolist() for rows, _ in steps[2:]]
    made = [result.tokens.tolist() for _, result in steps]
    assert fed == [[*made[0], *made[1]], *made[2:-1]], "each token is what the step before sampled"
    steps.clear()
    driven.decode(5)
    assert [int(rows.position[0]) for rows, _ in steps] == [0, 0, 1, 2, 3, 4], "the first warms up"
    steps.clear()
    one, five = driven.step_times(8)
    assert one > 0
    assert five > 0
    assert {len(rows.token) for rows, _ in steps[1:]} == {1, 5}
    assert all(rows.position[0] == 8 and rows.needs_logits.all() for rows, _ in steps[1:])
    assert steps[2][0].is_draft.tolist() == [False, True, True, True, True]


# ── rounds and ratios ─────────────────────────────────────────────────────────────────────────


def others(monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> None:
    """What others take of the cores in each round."""
    left = iter(shares)
    monkeypatch.setattr(Cores, "others_since", lambda _self, _before: next(left))


def test_rounds_are_interleaved_and_a_failure_ends_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, [0.0, 0.01, 0.02])
    asked: list[str] = []

    def measure(name: str, values: list[float | None]) -> Callable[[], dict[str, float | None]]:
        left = iter(values)

        def once() -> dict[str, float | None]:
            asked.append(name)
            value = next(left, "over")
            if value == "over":
                raise PeerFailed("it\nbroke")
            return {name: value}  # type: ignore[dict-item]

        return once

    findings = Findings()
    contenders = [
        Contender("a", ("a",), measure("a", [1.0, 5.0, 2.0])),
        Contender("b", ("b", "b2"), measure("b", [])),
        Contender("c", ("c",), measure("c", [None, None, None])),
    ]
    findings.rounds("part", contenders, 3)
    assert asked == ["a", "b", "c", "a", "c", "a", "c"]
    assert findings.medians() == {"a": 2.0, "others_part": 0.01}
    assert findings.reasons == {"b": "it broke", "b2": "it broke", "c": "c: the backend does not tell"}


def test_rounds_that_others_disturbed_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, [0.5, 0.0, 0.9, 0.01, 0.6])
    for spare, values in ((9, [2.0, 4.0]), (0, [2.0, 1.0])):
        count = iter([1.0, 2.0, 3.0, 4.0, 5.0])
        findings = Findings()
        if not spare:
            others(monkeypatch, [0.5, 0.0])
        contender = Contender("a", ("a",), lambda count=count: {"a": next(count)})  # type: ignore[misc]
        findings.rounds("part", [contender], 2, spare)
        assert findings.values["a"] == values


def test_our_own_work_is_not_that_of_others() -> None:
    before = Cores(at=0.0, all_s=100.0, own_s=10.0)
    wall = 2.0
    quarter = wall * (os.cpu_count() or 1) / 4
    assert Cores(2.0, 100.0 + 1.5, 10.0 + 1.5).others_since(before) == 0.0
    assert Cores(2.0, 100.0 + 1.5 + quarter, 10.0 + 1.5).others_since(before) == pytest.approx(0.25)
    now = Cores.now()
    assert 0.0 <= now.own_s <= now.all_s


MEDIANS = {
    "ours_decode_tok_s": 135.0,
    "llamacpp_q8_decode_tok_s": 100.0,
    "ours_bandwidth_share": 0.8,
    "floor_bytes_s": 10e9,
    "floor_flop_s": 200e9,
    "ours_step1_s": 0.005,
    "ours_step5_s": 0.009,
    "ours_total32_tok_s": 600.0,
    "llamacpp_q8_total32_tok_s": 400.0,
    "llamacpp_f16_total32_tok_s": 300.0,
    "utilisation": 0.95,
    "others_step5": 0.3,
}


def findings_of(medians: dict[str, float]) -> Findings:
    findings = Findings()
    for name, value in medians.items():
        findings.values[name].append(value)
    return findings


def test_the_floor_is_the_best_of_all_rounds() -> None:
    findings = Findings()
    findings.values["floor_bytes_s"] += [1.0, 4.0, 2.0]
    findings.values["ours_matrix_bytes_s"] += [1.0, 4.0, 2.0]
    assert findings.medians() == {"floor_bytes_s": 4.0, "ours_matrix_bytes_s": 2.0}


def test_ratios_are_of_medians_and_tell_what_they_miss() -> None:
    findings = findings_of(MEDIANS)
    findings.reasons["openvino_total32_tok_s"] = "openvino-genai is not installed"
    medians = findings.medians()
    found = ratios(medians)
    assert set(found) == {row.name for row in ROWS}
    assert {name: value for name, value in found.items() if value is not None} == {
        "decode_b1_vs_llamacpp_q8": 1.35,
        "bandwidth_share_fp8": 0.8,
        "step5_over_step1": pytest.approx(1.8),
        "total32_vs_llamacpp_best": 1.5,
        "utilisation_32": 0.95,
    }
    why = missing(found, findings, ["decode", "total32", "step5", "utilisation", "pd"])
    assert set(why) == {name for name, value in found.items() if value is None}
    assert why["total32_vs_openvino"] == "openvino-genai is not installed"
    assert why["prefill512_vs_llamacpp_f16"].startswith("not asked for")
    assert why["pd_itl_p99_ratio"] == "no figure pd_loaded_p99_ms or pd_unloaded_p99_ms"


def test_one_variant_of_llamacpp_is_enough_and_none_is_told() -> None:
    medians = findings_of({"llamacpp_f16_total32_tok_s": 3.0, "ours_total32_tok_s": 6.0}).medians()
    assert ratios(medians)["total32_vs_llamacpp_best"] == 2.0
    none = Findings(reasons={"llamacpp_f16_total32_tok_s": "gone"})
    assert missing(ratios(none.medians()), none, ["total32"])["total32_vs_llamacpp_best"] == "gone"


def test_the_issue_asks_for_these_ratios() -> None:
    wanted = (
        "decode_b1_vs_llamacpp_q8 decode_b1_vs_own_bf16 total32_vs_openvino total32_vs_llamacpp_best "
        "prefill512_vs_llamacpp_f16 step5_over_step1 outside_native_b1 outside_native_b32 "
        "fma_floor_share_total32 bandwidth_share_fp8 bandwidth_share_bf16 utilisation_32 pd_itl_p99_ratio"
    )
    assert set(wanted.split()) <= {row.name for row in ROWS}


def report_of_medians(medians: dict[str, float], why: dict[str, str]) -> dict[str, Any]:
    return {
        "bench": "peers",
        "machine": {"cpu": "A Processor", "cores": 2, "memory": "8 GiB"},
        "load_before": 0.1,
        "date": "2026-01-02",
        "commit": "abc",
        "seed": 0,
        "command": "python -m tools.bench peers",
        "model": "Model",
        "rounds": 5,
        "threads": 2,
        "kv": "float16",
        "weights": "fp8",
        "activations": "bf16",
        "openvino": {"version": "1", "precision": "bf16"},
        "schedules": {"ours": "steps of 512 rows"},
        "ratios": ratios(medians),
        "missing": why,
        "medians": medians,
    }


def test_the_table_has_bars_and_says_what_is_met(tmp_path: Path) -> None:
    findings = findings_of(MEDIANS)
    findings.reasons["openvino_total32_tok_s"] = "openvino-genai is not installed"
    medians = findings.medians()
    why = missing(ratios(medians), findings, ["decode", "total32", "step5", "utilisation"])
    report = report_of_medians(medians, why)
    lines = markdown(report)
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines}
    decode = rows["batch-1 decode, tokens/s: FP8, against llama.cpp Q8_0"]
    assert decode == ["135", "100", "1.35", "≥ 1.35", "met |"]
    step5 = rows["seconds of a step of 5 rows, against a step of 1"]
    assert step5 == ["9.0 ms", "5.0 ms", "1.80", "≤ 1.6", "missed (others took 30 % of the cores) |"]
    best = "32 sequences, all tokens/s: against llama.cpp, best of Q8_0 and F16 (here Q8_0)"
    assert rows[best] == ["600", "400", "1.50", "≥ 1.4", "met |"]
    share = rows["bytes/s that the FP8 matrices are read at, of the read bandwidth then"]
    assert share == ["80.0 %", "", "0.800", "≥ 0.75", "met |"]
    theirs = rows["32 sequences, all tokens/s: against OpenVINO GenAI, its own precision (bf16)"]
    assert theirs == ["600", "–", "–", "≥ 1.2", "not measured: openvino-genai is not installed |"]
    assert not any("prefill of 512" in line for line in lines), "it was not asked for"
    assert "ours: steps of 512 rows." in lines
    assert any("Our weights: fp8," in line and "activations bf16, KV float16" in line for line in lines)
    assert any("10.0 GB/s read, 200 GFLOP/s" in line for line in lines)
    file, document = tmp_path / "f.json", tmp_path / "README.md"
    file.write_text(json.dumps(report))
    begin, end = figures.marks("peers")
    document.write_text(f"{begin}\n{end}\n")
    assert figures.main([str(file), str(document)]) == 0
    assert "\n".join(lines) in document.read_text()


# ── systems ───────────────────────────────────────────────────────────────────────────────────


def test_gaps_are_told_apart_by_the_long_prompts_they_touch() -> None:
    streams = [Outcome(0.0, [1.0, 2.0, 3.5, 4.0, 7.0, 9.0]), Outcome(0.0, [6.5, 8.0])]
    windows = [bench_pinned.Window(3.0, 5.0)]
    quiet, loaded = bench_pinned.split_gaps(streams, windows, began=1.5, ended=8.5)
    assert (quiet, loaded) == ([1.5], [1.5, 0.5, 3.0])
    with pytest.raises(BenchFailed, match="only 1 inter-token times without and 3 with"):
        bench_pinned.compared(quiet, loaded, windows)
    found = bench_pinned.compared([0.01] * 200, [0.01] * 100 + [0.013] * 100, windows)
    assert found["itl_p99_ratio"] == pytest.approx(1.3)
    assert (found["unloaded_ms"]["p99"], found["loaded_ms"]["p99"]) == (10.0, 13.0)
    assert found["prefill_s"] == [2.0]


@pytest.mark.parametrize("separate", [True, False])
def test_pinned_workers_have_cores_of_their_own(separate: bool) -> None:
    tables = tomllib.loads(bench_pinned.pinned_topology([3, 5], 64, separate=separate))
    cores = {name: worker["cores"] for name, worker in tables["worker"].items()}
    assert cores == ({"prefill": [3], "decode": [5]} if separate else {"both": [3, 5]})
    assert all(worker["threads"] == len(worker["cores"]) for worker in tables["worker"].values())
    assert all(worker["role"] == name for name, worker in tables["worker"].items())


def test_launchers_are_told_of_backend_and_model() -> None:
    plan = bench_pinned.Plan(["kv.dtype=float16"], "native", "/m.gguf", 0, 100)
    words = plan.launcher(["prefill", "decode"])
    assert words[::2] == ["--set"] * 4
    assert words[1::2] == [
        "worker.prefill.backend=native",
        "worker.decode.backend=native",
        "model.path=/m.gguf",
        "kv.dtype=float16",
    ]


# ── the command ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "wrong", [["--only", "decode,nothing"], ["--rounds", "0"], ["--kv", "int4"], ["--spare", "-1"]]
)
def test_bad_usage_is_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["peers", *wrong])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_installed")
def test_files_are_looked_at_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent" / "f")
    for option in ("--json", "--model", "--q8", "--f16", "--llama-bin", "--openvino-python"):
        assert bench.main(["peers", option, absent]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert absent in said[0]


def compare(tiny: Path, tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run the command on a tiny model; the process and its JSON."""
    report = tmp_path / "figures.json"
    few = ["--rounds", "2", "--spare", "0", "--json", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "peers", "--model", str(tiny), *arguments, *few],
        cwd=ROOT,
        env=os.environ | {"ESTAFET_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done, json.loads(report.read_text()) if report.exists() else None


def test_without_peers_what_can_be_is_measured_and_the_rest_explained(tiny: Path, tmp_path: Path) -> None:
    arguments = ["--backend", "torch", "--kv", "float32", "--only", "decode,step5"]
    done, report = compare(tiny, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert HOW_TO_GET in done.stderr
    assert report["ratios"]["step5_over_step1"] > 0
    assert report["ratios"]["decode_b1_vs_llamacpp_q8"] is None
    assert report["missing"]["decode_b1_vs_llamacpp_q8"] == "llama-quantize is not installed"
    assert "one weight format only" in report["missing"]["decode_b1_vs_own_bf16"]
    assert "does not tell" in report["missing"]["outside_native_b1"]
    assert len(report["spreads"]["ours_decode_tok_s"]["rounds"]) == 2
    assert "| not measured: llama-quantize is not installed |" in done.stdout
    assert figures.table(report)


def is_built() -> bool:
    """Whether there is a native extension."""
    try:
        native()
    except EstafetError:
        return False
    return True


@pytest.mark.skipif(not is_built(), reason="the native kernels are not built")
def test_a_whole_comparison_with_the_native_backend(tiny: Path, fakes: Path, tmp_path: Path) -> None:
    where = ["--llama-bin", str(fakes), "--openvino-python", str(fakes / "python")]
    done, report = compare(tiny, tmp_path, *where, "--only", "decode,total32,prefill,step5")
    assert done.returncode == 0, done.stderr
    assert HOW_TO_GET not in done.stderr
    systems = {"utilisation_32", "pd_itl_p99_ratio", "unified_itl_p99_ratio"}
    assert {name for name, ratio in report["ratios"].items() if ratio is None} == systems
    medians = report["medians"]
    assert medians["llamacpp_q8_decode_tok_s"] == 126.164937
    assert medians["llamacpp_best_total32_tok_s"] == 578.251892
    assert medians["openvino_f32_total32_tok_s"] == 646.8
    expected = medians["ours_total32_tok_s"] / OPENVINO["total_tok_s"]  # type: ignore[operator]
    assert report["ratios"]["total32_vs_openvino"] == pytest.approx(expected)
    assert 0 < report["ratios"]["outside_native_b1"] < 1
    assert report["ratios"]["bandwidth_share_fp8"] > 0
    assert set(report["schedules"]) == {"ours", "llama.cpp", "OpenVINO GenAI"}
    assert report["command"].startswith("python -m tools.bench peers --model")
    assert str(fakes) in report["command"]
    assert sum("making" in line for line in done.stderr.splitlines()) == 2, "each variant once"
    assert figures.table(report)


@pytest.mark.system
@pytest.mark.model
@pytest.mark.skipif(not is_built(), reason="the native kernels are not built")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a core each needs two cores")
def test_a_real_system_with_a_core_each(model_file: Path) -> None:
    settings = ["kv.dtype=float32"]
    plan = bench_pinned.Plan(
        settings, "native", str(model_file), 0, long=1500, stream_output=300, quiet_s=3.0
    )
    found = bench_pinned.pinned(plan, sorted(os.sched_getaffinity(0))[:2], separate=True)
    assert found["itl_p99_ratio"] > 0
    assert min(found["gaps"]) >= bench_pinned.FEW
    assert len(found["prefill_s"]) == bench_pinned.LONG_ASKS


@pytest.mark.system
@pytest.mark.model
@pytest.mark.skipif(not is_built(), reason="the native kernels are not built")
def test_a_real_system_at_saturation(tmp_path: Path, model_file: Path) -> None:
    sizes = ["--only", "utilisation", "--kv", "float32", "--rounds", "2"]
    report = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "peers", *sizes, "--json", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert 0.3 < found["ratios"]["utilisation_32"] <= 1.0
    assert [each["errors"] for each in found["saturation"]] == [0, 0]


@pytest.mark.skipif(not is_built(), reason="the native kernels are not built")
def test_what_could_be_read_beside_a_stream_is_the_greater_of_two_looks(tiny: Path) -> None:
    folder = prepare(tiny, tiny.parent / "prepared")
    driven = Driven("native", folder, 1, 32, threads=1, kv="float16")
    looks = iter([3.0, 1.0, 2.0, 5.0])
    streamed = driven.decode_beside(lambda: next(looks), 3, 4)
    assert [looked for _, looked in streamed] == [3.0, 2.0, 5.0]
    assert all(spent.tokens == 4 and spent.matrices_s for spent, _ in streamed)
    assert next(looks, None) is None
