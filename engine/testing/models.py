"""A model small enough for virtual time: random weights, one token a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.model import TEMPLATE, TOKENIZER, read_config
from engine.sampling import GREEDY
from kernels.backend import Rows, TokenLog
from kernels.random_model import write_random_model
from kernels.reference import ReferenceBackend
from kernels.sampling import forbidding

if TYPE_CHECKING:
    from pathlib import Path

    from engine.model import ModelConfig
    from engine.sampling import SamplingParams
    from engine.shapes import KVDtype

BOS, EOS, END = "<bos>", "<eos>", "<end>"
CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<end>{% endfor %}assistant:"
)


def write_byte_model(folder: Path, *, seed: int = 0, context_length: int = 256) -> ModelConfig:
    """Write a prepared model folder: a random Llama of two layers over three control tokens and 256 bytes.

    Its answers are noise, but always the same noise for the same log, which is what tests compare.
    """
    tokens = [BOS, EOS, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (BOS, EOS, END)])
    config = write_random_model(
        folder,
        vocab_size=len(tokens),
        hidden_size=24,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn_size=32,
        context_length=context_length,
        seed=seed,
        bos_token=0,
        eos_tokens=(1,),
        name="byte-model",
    )
    (folder / TOKENIZER).write_text(tokenizer.to_str())
    (folder / TEMPLATE).write_text(CHAT)
    return config


def generate(
    folder: Path,
    prompt: tuple[int, ...],
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    stop_tokens: tuple[int, ...] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    kv_dtype: KVDtype = "float16",
) -> list[int]:
    """What the model answers when nothing else runs: one token at a time, alone, on fresh pages.

    `kv_dtype`: of the pages, the topology's; the tokens depend on it.
    """
    config = read_config(folder)
    stops = (*(() if ignore_eos else config.eos_tokens), *stop_tokens)
    shape = config.page_shape(16, kv_dtype)
    total = len(prompt) + max_tokens
    pool = np.zeros(shape.pages_for(total) * shape.page_bytes, np.uint8)
    backend = ReferenceBackend(folder, pool, shape)
    table = np.arange(shape.pages_for(total), dtype=np.int32)
    log = list(prompt)
    filled = 0
    while len(log) < total and (len(log) == len(prompt) or log[-1] not in stops):
        count = len(log) - filled
        mask = forbidding(config.vocab_size, stops) if len(log) - len(prompt) < min_tokens else None
        rows = Rows(
            sequence=np.zeros(count, np.int32),
            position=np.arange(filled, len(log), dtype=np.int32),
            token=np.array(log[filled:], np.int32),
            is_draft=np.zeros(count, np.bool_),
            needs_logits=np.arange(count) == count - 1,
            masks=(*(None,) * (count - 1), mask),
            block_tables=(table,),
            sampling=(sampling,),
            logs=(TokenLog(np.array(log, np.int32), len(prompt)),),
        )
        filled = len(log)
        log.append(int(backend.step(rows).tokens[0]))
    return log[len(prompt) :]
