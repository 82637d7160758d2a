"""How a token is chosen: parameters of a request and the counter-based noise rule.

A sampled token is a pure function of the token log. Penalties are a fold over it: with the logits `l`
of the token at position `t`, in float64 and in this order, for every vocabulary id `v`

    l[v] += bias[v]                                               logit_bias
    l[v] = l[v] / r if l[v] > 0 else l[v] * r                     repetition_penalty r, v in log[:t]
    l[v] -= frequency * n[v] + presence * (n[v] > 0)              n[v]: how often v is in log[prompt:t]

Source: Keskar et al., "CTRL" (2019) for the repetition penalty, in the form of Hugging Face's generate,
which is mild on both sides of zero; OpenAI's API reference for the other two, which count generated
tokens only.

Noise for vocabulary id `v` at log position
`t` (the position that the sampled token will take) is

    Philox4x64-10, key = (seed, choice), counter = (t, v, 0, 0), first output word x
    u = min(((x >> 11) + 0.5) * 2**-53, the largest float64 below 1)
    gumbel = -log(-log(u))

and the token is the argmax of `logit / temperature + gumbel` over the ids that survive the
filters, ties broken by (value descending, id ascending). Temperature 0 is the argmax of the
logits with the same tie rule. Source of the generator: Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC'11; of the Gumbel-max trick: Gumbel 1954, Maddison et al. 2014.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The immutable sampling parameters of one choice of one request.

    The seed is always set here: the gateway draws a missing one once and logs it.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely ids; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely ids whose probabilities sum to at least top_p."""
    min_p: float = 0.0
    """Drop ids less likely than min_p times the most likely one."""
    seed: int = 0
    """Unsigned 64 bit."""
    choice: int = 0
    """Index of this choice among the n of its request."""
    presence_penalty: float = 0.0
    """From -2 to 2; taken once from the logit of every id that was generated."""
    frequency_penalty: float = 0.0
    """From -2 to 2; taken from the logit of an id as often as it was generated."""
    repetition_penalty: float = 1.0
    """From 0.01 to 100; above 1 it makes ids less likely that are in the prompt or were generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit: from -100 to 100), every id once."""

    @property
    def needs_log(self) -> bool:
        """Whether the tokens before the sampled one change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How likely the model found a token: the log-softmax, in float64, of the logits as they come.

    That is before mask, biases, penalties, temperature and filters, so it says what the model thinks and
    not how likely it was that the token was drawn.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, its logprob) of the most likely ids, by (logprob descending, id ascending)."""


GREEDY = SamplingParams()
