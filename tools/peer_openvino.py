"""Runs OpenVINO GenAI's continuous batching once and prints what it did: for `tools.bench peers`.

    PYTHON_WITH_OPENVINO tools/peer_openvino.py MODEL.gguf --threads 2 --sequences 32 --input 128 --output 64

It may run in an environment that has nothing of ours, so it imports nothing of ours. Prompts are drawn
token ids; greedy, and exactly --output new tokens each. The first job warms up and is not counted: it
compiles for the shapes that it meets. One line of JSON on stdout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from typing import Any


def main() -> int:
    """The exit code: 1 when an answer has another length than was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32000, help="prompts' ids are below")
    parser.add_argument("--precision", default="default", help="an inference precision hint: f32, bf16, f16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    genai: Any = importlib.import_module("openvino_genai")
    openvino: Any = importlib.import_module("openvino")
    numpy: Any = importlib.import_module("numpy")
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
    if options.precision != "default":
        properties["INFERENCE_PRECISION_HINT"] = options.precision
    scheduler = genai.SchedulerConfig()
    pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
    random = numpy.random.default_rng(options.seed)
    config = genai.GenerationConfig()
    config.max_new_tokens = options.output
    config.ignore_eos = True
    config.do_sample = False

    def job() -> tuple[float, set[int]]:
        """Seconds that all sequences took, and the lengths of the answers."""
        shape = (1, options.input)
        prompts = [
            openvino.Tensor(random.integers(0, options.vocabulary, shape, dtype=numpy.int64))
            for _ in range(options.sequences)
        ]
        started = time.perf_counter()
        results = pipeline.generate(prompts, [config] * options.sequences)
        seconds = time.perf_counter() - started
        return seconds, {len(ids) for result in results for ids in result.m_generation_ids}

    job()
    seconds, lengths = job()
    if lengths != {options.output}:
        print(f"answers have {sorted(lengths)} tokens, not {options.output}", file=sys.stderr)
        return 1
    total = options.sequences * (options.input + options.output)
    core = openvino.Core()
    hint = core.get_property("CPU", "INFERENCE_PRECISION_HINT")
    report = {
        "version": genai.__version__,
        "seconds": seconds,
        "total_tok_s": total / seconds,
        "precision": options.precision if options.precision != "default" else _name(hint),
        "batched_tokens": scheduler.max_num_batched_tokens,
        "prefix_caching": scheduler.enable_prefix_caching,
    }
    print(json.dumps(report))
    return 0


def _name(kind: Any) -> str:
    """An element type as the hint is spelt: f32, bf16."""
    return str(kind.to_string()) if hasattr(kind, "to_string") else str(kind)


if __name__ == "__main__":
    sys.exit(main())
