"""The evaluation of weight formats: its arithmetic, its windows, its text, its command and its table."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import tools.evaluate
from engine.errors import StartError, UsageError
from engine.model import WEIGHTS, read_config
from engine.testing.models import write_byte_model
from engine.text import TextCodec
from kernels.cpu import native
from kernels.cpu.backend import NativeBackend
from kernels.formats import KINDS, WeightFormat
from kernels.packed import pack
from kernels.random_model import write_random_model
from tools import figures
from tools.divergence import NotFiniteError, Predictions, Scores, standard_error
from tools.evaluate import Choice, choice_named, choices_of, main, rows_of, windows_of
from tools.prose import python_prose, read_prose

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

try:
    native()
except StartError as error:
    pytest.skip(f"needs the native kernels: {error}", allow_module_level=True)

BYTES = 259


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESTAFET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The report of a run with one thread and few tokens, unless told otherwise."""
    report = folder.parent / "report.json"
    quick = ["--tokens", "100", "--context", "40", "--threads", "1", "--rounds", "1", "--json", str(report)]
    assert main([str(folder), *quick, *arguments]) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    return found


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.longdouble]:
    """In more bits than what is tested has, in another way."""
    values = logits.astype(np.longdouble)
    values -= values.max(axis=-1, keepdims=True)
    found: NDArray[np.longdouble] = np.log(np.exp(values) / np.exp(values).sum(axis=-1, keepdims=True))
    return found


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(2, 200), st.sampled_from([0.1, 3.0, 12.0]))
def test_every_position_is_what_the_formulas_say(seed: int, rows: int, vocab: int, width: float) -> None:
    random = np.random.default_rng(seed)
    # far from zero, and moved as a whole: neither may matter
    first = (1000 + width * random.standard_normal((rows, vocab))).astype(np.float32)
    second = (first - 1500 + 0.1 * width * random.standard_normal((rows, vocab))).astype(np.float32)
    targets = random.integers(0, vocab, rows).astype(np.int32)
    p, q = log_probabilities(first), log_probabilities(second)
    ours, others = Predictions.of(first), Predictions.of(second)
    np.testing.assert_allclose(others.surprise(targets), -q[np.arange(rows), targets], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(ours.divergence(others), (np.exp(p) * (p - q)).sum(1), rtol=1e-9, atol=1e-11)
    assert (ours.agrees(others) == (first.argmax(1) == second.argmax(1))).all()
    assert (ours.divergence(ours) == 0).all()
    assert (ours.divergence(others) >= 0).all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_not_compared(wrong: float) -> None:
    logits = np.zeros((9, 5), np.float32)
    logits[8, 3] = wrong
    with pytest.raises(NotFiniteError):
        Predictions.of(logits)


def test_summaries_have_errors_of_the_right_size() -> None:
    """Standard errors are the spread of what many runs find."""
    random = np.random.default_rng(1)
    found = []
    for _ in range(400):
        base = random.gamma(2.0, 1.0, 300)
        ours, others = Scores(), Scores()
        for part in np.split(base, [100, 150]):
            others.surprises.append(part)
            ours.surprises.append(part + 0.1 + 0.05 * random.standard_normal(len(part)))
            ours.divergences.append(random.exponential(0.02, len(part)))
            ours.agreements.append(random.random(len(part)) < 0.9)
        found.append(ours.summary(others))
    for key, error in (
        ("perplexity", "perplexity_se"),
        ("perplexity_difference", "perplexity_difference_se"),
        ("kl_mean", "kl_se"),
    ):
        spread = np.std([one[key] for one in found])
        assert np.mean([one[error] for one in found]) == pytest.approx(spread, rel=0.15), key
    means = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
    assert means["kl_mean"] == pytest.approx(0.02, rel=0.05)
    assert means["kl_median"] == pytest.approx(0.02 * math.log(2), rel=0.05)
    assert means["kl_p99"] == pytest.approx(0.02 * math.log(100), rel=0.1)
    assert means["same_choice"] == pytest.approx(0.9, abs=0.01)
    assert standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0)


# ── windows and text ──────────────────────────────────────────────────────────────────────────


@given(st.integers(2, 60), st.integers(2, 25), st.booleans())
def test_every_token_is_predicted_once_from_what_is_before_it(total: int, context: int, begins: bool) -> None:
    tokens, start = list(range(100, 161)), [7] if begins else []
    windows = windows_of(tokens, start, context, total)
    assert [len(window.tokens) for window in windows[:-1]] == [context] * (len(windows) - 1)
    predicted = np.concatenate([window.targets for window in windows]).tolist()
    assert predicted == tokens[1 - len(start) :][:total]
    for window in windows:
        assert window.tokens[1:].tolist() == window.targets[:-1].tolist()
        assert window.tokens[0] == (7 if begins else window.targets[0] - 1)


def test_a_text_that_is_too_short_says_what_to_do() -> None:
    assert len(windows_of([1, 2, 3], [0], 2, 3)) == 2
    with pytest.raises(
        UsageError, match="the text has 3 tokens, 4 are needed; name a longer one with --text"
    ):
        windows_of([1, 2, 3], [], 2, 3)


def test_the_text_of_python_is_prose() -> None:
    text = python_prose()
    lines = text.splitlines()
    assert len(set(lines)) == len(lines) > 300
    assert len(text.split()) > 10_000
    assert all(line == " ".join(line.split()) and line[-1] in ".:?!" for line in lines)
    assert not any("::=" in line.split()[:2] or line.startswith((">>>", "*")) for line in lines)
    assert read_prose(None) == read_prose(None)
    assert read_prose(None).source.startswith("pydoc_data.topics of Python 3.11.")


def test_formats_are_those_of_the_kernels() -> None:
    for kind in KINDS:
        assert choice_named(kind) == Choice(WeightFormat(kind, kind))
        assert choice_named(f"fp8+{kind}-head") == Choice(WeightFormat("fp8", kind))
    all_of_it = choice_named("fp8-per-tensor+bf16-activations+fp32-head")
    assert all_of_it == Choice(WeightFormat("fp8-per-tensor", "fp32"), "bf16")
    assert str(all_of_it) == "fp8-per-tensor+fp32-head+bf16-activations"
    assert choice_named(str(all_of_it)) == all_of_it
    assert choices_of("bf16,fp8+fp8-head, int8", "fp8") == [
        Choice(WeightFormat("fp8", "fp8")),
        Choice(WeightFormat("bf16", "bf16")),
        Choice(WeightFormat("int8", "int8")),
    ]
    for wrong in (
        "fp4", "", "fp8+bf16", "fp8+", "fp8+-head", "+bf16-head", "fp8+fp4-head", "bf16-head",
        "int8+bf16-activations", "fp8+fp8-activations", "fp8+bf16-activations+",
    ):  # fmt: skip
        with pytest.raises(
            UsageError, match=r"is no weight format; known are fp32, bf16, fp8, .*fp8\+bf16-head"
        ):
            choice_named(wrong)


# ── a run ─────────────────────────────────────────────────────────────────────────────────────


def logits_alone(folder: Path, choice: Choice, kv: str, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits of a window [n, vocab_size], one position a step, by a backend that does nothing else."""
    shape = read_config(folder).page_shape(8, kv)
    pages = shape.pages_for(len(tokens))
    pool = np.zeros(pages * shape.page_bytes, np.uint8)
    backend = NativeBackend(folder, pool, shape, 1, choice.weights, activations=choice.activations)
    table, need = np.arange(pages, dtype=np.int32), np.ones(1, np.bool_)
    found = [
        backend.step(rows_of([table], at, np.array([token], np.int32), need), return_logits=True).logits
        for at, token in enumerate(tokens)
    ]
    return np.concatenate(found)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_a_run_finds_what_a_computation_by_hand_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    monkeypatch.setattr(tools.evaluate, "CHUNK", 16)
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    write_byte_model(folder)
    text.write_text("A relay race is run by a team, and what counts is that <bos> the baton arrives. " * 2)
    names = ["bf16", "fp32", "fp8", "fp8+bf16-head", "fp8+bf16-activations", "int8"]
    report = run(folder, "--text", str(text), "--kv", kv, "--formats", ",".join(names), "--reference", "bf16")
    assert [one["weights"] for one in report["formats"]] == names
    codec = TextCodec.load(folder)
    tokens = codec.encode(text.read_text(), special=False, bos=False)
    start = codec.encode("", special=False)
    per_window = 40
    surprises: dict[str, list[float]] = {name: [] for name in names}
    divergences: dict[str, list[float]] = {name: [] for name in names}
    agreements: dict[str, list[bool]] = {name: [] for name in names}
    done = 0
    while done < 100:
        count = min(per_window, 100 - done)
        piece = [*start, *tokens[done : done + count + 1 - len(start)]]
        done += count
        p = None
        for name in names:
            q = log_probabilities(logits_alone(folder, choice_named(name), kv, piece[:-1]))
            p = q if p is None else p
            surprises[name] += [float(-row[token]) for row, token in zip(q, piece[1:], strict=True)]
            divergences[name] += (np.exp(p) * (p - q)).sum(axis=1).astype(float).tolist()
            agreements[name] += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    perplexity = {name: math.exp(np.mean(surprises[name])) for name in names}
    for one in report["formats"]:
        name = one["weights"]
        assert one["perplexity"] == pytest.approx(perplexity[name], rel=1e-10)
        difference = perplexity[name] - perplexity["bf16"]
        assert one["perplexity_difference"] == pytest.approx(difference, rel=1e-7, abs=1e-11)
        for key, value in (
            ("kl_mean", np.mean(divergences[name])),
            ("kl_median", np.median(divergences[name])),
            ("kl_p99", np.percentile(divergences[name], 99)),
            ("kl_max", np.max(divergences[name])),
            ("kl_se", np.std(divergences[name], ddof=1) / 10),
        ):
            assert one[key] == pytest.approx(value, rel=1e-6, abs=1e-13), (name, key)
        assert one["same_choice"] == np.mean(agreements[name])
    reference, *others = report["formats"]
    assert reference["kl_max"] == reference["perplexity_difference"] == 0
    assert reference["same_choice"] == 1
    assert all(0 < one["kl_mean"] < 1 for one in others)
    assert (report["tokens"], report["context"], report["kv"]) == (100, 40, kv)
    assert report["text"]["source"] == "text.txt"


def test_figures_of_size_and_speed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_byte_model(folder)
    pack(folder, WeightFormat("fp8", "fp8"))
    before = (folder / "packed" / "fp8.packed").stat()
    report = run(folder, "--formats", "fp32,fp8")
    assert report["text"]["source"].startswith("pydoc_data.topics")
    fp32, fp8 = report["formats"]
    assert fp32["numerics_id"].split(":")[1].startswith("fp32")
    assert fp8["numerics_id"].split(":")[1].startswith("fp8")
    assert fp8["layer_bytes"] < fp32["layer_bytes"]
    assert fp8["model_bytes"] == before.st_size < fp32["model_bytes"]
    for one in report["formats"]:
        assert one["layer_bytes"] / one["layer_bytes_over_bf16"] == pytest.approx(
            2 * 2 * (2 * 24 * 16 + 2 * 24 * 8 + 3 * 24 * 32)
        )
        assert one["reading_tokens_per_s"] > 0
        assert one["decode_ms"].keys() == one["decode_phase_ms"].keys() == {"1", "8"}
        for batch, phases in one["decode_phase_ms"].items():
            assert {"qkv", "attention", "output", "ffn", "head"} < phases.keys()
            assert sum(phases.values()) > 0
            assert one["decode_ms"][batch] > 0
    # what was packed for this run is gone; what was there is as it was
    after = (folder / "packed" / "fp8.packed").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in (folder / "packed").glob("*.packed")] == ["fp8.packed"]
    assert not list((tmp_path / "cache").iterdir())


def test_blocks_keep_outliers_to_themselves(tmp_path: Path) -> None:
    """An input that is small, with weights as much larger: the same model, but for what it is rounded to."""
    folder = tmp_path / "model"
    write_byte_model(folder)
    write_random_model(
        folder,
        vocab_size=BYTES,
        hidden_size=256,
        ffn_size=256,
        context_length=64,
        sharpness=1.0,
        bos_token=0,
        eos_tokens=(1,),
    )
    tensors = {name: tensor.copy() for name, tensor in load_file(folder / WEIGHTS).items()}
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[5] /= 20_000
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight")):
            tensor[:, 5] *= 20_000
    save_file(tensors, folder / WEIGHTS)
    found = {one["weights"]: one for one in run(folder, "--formats", "fp8,fp8-per-tensor,bf16")["formats"]}
    assert found["bf16"]["kl_mean"] < found["fp8"]["kl_mean"] / 10
    assert found["fp8"]["kl_mean"] + 3 * found["fp8"]["kl_se"] < found["fp8-per-tensor"]["kl_mean"]


def test_a_model_that_overflows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    write_byte_model(folder)
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {**tensors, "model.norm.weight": np.full_like(tensors["model.norm.weight"], 3e38)}, folder / WEIGHTS
    )
    assert main([str(folder), "--formats", "fp32,bf16", "--tokens", "9", "--context", "9"]) == 3
    assert "as fp32 this model gives logits that are not finite" in capsys.readouterr().err


# ── the command ───────────────────────────────────────────────────────────────────────────────


def test_the_tables_are_printed_and_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    write_byte_model(folder)
    report = run(folder, "--formats", "bf16,fp8+bf16-head")
    captured = capsys.readouterr()
    assert captured.err == "", "a bar is for terminals"
    lines = captured.out.splitlines()
    assert lines[0].startswith("byte-model: 100 tokens of pydoc_data.topics")
    assert [line.split()[0] for line in lines if line] == [
        "byte-model:", "weights", "fp32", "bf16", "fp8+bf16-head", "ms", "fp32", "bf16", "fp8+bf16-head",
    ]  # fmt: skip
    document = tmp_path / "README.md"
    begin, end = figures.marks("evaluate")
    document.write_text(f"{begin}\n{end}\n")
    assert figures.main([str(tmp_path / "report.json"), str(document)]) == 0
    text = document.read_text()
    assert text.startswith(f"{begin}\n`python -m tools.evaluate {folder} --tokens 100")
    assert "--json" not in text
    assert "seed" not in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [len(row) for row in rows] == [10] * 4 + [8] * 4
    bf16 = report["formats"][1]
    assert rows[2][1] == f"{bf16['perplexity']:.3f}"
    assert rows[2][3] == f"{1000 * bf16['kl_mean']:.3g} ± {1000 * bf16['kl_se']:.1g}"
    assert set(rows[1][2:6]) == {""}, "the reference is not compared with itself"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--formats", "fp8,fp4"], "'fp4' is no weight format"),
        (["--reference", "q4"], "'q4' is no weight format"),
        (["--formats", "fp8,int8,fp8"], "--formats names fp8 twice"),
        (["--formats", "fp32"], "nothing to compare with the reference fp32"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "binary"], "name a file of UTF-8 text"),
        (["--text", "short"], "the text has 5 tokens, 4,097 are needed"),
        (["--context", "257"], "--context 257: byte-model has 256 at most"),
        (["--json", "nowhere/x.json"], "there is no such folder"),
        (["--plot", "nowhere/x.png"], "there is no such folder"),
        (["--plot", "x.jpg"], "ends in .png"),
    ],
)
def test_bad_usage_is_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_byte_model(tmp_path / "model")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "short").write_text("short")
    assert main(["model", "--context", "128", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "cache").exists()


def test_other_bad_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["--tokens", "1"],
        ["--context", "x"],
        ["--threads", "0"],
        ["--kv", "int8"],
        ["--form"],
    ):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
    assert main([str(tmp_path / "nothing.gguf")]) == 3
    assert "nothing.gguf: no such file" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--plot", str(tmp_path / "x.png")]) == 2
    assert "-m pip install matplotlib" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    words = capsys.readouterr().out
    for part in ("MODEL", "--reference", "KL(reference ‖ format)", "fp8+bf16-head", "Exit codes"):
        assert part in words


def test_the_command_that_is_written_down_is_one_for_a_reader() -> None:
    given_words = ["model", "--json", "a.json", "--plot=b.png", "--tokens", "9", "--json=c", "--text", "a b"]
    assert (
        tools.evaluate.command_line(given_words) == "python -m tools.evaluate model --tokens 9 --text 'a b'"
    )


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "model"
    write_byte_model(folder)
    run(folder, "--formats", "bf16,fp8", "--plot", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
