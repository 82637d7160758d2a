"""Write a model as an FP8 checkpoint: a Hugging Face folder of half the size, ready to be served.

`python -m tools.quantize IN OUT` reads a GGUF file, a Hugging Face folder or a prepared folder and writes the
folder OUT. The matrices of the layers become e4m3 codes with a scale for each block of 128 × 128, as GLM-5's
and DeepSeek's checkpoints have them (`weight_scale_inv`, `quantization_config` in config.json); embedding, LM
head and norms stay in 16 bits. What IN has in FP8 already is copied to the bit.
"""

from __future__ import annotations

from tools import interrupts

if __name__ == "__main__":
    interrupts.at_once()  # before the long imports begin

import argparse
import functools
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from engine.errors import EstafetError, StartError, UsageError
from engine.model import TEMPLATE, TOKENIZER, read_config
from kernels.convert import worker_pool, write_at
from kernels.formats import BLOCK, WeightFormat
from kernels.hf_config import GENERATION_CONFIG, QUANTIZATION
from kernels.hf_folder import INDEX, SINGLE, read_hf_folder
from kernels.hf_tokenizer import TEMPLATE_JSON, TOKENIZER_CONFIG
from kernels.packed import items_of, kind_of, row_chunks
from kernels.prepare import HF_CONFIG, cache_dir, prepare
from kernels.quantize import decode_bf16, dequantize, round_bf16
from kernels.safetensors_file import ITEM_BYTES, safetensors_header
from kernels.source import E4M3
from kernels.weights import EMBEDDING, HEAD, SCALES_SUFFIX, STORED_KINDS, read_stored, scales_shape
from tools.fetch import default_model
from tools.install import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.model import ModelConfig
    from kernels.formats import WeightKind
    from kernels.weights import StoredTensor

SHARD_BYTES = 5_000_000_000
"""Files stay below this, unless one tensor is larger."""
SPARE_BYTES = 64 << 20
PARTIAL = ".partial-"
"""After the name of OUT, that of the folder beside it in which OUT is made."""
DTYPE_KEYS = ("dtype", "torch_dtype")
"""What transformers calls the type of what is not quantised, from its version 5 on and before."""
COPIED = (
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    TEMPLATE_JSON,
    "special_tokens_map.json",
)
TYPES: dict[WeightKind, str] = {"fp8": E4M3, "bf16": "BF16", "fp32": "F32"}
EPILOG = """\
example:
  python -m tools.quantize my-llama.Q8_0.gguf my-llama-FP8
  tools/up --set model.path=my-llama-FP8

IN is prepared first, as for serving, in $ESTAFET_CACHE or ~/.cache/estafet. OUT must not exist yet and
appears whole or not at all. Printed at the end: the bytes of the matrices that became FP8 and of the
whole model beside what they take in bfloat16, and how far the numbers of the worst matrix moved.

--head fp8 makes a small model smaller by another sixth; what that costs, `python -m tools.evaluate`
shows. With tied embeddings the embedding becomes FP8 too, which other programs do not read.
"""


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor of OUT."""

    stored: StoredTensor
    type: str

    @property
    def name(self) -> str:
        """As checkpoints call it."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor without its scales."""
        return self.stored.info.shape

    def entries(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (type, shape) of what is written: the tensor, and the scales of codes."""
        entries = {self.name: (self.type, self.shape)}
        if self.type == E4M3:
            entries[self.name + SCALES_SUFFIX] = ("F32", scales_shape(self.shape))
        return entries

    @property
    def size(self) -> int:
        """Bytes of all that."""
        return sum(ITEM_BYTES[kind] * math.prod(shape) for kind, shape in self.entries().values())


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a model: bytes, each beside those of bfloat16, and how far the numbers moved."""

    matrix_bytes: int
    """Of the matrices that are FP8, scales included."""
    matrix_bf16_bytes: int
    model_bytes: int
    model_bf16_bytes: int
    worst_error: float
    """The largest of the matrices' relative errors: root of Σ(new − old)² / Σ old²."""
    worst_matrix: str

    def __str__(self) -> str:
        matrices = _against(self.matrix_bytes, self.matrix_bf16_bytes)
        model = _against(self.model_bytes, self.model_bf16_bytes)
        return (
            f"FP8 matrices  {matrices}\nwhole model   {model}\n"
            f"worst relative error of a matrix (RMS): {self.worst_error:.2%}, {self.worst_matrix}"
        )


def _against(size: int, bf16: int) -> str:
    return f"{size / 1e6:,.1f} MB, {size / bf16:.3f} of bf16's {bf16 / 1e6:,.1f} MB"


def quantize_model(
    source: Path, target: Path, head: str, progress: bool = True, force: bool = False
) -> Report:
    """Write the model `source` as the FP8 folder `target`; what became of it.

    head: fp8 or bf16. UsageError when `target` exists and `force` is False, or cannot be replaced; ModelError
    when the source cannot be served, StartError when there is no room.
    """
    _check_target(source, target, force)
    folder = prepare(source, cache_dir(), progress)
    config = read_config(folder)
    tensors = plan_tensors(folder, config, head)
    size = sum(tensor.size for tensor in tensors)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size + SPARE_BYTES:
            raise StartError(
                f"{target.parent}: {size >> 20} MiB needed for {target.name}, {free >> 20} MiB free; name a "
                "folder on a disk with room"
            )
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}{PARTIAL}", dir=target.parent, ignore_cleanup_errors=True
        ) as partial:
            made = Path(partial) / target.name
            made.mkdir()
            errors = _write_weights(made, tensors, f"quantising {config.name}", progress)
            _write_description(source, folder, made, config, tensors)
            read_hf_folder(made)  # what we would not read ourselves must not appear
            _put(made, target, Path(partial) / "replaced")
    except OSError as error:
        raise StartError(
            f"{target}: cannot be written: {error.strerror or error}; name another folder"
        ) from error
    fp8 = [tensor for tensor in tensors if tensor.type == E4M3]
    worst = max(errors, key=lambda name: errors[name])
    return Report(
        sum(tensor.size for tensor in fp8),
        sum(2 * tensor.stored.info.elements for tensor in fp8),
        size,
        sum(2 * tensor.stored.info.elements for tensor in tensors),
        errors[worst],
        worst,
    )


def _put(made: Path, target: Path, replaced: Path) -> None:
    """Move `made` to `target`, and what is there to `replaced`, unless the first fails."""
    if target.exists():
        target.rename(replaced)
    try:
        made.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        raise


def plan_tensors(folder: Path, config: ModelConfig, head: str) -> list[Written]:
    """What is written of a prepared folder's tensors, in the order of computation."""
    weight_format = WeightFormat("fp8", "fp8" if head == "fp8" else "bf16")
    tensors = []
    for name, stored in read_stored(folder, config).items():
        kind = kind_of(stored, config, weight_format)
        if name == EMBEDDING and not config.tied_embeddings:
            kind = "bf16"  # a table, not a linear layer: other programs look for no scales there
        if len(stored.info.shape) == 1 and _is_bf16(stored):
            kind = "bf16"
        tensors.append(Written(stored, TYPES[kind]))
    return tensors


def _is_bf16(stored: StoredTensor) -> bool:
    """Whether bfloat16 loses nothing."""
    values = stored.values()
    return bool((decode_bf16(round_bf16(values)) == values).all())


def _check_target(source: Path, target: Path, force: bool) -> None:
    """UsageError unless the target is not there, or may be replaced."""
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise UsageError(f"{target}: exists; name another folder, or replace it with --force")
    if target.is_symlink() or not (target / HF_CONFIG).is_file():
        raise UsageError(
            f"{target}: not a Hugging Face folder, so --force does not replace it; name another folder"
        )
    resolved = source.resolve()
    if target.resolve() in (resolved, *resolved.parents):
        raise UsageError(
            f"{target}: holds IN itself, which is read while OUT is written; name another folder"
        )


# ── weights ───────────────────────────────────────────────────────────────────────────────────


def _write_weights(folder: Path, tensors: list[Written], doing: str, progress: bool) -> dict[str, float]:
    """Write the shards and their index; the relative error of each FP8 matrix by name."""
    from tqdm import tqdm

    shards = list(_shards(tensors))
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        weight_map = {
            entry: file
            for file, shard in zip(names, shards, strict=True)
            for one in shard
            for entry in one.entries()
        }
        total = sum(tensor.size for tensor in tensors)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    elements = sum(tensor.stored.info.elements for tensor in tensors)
    quiet = None if progress else True  # None: on a terminal only
    errors = {}
    with (
        tqdm(total=elements, desc=doing, unit="w", unit_scale=True, disable=quiet) as bar,
        worker_pool() as pool,
    ):
        for file, shard in zip(names, shards, strict=True):
            header, starts = safetensors_header({k: v for one in shard for k, v in one.entries().items()})
            with (folder / file).open("wb") as out:
                number = out.fileno()
                os.posix_fallocate(number, 0, len(header) + sum(one.size for one in shard))
                write_at(number, memoryview(header), 0)
                write = functools.partial(_write_tensor, number=number, starts=starts)
                for one, error in zip(shard, pool.map(write, shard), strict=True):
                    bar.update(one.stored.info.elements)
                    if one.type == E4M3:
                        errors[one.name] = error
    return errors


def _shards(tensors: list[Written]) -> Iterator[list[Written]]:
    shard: list[Written] = []
    for tensor in tensors:
        if shard and sum(one.size for one in shard) + tensor.size > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _write_tensor(tensor: Written, number: int, starts: dict[str, int]) -> float:
    """Write it at its place in the file with that descriptor; how far its numbers moved, relative."""
    stored, position = tensor.stored, starts[tensor.name]
    if len(tensor.shape) == 1:
        values = stored.values()
        exact = values if tensor.type == "F32" else round_bf16(values)
        write_at(number, exact.view(np.uint8).data, position)
        return 0.0
    moved, whole, all_scales = 0.0, 0.0, []
    for start, stop in row_chunks(*tensor.shape):
        items, scales = items_of(stored, STORED_KINDS[tensor.type], start, stop, None)
        data = items.reshape(-1).view(np.uint8)
        write_at(number, data.data, position)
        position += data.size
        if tensor.type == E4M3:
            all_scales.append(scales)
            values = stored.rows(start, stop).astype(np.float64)
            moved += float(np.square(dequantize(items, scales) - values).sum())
            whole += float(np.square(values).sum())
    if all_scales:
        factors = np.concatenate(all_scales).reshape(-1).view(np.uint8)
        write_at(number, factors.data, starts[tensor.name + SCALES_SUFFIX])
    return math.sqrt(moved / whole) if whole else 0.0


# ── config and tokeniser ──────────────────────────────────────────────────────────────────────


def _write_description(
    source: Path, folder: Path, made: Path, config: ModelConfig, tensors: list[Written]
) -> None:
    """Everything but the weights: the source's own files where it has them, else what says the same."""
    if (source / HF_CONFIG).is_file():
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, made / name)
        values = json.loads((source / HF_CONFIG).read_bytes())
    else:
        for name in (TOKENIZER, TEMPLATE):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, made / name)
        _describe_tokens(folder, made, config)
        values = _hf_config(config)
    for key in [key for key in DTYPE_KEYS if key in values] or DTYPE_KEYS[1:]:
        values[key] = "bfloat16"
    values[QUANTIZATION] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": sorted(_left_out(tensors, config)),
    }
    _write_json(made / HF_CONFIG, values)


def _left_out(tensors: list[Written], config: ModelConfig) -> Iterator[str]:
    """The linear layers that are not FP8; of a tied model the LM head is one, though it has no tensor."""
    for tensor in tensors:
        name = HEAD if config.tied_embeddings and tensor.name == EMBEDDING else tensor.name
        if len(tensor.shape) == 2 and name != EMBEDDING and tensor.type != E4M3:
            yield name.removesuffix(".weight")


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model that came without one. Names: `LlamaConfig` of the transformers package."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token,
        "eos_token_id": list(config.eos_tokens),
    }


def _describe_tokens(folder: Path, made: Path, config: ModelConfig) -> None:
    """tokenizer_config.json and generation_config.json of a model that came without them."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    names: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    if config.bos_token is not None:
        names["bos_token"] = tokenizer.id_to_token(config.bos_token)
    if config.eos_tokens:
        names["eos_token"] = tokenizer.id_to_token(config.eos_tokens[0])
    _write_json(made / TOKENIZER_CONFIG, names)
    generation = {"bos_token_id": config.bos_token, "eos_token_id": list(config.eos_tokens)}
    _write_json(made / GENERATION_CONFIG, generation)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.quantize",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="IN",
        help="a GGUF file, a Hugging Face folder, a prepared folder, or default: SmolLM2-135M-Instruct",
    )
    parser.add_argument("target", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--kind",
        choices=("fp8",),
        default="fp8",
        help="of the layers' matrices; fp8, block-wise e4m3, is what a folder can hold",
    )
    parser.add_argument(
        "--head", choices=("bf16", "fp8"), default="bf16", help="of the LM head (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT, if it is a Hugging Face folder")
    options = parser.parse_args(arguments)
    try:
        source = default_model(cache_dir(), True) if options.source == "default" else Path(options.source)
        report = quantize_model(source, options.target, options.head, force=options.force)
    except EstafetError as error:
        say(str(error))
        return error.exit_code
    print(f"{options.target}\n{report}")
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.guarded(main))
