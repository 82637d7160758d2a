"""Rows that do not fit are refused before anything is touched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kernels import INSTALLED
from row_steps import POISON, Chunk, Pages

from engine.errors import StartError
from engine.sampling import SamplingParams
from kernels.backend import Rows, TokenLog
from kernels.backends import NAMES, open_backend
from kernels.random_model import write_random_model
from kernels.sampling import logprobs_of

if TYPE_CHECKING:
    from pathlib import Path


HERE = [name for name in NAMES if name != "native" or INSTALLED]


@pytest.fixture(params=HERE)
def pages(request: pytest.FixtureRequest, tmp_path: Path) -> Pages:
    return Pages(request.param, tmp_path, write_random_model(tmp_path, context_length=64), tokens=8, pages=10)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PENALISED = SamplingParams(presence_penalty=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": ints(1, 2, 3, 97)}, r"token 97 \(entry 3\) is not below 97"),
        ({"token": ints(1, -1, 3, 4)}, r"token -1 \(entry 1\)"),
        ({"token": ints(1, 2, 3)}, "differ in length"),
        ({"position": ints(0, 1, 2, 64)}, "position 64"),
        ({"position": ints(0, 2, 3, 0)}, "do not ascend one by one"),
        ({"sequence": ints(0, 0, 1, 0)}, "not consecutive"),
        ({"sequence": ints(0, 0, 0, 2)}, "sequence 2"),
        ({"block_tables": (ints(0), ints(10))}, r"sequence 1: page 10 \(entry 0\) is not below 10"),
        ({"block_tables": (ints(0), ints(-1))}, "page -1"),
        ({"block_tables": (ints(), ints(1))}, "block table ends before position 2"),
        ({"block_tables": (ints(3), ints(3))}, "page 3 is written by two sequences"),
        ({"block_tables": (ints(3),)}, "differ in number"),
        ({"masks": (None, None, None, np.zeros(3, np.uint32))}, "row 3: a mask has 4 uint32 words"),
        ({"sampling": (SamplingParams(), SamplingParams(temperature=-1.0))}, "temperature -1.0"),
        ({"sampling": (SamplingParams(), SamplingParams(temperature=float("nan")))}, "temperature nan"),
        ({"sampling": (SamplingParams(top_p=0.0), SamplingParams())}, "top_p 0.0"),
        ({"sampling": (SamplingParams(min_p=1.5), SamplingParams())}, "min_p 1.5"),
        ({"sampling": (SamplingParams(top_k=-1), SamplingParams())}, "top_k -1"),
        ({"sampling": (SamplingParams(seed=-1), SamplingParams())}, "unsigned"),
        ({"sampling": (SamplingParams(presence_penalty=2.5), SamplingParams())}, "from -2 to 2"),
        ({"sampling": (SamplingParams(frequency_penalty=float("nan")), SamplingParams())}, "from -2 to 2"),
        ({"sampling": (SamplingParams(repetition_penalty=0.0), SamplingParams())}, "from 0.01 to 100"),
        ({"sampling": (SamplingParams(logit_bias=((97, 1.0),)), SamplingParams())}, "token 97 of 97"),
        ({"sampling": (SamplingParams(logit_bias=((1, 101.0),)), SamplingParams())}, "bias of 101"),
        ({"sampling": (SamplingParams(logit_bias=((1, 1.0), (1, 2.0))), SamplingParams())}, "two biases"),
        ({"logprobs": (1,)}, "logprobs and sampling parameters differ in number"),
        ({"logprobs": (None, -1)}, "negative number of logprobs"),
        ({"sampling": (PENALISED, SamplingParams())}, "sequence 0: its penalties need its log"),
        ({"sampling": (PENALISED, SamplingParams()), "logs": (None,)}, "differ in number"),
        (
            {"sampling": (PENALISED, SamplingParams()), "logs": (TokenLog(ints(1, 2), 0), None)},
            "log ends before position 2",
        ),
        (
            {"sampling": (PENALISED, SamplingParams()), "logs": (TokenLog(ints(1, 2, 97), 0), None)},
            "log token 97",
        ),
    ],
)
def test_bad_rows_touch_nothing(pages: Pages, change: dict[str, Any], message: str) -> None:
    rows = pages.rows([Chunk(0, 0, [1, 2, 3]), Chunk(1, 0, [4])])
    with pytest.raises(ValueError, match=message):
        pages.backend.step(replace(rows, **change))
    assert (pages.pool == POISON).all()


def test_logprobs_come_for_the_rows_that_ask(pages: Pages) -> None:
    rows = pages.rows([Chunk(0, 0, [1, 2, 3], "all"), Chunk(1, 0, [4]), Chunk(2, 0, [5], "none")])
    plain = pages.backend.step(rows, return_logits=True)
    assert plain.logprobs == ()
    result = pages.backend.step(replace(rows, logprobs=(2, None, 0)))
    assert result.tokens.tolist() == plain.tokens.tolist()
    assert plain.logits is not None
    assert result.logprobs[3] is None
    for row, made in enumerate(result.logprobs[:3]):
        token = int(result.tokens[row])
        expected = logprobs_of(plain.logits[row], token, 2)
        assert made is not None
        assert [id_ for id_, _ in made.top] == [id_ for id_, _ in expected.top]
        # the native backend's exp and log are its own
        assert [made.logprob, *dict(made.top).values()] == pytest.approx(
            [expected.logprob, *dict(expected.top).values()], abs=1e-12, rel=0
        )
        assert made.top[0] == (token, made.logprob)


def test_a_step_without_rows_does_nothing(pages: Pages) -> None:
    none = np.zeros(0, np.int32)
    no = np.zeros(0, np.bool_)
    result = pages.backend.step(Rows(none, none, none, no, no, (), (), ()), return_logits=True)
    assert result.tokens.shape == (0,)
    assert result.logits is not None
    assert result.logits.shape == (0, 97)
    assert (pages.pool == POISON).all()


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    config = write_random_model(tmp_path)
    shape = config.page_shape(16, "float32")
    pool = np.zeros(shape.page_bytes * 2, np.uint8)
    with pytest.raises(StartError, match="unknown backend 'abacus'; known are native, torch, reference"):
        open_backend("abacus", tmp_path, pool, shape, 1)
    for name in HERE:
        with pytest.raises(StartError, match="not some pages"):
            open_backend(name, tmp_path, pool[:-4], shape, 1)
        with pytest.raises(StartError, match="not some pages"):
            open_backend(name, tmp_path, pool[:0], shape, 1)
        with pytest.raises(StartError, match="writable"):
            open_backend(name, tmp_path, np.frombuffer(bytes(pool), np.uint8), shape, 1)
    other = write_random_model(tmp_path / "other", layers=3).page_shape(16, "float32")
    for name in HERE[:-1]:
        with pytest.raises(StartError, match="threads"):
            open_backend(name, tmp_path, pool, shape, 0)
        with pytest.raises(StartError, match="page shape"):
            open_backend(name, tmp_path, pool, other, 1)
    float8 = config.page_shape(16, "float8")
    with pytest.raises(StartError, match="no float8 pages; take the native backend"):
        open_backend("torch", tmp_path, np.zeros(float8.page_bytes, np.uint8), float8, 1)
