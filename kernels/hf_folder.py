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
from kernels.source import ModelSource, TensorInfo, TensorPlan
from kernels.weights import EMBEDDING, HEAD, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.model import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Old checkpoints keep what follows from `rope_theta`."""


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
    mappable = all(file.mappable for file in files)
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
        plans.append(TensorPlan(tensor, name))
    check_types(plans, ITEM_BYTES)
    for name, tensor in tensors.items():
        if name in shapes or _FREQUENCIES.fullmatch(name):
            continue
        # A tied model may carry its head, as long as that is the embedding.
        embedding = tensors[EMBEDDING]
        tied = name == HEAD and (tensor.type, tensor.shape) == (embedding.type, embedding.shape)
        if not (tied and same_numbers(tensor, embedding)):
            raise ModelError(
                f"{tensor.path}: tensor {shown(name)} is not part of a plain Llama model of {config.layers} "
                f"layers{' with tied embeddings' * config.tied_embeddings}: such models are not served yet"
            )
    return plans
