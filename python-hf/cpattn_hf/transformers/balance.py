# SPDX-License-Identifier: MIT OR Apache-2.0
"""Documents dealt into packs, so that replicas which wait for each other have the same amount of attention to compute, not of tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from cpattn.arguments import attempt, refused, whole
from cpattn.errors import InvalidArgument
from cpattn.packing import numbers_of


def causal_area(length: int) -> float:
    """The number of pairs of a query and a key of a document."""
    return length * (length + 1) / 2


def balanced(
    lengths: Sequence[int], tokens: int, replicas: int = 1, cost: Callable[[int], float] = causal_area
) -> list[list[list[int]]]:
    """Packs of at most so many `tokens`, as `[step][replica]` lists of documents, by their places in `lengths`. Each document is in one pack.

    The packs of a step have about the same cost: that of their documents, by default the area of a causal mask. There are as few steps as
    the tokens allow when the most expensive documents come first. The last step has empty packs if there are fewer documents than packs. The
    result is the same on all ranks. Shuffle steps as you like."""
    ends = numbers_of("lengths", lengths)
    tokens, replicas = whole("tokens", tokens, 1, 2**62), whole("replicas", replicas, 1, 2**31)
    if (bad := next((n for n in ends if not 0 < n <= tokens), None)) is not None:
        raise InvalidArgument(f"lengths has a document of {bad} tokens, from 1 to {tokens} are needed (tokens)")
    costs = []
    for n in ends:
        one = attempt(lambda n=n: float(cost(n)))
        if one is None or not math.isfinite(one) or one < 0:
            raise refused(
                "cost", cost, f"a function is needed that gives a finite number from 0 on, also for {n} tokens"
            )
        costs.append(one)
    order = sorted(range(len(ends)), key=lambda i: (-costs[i], -ends[i], i))
    steps = -(-sum(ends) // (tokens * replicas))
    while (packs := _dealt(ends, costs, order, tokens, steps * replicas)) is None:
        steps += 1
    packs.sort(key=lambda pack: -sum(costs[i] for i in pack))
    return [packs[at : at + replicas] for at in range(0, len(packs), replicas)]


def _dealt(
    lengths: Sequence[int], costs: list[float], order: list[int], tokens: int, number: int
) -> list[list[int]] | None:
    """Each document into the cheapest pack that has room for it; None if one has no room anywhere."""
    packs: list[list[int]] = [[] for _ in range(number)]
    heap = [(0.0, 0, pack) for pack in range(number)]  # cost, tokens, pack
    for i in order:
        full = []
        while heap and heap[0][1] + lengths[i] > tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        before, used, pack = heapq.heappop(heap)
        packs[pack].append(i)
        for entry in (*full, (before + costs[i], used + lengths[i], pack)):
            heapq.heappush(heap, entry)
    return packs
