"""Read a Hugging Face folder of the Llama architecture: config.json, safetensors, tokeniser, chat template.

Weights are `model.safetensors`, or shards that `model.safetensors.index.json` lists.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.errors import ModelError
from kernels.convert import check_types, same_numbers
from kernels.facts import Facts, shown
from kernels.hf_config import read_hf_config
from kernels.hf_tokenizer import read_special_token, read_template, read_tokenizer
from kernels.safetensors_file import ITEM_BYTES, SafetensorsFile, read_safetensors
from kernels.source import E4M3, ModelSource, TensorInfo, TensorPlan
from kernels.weights import EMBEDDING, HEAD, SCALES_SUFFIX, SCALES_TYPES, scales_shape, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.model import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Old checkpoints keep what follows from `rope_theta`."""
_TWINS = {HEAD: EMBEDDING, HEAD + SCALES_SUFFIX: EMBEDDING + SCALES_SUFFIX}
"""The head's tensors, and those of which they are copies when the model is tied."""


def read_hf_folder(folder: Path) -> ModelSource:
    """The model that the folder holds; ModelError when it cannot be served. Its numbers are not read yet."""
    config = read_hf_config(folder)
    files, tensors = _read_shards(folder)
    plans = _plan_tensors(folder, config, tensors)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    bos, eos = (read_special_token(folder, name, tokenizer) for name in ("bos_token", "eos_token"))
    # The tokeniser's names come first: they are what the chat template means.
    config = msgspec.structs.replace(
        config,
        bos_token=config.bos_token if bos is None else bos,
        eos_tokens=config.eos_tokens if eos is None else tuple(dict.fromkeys((eos, *config.eos_tokens))),
    )
    # Codes and scales stay as they are; to make float32 of them would be four times as much.
    mappable = config.stored == E4M3 or all(file.mappable for file in files)
    return ModelSource(
        config,
        plans,
        tokenizer,
        read_template(folder),
        tuple((file.path, file.changed_ns) for file in files) if mappable else (),
    )


def _read_shards(folder: Path) -> tuple[list[SafetensorsFile], dict[str, TensorInfo]]:
    """The files of weights, and every tensor in them by name."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() or not index.exists():
        if not single.exists():
            raise ModelError(
                f"{folder}: no {SINGLE} and no {INDEX}; only safetensors are read: convert the model"
            )
        file = read_safetensors(single)
        return [file], file.tensors
    weight_map = Facts.read_json(index).table("weight_map")
    files: dict[str, SafetensorsFile] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            raise ModelError(
                f"{index}: tensor {shown(name)} lies in {shown(shard)}, not a file of this folder"
            )
        if shard not in files:
            if not (folder / shard).exists():
                raise ModelError(
                    f"{folder / shard}: missing; {INDEX} has tensor {shown(name)} there; fetch it"
                )
            files[shard] = read_safetensors(folder / shard)
        if name not in files[shard].tensors:
            raise ModelError(
                f"{folder / shard}: tensor {shown(name)} is missing, {INDEX} has it there; fetch both again"
            )
    tensors: dict[str, TensorInfo] = {}
    for file in files.values():
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ModelError(
                    f"{file.path}: tensor {shown(name)} is in {tensors[name].path.name} too; fetch both again"
                )
            tensors[name] = tensor
    return list(files.values()), tensors


def _find_scales(
    config: ModelConfig, tensor: TensorInfo, tensors: Mapping[str, TensorInfo]
) -> TensorInfo | None:
    """The scales that belong to a matrix of e4m3fn codes; None for other tensors."""
    if tensor.type != E4M3:
        return None
    if config.stored != E4M3 or len(tensor.shape) != 2:
        why = "is no matrix" if config.stored == E4M3 else "config.json has no quantization_config"
        raise ModelError(
            f"{tensor.path}: tensor {tensor.name} has the type {E4M3}, but {why}; fetch both again"
        )
    name, shape = tensor.name + SCALES_SUFFIX, scales_shape(tensor.shape)
    scales = tensors.get(name)
    if scales is None:
        raise ModelError(
            f"{tensor.path}: tensor {name}, the scales of {tensor.name}, is missing; fetch it again"
        )
    if scales.shape != shape or scales.type not in SCALES_TYPES:
        raise ModelError(
            f"{scales.path}: tensor {name} is {scales.type} {list(scales.shape)}, not "
            f"{' or '.join(SCALES_TYPES)} {list(shape)}, one for each block of 128 × 128; fetch both again"
        )
    return scales


def _plan_tensors(folder: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> list[TensorPlan]:
    """Every tensor of the model in the order of computation; ModelError unless the folder has just these."""
    plans = []
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelError(f"{folder}: tensor {name} is missing; fetch the model again")
        if tensor.shape != shape:
            raise ModelError(
                f"{tensor.path}: tensor {name} has the shape {list(tensor.shape)}, config.json asks for "
                f"{list(shape)}; fetch both again"
            )
        plans.append(TensorPlan(tensor, name, scales=_find_scales(config, tensor, tensors)))
    check_types(plans, ITEM_BYTES)
    scales = {plan.scales.name for plan in plans if plan.scales is not None}
    if config.stored == E4M3 and not scales:
        raise ModelError(
            f"{folder}: config.json says that the model is FP8, but none of its tensors is {E4M3}"
        )
    for name, tensor in tensors.items():
        if name in shapes or name in scales or _FREQUENCIES.fullmatch(name):
            continue
        matrix = name.removesuffix(SCALES_SUFFIX)
        if matrix != name and matrix in shapes:
            raise ModelError(
                f"{tensor.path}: tensor {name} holds scales, but {matrix} is {tensors[matrix].type} and no "
                f"matrix of {E4M3}; fetch the model again"
            )
        # A tied model may carry its head, as long as that is the embedding.
        twin = tensors.get(_TWINS.get(name, ""))
        tied = twin is not None and (tensor.type, tensor.shape) == (twin.type, twin.shape)
        if not (twin and tied and same_numbers(tensor, twin)):
            raise ModelError(
                f"{tensor.path}: tensor {shown(name)} is not part of a plain Llama model of {config.layers} "
                f"layers{' with tied embeddings' * config.tied_embeddings}: such models are not served yet"
            )
    return plans
