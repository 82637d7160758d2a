"""Compares our kernels and systems with other engines on this machine, in one run.

    python -m tools.bench peers --llama-bin build/bin --openvino-python peers/bin/python
    python -m tools.bench peers --only decode,prefill --rounds 9 --json peers.json

All have the same model, of which Q8_0 and F16 variants are made with llama-quantize where none are
given, and the same number of threads. Rounds are interleaved: ours, each peer, ours again; figures are
medians of the rounds. The machine's floor (read bandwidth, rate of fused multiply-adds) is measured in
each round too, and the best of all counts: it is what the machine can do. What memory gives may double and
halve from one second to the next where a hypervisor moves us about, so that the share of it that a decode
reaches is found beside the decode: in slices of 32 tokens, each against the greater of the bandwidths just
before and after. Peers that are missing are left out, and it is said how to get them.

  decode       one stream of 128 tokens from an empty context
  total32      32 sequences of 128 tokens in and 64 out
  prefill      a prompt of 512 tokens
  step5        a step of 5 rows of a sequence against one of 1 row
  utilisation  how busy a worker of unified.toml is with 32 streams through the HTTP door
  pd           what long prompts cost streams: prefill and decode on a core each, and unified

Peers' threads wait for each other in loops: where others use the cores too they become ten times
slower. A round in which others took much of the cores is made up for, and where that was not enough
the table says so: do not trust such figures.

Exit codes: 0 measured, 2 bad usage, 3 nothing could be measured, 130 interrupted.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

from engine.errors import EstafetError
from engine.model import read_config
from engine.shapes import KVDtype
from kernels.formats import Activations, WeightFormat, activations_for
from kernels.prepare import cache_dir, prepare
from tools import bench_pinned, machine
from tools.bench_load import BenchFailed
from tools.bench_ours import Driven, job_flops, machine_floor, matrix_bytes, read_bandwidth
from tools.bench_ratios import markdown, missing, ratios, some_of, tell
from tools.bench_rounds import Contender, Findings
from tools.bench_system import count
from tools.fetch import default_model
from tools.install import say
from tools.peers import (
    HOW_TO_GET,
    PeerFailed,
    Peers,
    find_peers,
    llama_batched,
    llama_bench,
    openvino,
    variant,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from engine.model import ModelConfig

PARTS = ("decode", "total32", "prefill", "step5", "utilisation", "pd")
DECODED = 128
SLICES, SLICE = 4, 32
"""Of a stream beside which the read bandwidth is looked at: so many, of so many tokens."""
SEQUENCES, PROMPT, GENERATED = 32, 128, 64
PREFILLED = 512
CONTEXT = 128
"""Tokens before a step that is timed alone."""
FP8, BF16 = WeightFormat("fp8", "fp8"), WeightFormat("bf16", "bf16")
# ── what is measured ──────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Comparison:
    """One run of the command."""

    options: argparse.Namespace
    peers: Peers
    source: Path
    folder: Path
    config: ModelConfig
    findings: Findings = field(default_factory=Findings)
    facts: dict[str, Any] = field(default_factory=dict)
    """What the report says beside figures."""
    _opened: dict[str, Driven] = field(default_factory=dict)

    def ours(self, weights: WeightFormat = FP8) -> Driven:
        """Our backend with these weights, opened when it is first needed."""
        options = self.options
        if str(weights) not in self._opened:
            has_formats = options.backend == "native"
            if not has_formats and weights != FP8:
                raise BenchFailed(f"the {options.backend} backend has one weight format only")
            self._opened[str(weights)] = Driven(
                options.backend,
                self.folder,
                SEQUENCES if weights == FP8 else 1,
                max(PREFILLED, PROMPT + GENERATED, DECODED, CONTEXT + 8),
                threads=options.threads,
                kv=options.kv,
                weights=weights if has_formats else None,
                # None leaves it to the format: bf16 weights take fp32 activations unless told otherwise
                activations=options.activations if weights == FP8 else None,
                seed=options.seed,
            )
            self.facts["numerics_id"] = self.ours().backend.numerics_id
            self.facts["weights"] = str(FP8) if has_formats else "the backend's own"
            rounded = options.activations or activations_for(FP8)
            self.facts["activations"] = rounded if has_formats else "fp32"
        return self._opened[str(weights)]

    def close(self) -> None:
        """Let our backends go, before systems are started."""
        self._opened.clear()

    def gguf(self, kind: str) -> Path:
        """The model's variant that was given or is made."""
        given: Path | None = {"Q8_0": self.options.q8, "F16": self.options.f16}[kind]
        folder = cache_dir() / "peers"
        return given or variant(self.peers, self.source, kind, folder, self.options.threads)

    def decode(self) -> None:
        """One stream."""

        def ours(weights: WeightFormat, name: str) -> Mapping[str, float | None]:
            spent = self.ours(weights).decode(DECODED)
            found = {f"{name}_decode_tok_s": spent.rate, **self._streaming(weights, name)}
            if weights == FP8:
                found["ours_outside_native_b1"] = spent.outside_native
            return found

        def llamacpp() -> Mapping[str, float | None]:
            speed = llama_bench(self.peers, self.gguf("Q8_0"), 0, DECODED, self.options.threads)
            return {"llamacpp_q8_decode_tok_s": speed}

        names = ("decode_tok_s", "matrix_bytes_s", "bandwidth_share")
        self._rounds(
            "decode",
            Contender(
                "ours, FP8",
                (*(f"ours_{name}" for name in names), "ours_outside_native_b1"),
                lambda: ours(FP8, "ours"),
            ),
            Contender(
                "ours, bf16",
                tuple(f"ours_bf16_{name}" for name in names),
                lambda: ours(BF16, "ours_bf16"),
            ),
            Contender("llama.cpp Q8_0", ("llamacpp_q8_decode_tok_s",), llamacpp),
        )

    def _streaming(self, weights: WeightFormat, name: str) -> Mapping[str, float | None]:
        """How fast a stream reads the matrices, and its share of what could be read then: medians."""
        names = (f"{name}_matrix_bytes_s", f"{name}_bandwidth_share")
        if self.options.backend != "native":
            return dict.fromkeys(names)
        look = functools.partial(read_bandwidth, self.options.threads)
        size = matrix_bytes(self.config, weights) * SLICE
        streamed = [
            (size / spent.matrices_s, looked)
            for spent, looked in self.ours(weights).decode_beside(look, SLICES, SLICE)
            if spent.matrices_s
        ]
        return {
            names[0]: median(rate for rate, _ in streamed),
            names[1]: median(rate / looked for rate, looked in streamed),
        }

    def total32(self) -> None:
        """Many sequences, prompts and answers."""
        options = self.options
        flops = job_flops(self.config, SEQUENCES, PROMPT, GENERATED)

        def ours() -> Mapping[str, float | None]:
            job = self.ours().job(PROMPT, GENERATED, options.prefill_rows)
            seconds = job.prefill.wall_s + job.decode.wall_s
            return {
                "ours_total32_tok_s": job.rate,
                "ours_total32_prefill_tok_s": job.prefill.rate,
                "ours_total32_decode_tok_s": job.decode.rate,
                "ours_total32_flop_s": flops / seconds,
                "ours_outside_native_b32": job.decode.outside_native,
            }

        def llamacpp(kind: str, name: str) -> Mapping[str, float | None]:
            found = llama_batched(self.peers, self.gguf(kind), PROMPT, GENERATED, SEQUENCES, options.threads)
            self.facts["schedules"]["llama.cpp"] = (
                f"all prompts first, in batches of {found.batch} rows computed {found.part} at a time; then "
                f"{GENERATED} decode steps of {SEQUENCES} rows"
            )
            return {
                f"{name}_total32_tok_s": found.total,
                f"{name}_total32_prefill_tok_s": found.prefill,
                f"{name}_total32_decode_tok_s": found.decode,
            }

        def openvino_genai(precision: str, name: str) -> Mapping[str, float | None]:
            found = openvino(
                self.peers,
                self.gguf("F16"),
                PROMPT,
                GENERATED,
                SEQUENCES,
                options.threads,
                self.config.vocab_size,
                precision,
            )
            if precision == "default":
                self.facts["openvino"] = {"version": found["version"], "precision": found["precision"]}
                self.facts["schedules"]["OpenVINO GenAI"] = (
                    f"continuous batching by its defaults: steps of up to {found['batched_tokens']} rows, "
                    f"in which prompts and answers mix; {GENERATED - 1} steps after a prompt's last row"
                )
            return {f"{name}_total32_tok_s": found["total_tok_s"]}

        self.facts["schedules"] = {
            "ours": f"all prompts first, in steps of {options.prefill_rows} rows; then {GENERATED} decode "
            f"steps of {SEQUENCES} rows"
        }
        ours_gives = ("total32_tok_s", "total32_flop_s", "outside_native_b32")
        self._rounds(
            "total32",
            Contender("ours, FP8", tuple(f"ours_{name}" for name in ours_gives), ours),
            *(
                Contender(
                    f"llama.cpp {kind}", (f"{name}_total32_tok_s",), functools.partial(llamacpp, kind, name)
                )
                for kind, name in (("Q8_0", "llamacpp_q8"), ("F16", "llamacpp_f16"))
            ),
            *(
                Contender(
                    f"OpenVINO GenAI, {precision} precision",
                    (f"{name}_total32_tok_s",),
                    functools.partial(openvino_genai, precision, name),
                )
                for precision, name in (("default", "openvino"), ("f32", "openvino_f32"))
            ),
        )

    def prefill(self) -> None:
        """One long prompt."""

        def llamacpp() -> Mapping[str, float | None]:
            speed = llama_bench(self.peers, self.gguf("F16"), PREFILLED, 0, self.options.threads)
            return {"llamacpp_f16_prefill512_tok_s": speed}

        self._rounds(
            "prefill",
            Contender(
                "ours, FP8",
                ("ours_prefill512_tok_s",),
                lambda: {"ours_prefill512_tok_s": self.ours().prefill(PREFILLED).rate},
            ),
            Contender("llama.cpp F16", ("llamacpp_f16_prefill512_tok_s",), llamacpp),
        )

    def step5(self) -> None:
        """Steps that verify drafts."""

        def ours() -> Mapping[str, float | None]:
            one, five = self.ours().step_times(CONTEXT)
            return {"ours_step1_s": one, "ours_step5_s": five}

        self._rounds("step5", Contender("ours, FP8", ("ours_step1_s", "ours_step5_s"), ours))

    def utilisation(self) -> None:
        """A whole system at saturation."""

        def unified() -> Mapping[str, float | None]:
            self.close()
            found = bench_pinned.saturation(self._plan(), PROMPT, GENERATED)
            self.facts.setdefault("saturation", []).append(found)
            return {"utilisation": found["utilisation"]}

        contenders = [Contender("unified, 32 streams", ("utilisation",), unified)]
        self.findings.rounds("utilisation", contenders, self.options.rounds)

    def pd(self) -> None:
        """Systems whose workers have cores of their own."""
        cores = sorted(os.sched_getaffinity(0))[:2]

        def system(name: str) -> Mapping[str, float | None]:
            self.close()
            if len(cores) < 2:
                raise BenchFailed("a core each for prefill and decode needs two cores")
            found = bench_pinned.pinned(self._plan(), cores, separate=name == "pd")
            self.facts.setdefault(name, []).append(found)
            return {f"{name}_{key}_p99_ms": found[f"{key}_ms"]["p99"] for key in ("loaded", "unloaded")}

        contenders = [
            Contender(
                says, (f"{name}_loaded_p99_ms", f"{name}_unloaded_p99_ms"), functools.partial(system, name)
            )
            for name, says in (("pd", "prefill and decode on a core each"), ("unified", "unified"))
        ]
        self.findings.rounds("pd", contenders, self.options.rounds)

    def _plan(self) -> bench_pinned.Plan:
        options = self.options
        room = self.config.context_length - 2
        formats = []
        if options.backend == "native":
            formats = [f"model.weights={FP8.layers}", f"model.activations={options.activations or 'auto'}"]
        return bench_pinned.Plan(
            [f"kv.dtype={options.kv}", *formats, *options.set],
            options.backend,
            str(self.source),
            options.seed,
            min(options.long, room),
        )

    def _rounds(self, part: str, *contenders: Contender) -> None:
        """Interleaved rounds, with a look at the machine's floor in each."""

        def floor() -> Mapping[str, float | None]:
            found = machine_floor(self.options.threads)
            return {"floor_bytes_s": found.bytes_s, "floor_flop_s": found.flop_s}

        gives = ("floor_bytes_s", "floor_flop_s")
        everybody = [*contenders, Contender("the machine's floor", gives, floor)]
        self.findings.rounds(part, everybody, self.options.rounds, self.options.spare)


# ── the report ────────────────────────────────────────────────────────────────────────────────


def report_of(comparison: Comparison, load_before: float) -> dict[str, Any]:
    """All that was found, as `--json` writes it."""
    findings, options = comparison.findings, comparison.options
    medians = findings.medians()
    found = ratios(medians)
    return {
        "bench": "peers",
        "machine": {"cpu": machine.cpu(), "cores": machine.cores(), "memory": f"{machine.memory_gib()} GiB"},
        "load_before": load_before,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": machine.commit(),
        "seed": options.seed,
        "command": options.command_line,
        "model": comparison.config.name,
        "backend": options.backend,
        "kv": options.kv,
        "threads": options.threads,
        "rounds": options.rounds,
        **comparison.facts,
        "ratios": found,
        "missing": missing(found, findings, options.only),
        "medians": medians,
        "spreads": {
            name: {"least": min(values), "most": max(values), "rounds": values}
            for name, values in sorted(findings.values.items())
        },
    }


# ── the command ───────────────────────────────────────────────────────────────────────────────


def run(options: argparse.Namespace) -> int:
    """`peers`: the exit code."""
    load_before = round(os.getloadavg()[0], 2)
    if options.json and not options.json.absolute().parent.is_dir():
        say(f"--json {options.json}: there is no such folder")
        return 2
    for name in ("model", "q8", "f16"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.is_file():
            say(f"--{name} {path}: no such file; name a GGUF file")
            return 2
    try:
        peers = find_peers(options.llama_bin, options.openvino_python)
    except PeerFailed as error:
        say(str(error))
        return 2
    if peers.missing:
        say(f"not installed: {', '.join(peers.missing)}. How to get what is missing:\n{HOW_TO_GET}")
    try:
        source = options.model or default_model(cache_dir(), progress=True)
        folder = prepare(source, cache_dir())
        comparison = Comparison(options, peers, source, folder, read_config(folder))
    except EstafetError as error:
        say(str(error))
        return 3
    for part in options.only:
        getattr(comparison, part)()
    comparison.close()
    report = report_of(comparison, load_before)
    return tell(report, markdown(report), options.json)


def _count_from_0(text: str) -> int:
    """An argument that is a number from 0."""
    return 0 if text == "0" else count(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `peers` can be told."""
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: the default model")
    parser.add_argument("--threads", type=count, default=2, help="of every engine (2)")
    parser.add_argument("--rounds", type=count, default=5, help="of every comparison (5)")
    parser.add_argument(
        "--spare",
        type=_count_from_0,
        default=5,
        metavar="N",
        help="more rounds for those that others disturbed (5)",
    )
    parser.add_argument(
        "--only", type=some_of(PARTS), default=list(PARTS), metavar="PART,…", help="some parts only"
    )
    parser.add_argument("--llama-bin", type=Path, metavar="DIR", help="where llama.cpp's programs are")
    parser.add_argument("--openvino-python", type=Path, metavar="PYTHON", help="one that has openvino_genai")
    parser.add_argument("--q8", type=Path, metavar="GGUF", help="the model in Q8_0 (default: it is made)")
    parser.add_argument("--f16", type=Path, metavar="GGUF", help="the model in F16 (default: it is made)")
    parser.add_argument("--backend", default="native", help="of ours (native)")
    parser.add_argument("--kv", default="float16", choices=get_args(KVDtype), help="of ours (float16)")
    parser.add_argument(
        "--activations", choices=get_args(Activations), help="of our FP8 matrices (what workers take)"
    )
    parser.add_argument(
        "--prefill-rows", type=count, default=512, metavar="N", help="of a step of ours in total32 (512)"
    )
    parser.add_argument("--long", type=count, default=bench_pinned.LONG, metavar="N", help="tokens, for pd")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for the launcher of our systems"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(run=run)
