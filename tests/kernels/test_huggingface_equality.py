"""Greedy output on the default model equals Hugging Face's Llama in float32, token for token."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from row_steps import Chunk, Pages
from tokenizers import Tokenizer

from engine.model import TOKENIZER, WEIGHTS, ModelConfig, read_config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.model,
    # transformers and what it imports use deprecated parts of other packages
    pytest.mark.filterwarnings("default"),
]

NEW_TOKENS = 64
TOLERANCE = 1e-4
"""Largest difference of logits over the largest logit."""

PROMPTS = {
    5: """
The capital of France is a city
Once upon a time there was a
def fibonacci(n): if n
Water boils at a temperature of
My favourite book is about an old
""",
    12: """
A relay race is a racing competition where members of a team take turns
To make pancakes, first whisk two eggs with a cup of flour and some milk
In 1969, Neil Armstrong became the first person to walk on the Moon, and
The three primary colours are red, yellow and blue. Mixing blue and yellow
Dear Sir or Madam, I am writing to you about the broken heating in my
""",
    20: """
Question: A farmer has seventeen sheep, and all but nine of them run away. How many are left? Answer:
The mitochondrion is an organelle of eukaryotic cells. Its main purpose is to generate energy in the form of
Translate to French. English: Good morning, how are you? I would like a cup of coffee. French: Bonjour
SELECT name, price FROM products WHERE price > 100 ORDER BY price DESC LIMIT 10; -- The query above returns
It was a cold day in April, and the whole town was waiting for a train that had been due since morning
""",
    18: r"""
<|im_start|>user\nWhy is the sky blue and the sunset red?<|im_end|>\n<|im_start|>assistant\n
<|im_start|>user\nWrite a short poem about the sea and a lighthouse keeper.<|im_end|>\n<|im_start|>assistant\n
<|im_start|>user\nWhich planets have rings, and what are they made of?<|im_end|>\n<|im_start|>assistant\n
<|im_start|>user\nName three reasons to learn an instrument as an adult.<|im_end|>\n<|im_start|>assistant\n
<|im_start|>user\nHow do I sort a list of words by their length in Python?<|im_end|>\n<|im_start|>assistant\n
""",
}
"""Token count -> prompts, one a line, cut to it, so that no side needs padding."""


@dataclass(frozen=True)
class Answer:
    """What one side made of one prompt."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray
    """[NEW_TOKENS, vocab_size]"""


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_folder / TOKENIZER))
    cut = [
        tokenizer.encode(line.replace(r"\n", "\n")).ids[:count]
        for count, text in PROMPTS.items()
        for line in text.strip().splitlines()
    ]
    assert [len(ids) for ids in cut] == [count for count in PROMPTS for _ in range(5)]
    return cut


@pytest.fixture(scope="module")
def theirs(model_folder: Path, prompts: list[list[int]]) -> list[Answer]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    config = read_config(model_folder)
    model = transformers.LlamaForCausalLM(huggingface_config(transformers, config)).eval()
    missing, unexpected = model.load_state_dict(load_file(model_folder / WEIGHTS), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if config.tied_embeddings else [], [])
    model.tie_weights()
    assert model.dtype == torch.float32
    answers = []
    for count in PROMPTS:
        ids = torch.tensor([prompt for prompt in prompts if len(prompt) == count])
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = torch.stack(made.logits, 1).numpy()
        tokens = made.sequences[:, count:].tolist()
        answers += [Answer(*each) for each in zip(ids.tolist(), tokens, logits, strict=True)]
    return answers


@pytest.fixture(scope="module")
def ours(model_folder: Path, prompts: list[list[int]]) -> list[Answer]:
    pages = Pages("torch", model_folder, read_config(model_folder), pages=160, threads=2)
    chunks = [Chunk(i, 0, prompt) for i, prompt in enumerate(prompts)]
    tokens: list[list[int]] = [[] for _ in prompts]
    logits = []
    for _ in range(NEW_TOKENS):
        result = pages.step(chunks)
        assert result.logits is not None
        logits.append(result.logits)
        for made, token in zip(tokens, result.tokens.tolist(), strict=True):
            made.append(token)
        chunks = [Chunk(c.sequence, c.position + len(c.tokens), tokens[c.sequence][-1:]) for c in chunks]
    return [Answer(*each) for each in zip(prompts, tokens, np.stack(logits, 1), strict=True)]


def huggingface_config(transformers: Any, config: ModelConfig) -> Any:
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_size,
        max_position_embeddings=config.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.rms_eps,
        tie_word_embeddings=config.tied_embeddings,
    )


def test_tokens_are_equal(ours: list[Answer], theirs: list[Answer]) -> None:
    """No tolerance: a near-tie that the two decide differently is a failure, shown with its margin."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.prompt == b.prompt
        split = next((i for i in range(NEW_TOKENS) if a.tokens[i] != b.tokens[i]), None)
        if split is not None:
            margin = abs(b.logits[split][a.tokens[split]] - b.logits[split][b.tokens[split]])
            pytest.fail(
                f"prompt {a.prompt}: token {split} is {a.tokens[split]}, not {b.tokens[split]}; {margin=}"
            )
    assert len({tuple(answer.tokens) for answer in ours}) == len(ours)


def test_logits_are_equal_within_rounding(ours: list[Answer], theirs: list[Answer]) -> None:
    pairs = zip(ours, theirs, strict=True)
    worst = max(np.abs(a.logits - b.logits).max() / np.abs(b.logits).max() for a, b in pairs)
    print(f"largest difference of logits over largest logit: {worst:.1e}")
    assert worst <= TOLERANCE


def test_transformers_is_not_confused_by_our_package_named_kernels() -> None:
    """transformers probes for a distribution of the name `kernels`; ours is only a package of that name."""
    transformers = pytest.importorskip("transformers")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")
    assert not transformers.utils.import_utils.is_kernels_available()
