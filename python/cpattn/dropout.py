# SPDX-License-Identifier: MIT OR Apache-2.0
"""The pairs that dropout keeps, for a comparison with a computation that has the whole mask."""

from __future__ import annotations

from ctypes import c_uint8

from .arguments import number, whole
from ._library import call
from .errors import InvalidArgument

LARGEST = 2**32 - 1


def dropout_mask(
    probability: float, seed: int, head: int, q_tokens: int, k_tokens: int, *, q_first: int = 0, k_first: int = 0
) -> bytes:
    """For q head `head` of the whole problem, a byte for each pair of a q token and a k token, q token by q token: 1 for a pair that is
    kept, 0 for one that is dropped. Tokens are places in the whole batch, `q_tokens` of them from `q_first` on, and `k_tokens` from
    `k_first` on. It is the same for all meshes, layouts, documents and slices. (`cpattn.torch.dropout_mask` returns a tensor.)

    The rule: Philox 4x32-10 with the counter (q token, k token // 4, head, 0) and the key (seed % 2**32, seed >> 32); of the four words
    that result, word k token % 4 decides: below probability * 2**32 drops.
    """
    probability, seed = number("probability", probability), whole("seed", seed, 0, 2**64 - 1)
    head, q_first, k_first = (
        whole("head", head, 0, LARGEST),
        whole("q_first", q_first, 0, LARGEST),
        whole("k_first", k_first, 0, LARGEST),
    )
    q_tokens, k_tokens = whole("q_tokens", q_tokens, 0, 2**31), whole("k_tokens", k_tokens, 0, 2**31)
    if q_tokens * k_tokens > 2**40:
        raise InvalidArgument(
            f"q_tokens x k_tokens is {q_tokens} x {k_tokens}, at most 2^40 pairs are needed: take fewer rows at a time"
        )
    if not probability:
        return bytes([1]) * (q_tokens * k_tokens)
    mask = (c_uint8 * (q_tokens * k_tokens))()
    call("dropout_mask", probability, seed, q_first, q_tokens, k_first, k_tokens, head, mask)
    return bytes(mask)
