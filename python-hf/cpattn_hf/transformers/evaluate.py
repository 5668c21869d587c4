# SPDX-License-Identifier: MIT OR Apache-2.0
"""preprocess_logits_for_metrics of a Trainer, on this rank's tokens before anything is gathered.

It exists so that nobody keeps the logits of all words of all tokens, and often takes the most likely word of each token. Such a function
works token by token. One that does not (it may shift labels, or take a mean over a row) needs whole rows: then logits are gathered first.
Which of the two it is, the first batch shows: some of the tokens, in another order and without the others, must give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpattn.errors import Disagreement

if TYPE_CHECKING:
    from .parallel import ContextParallel

# What a rank has found. Even, as all numbers that ranks exchange after a forward pass (agree.py).
MIXES, UNKNOWN, ALONE = 4, 6, 8


def gathered(cp: ContextParallel, rows: Any) -> Any:
    """Rows of this rank's tokens, of all ranks, also in tuples and mappings. What has no such rows is left as it is: numbers (a router's
    loss), features of images, results of all ranks."""
    if (forward := cp.last) is None or forward.reader is not None:
        return rows
    size, mine = len(forward.tokens), len(forward.own)

    def every(x: Tensor) -> Tensor:
        if x.ndim == 2 and len(x) == size and x.shape != (1, mine):  # [tokens, experts], as a router's logits are
            return cp.gather(x[None, :mine]).flatten(0, 1)
        # A rank without tokens has a pretended one.
        return cp.gather(x[:, :mine]) if x.shape[:2] in ((1, size), (1, mine)) else x

    return _each(every, rows)


class Preprocess:
    def __init__(self, cp: ContextParallel, function: Callable[[Any, Any], Any]) -> None:
        self._cp, self._function = cp, function
        self._found = UNKNOWN

    def __call__(self, logits: Any, labels: Any) -> Any:
        """The function's result for all tokens, on all ranks, from the logits of this rank's tokens."""
        if self._cp.last is not None and self._cp.last.reader is not None:
            return self._function(logits, labels)
        mine, own = self._own(logits, labels)
        if self._found == UNKNOWN:
            transport = self._cp.transport
            outcomes = transport.agree(0, transport.world, self._try(mine, own))
            if others := [rank for rank, number in enumerate(outcomes) if number not in (MIXES, UNKNOWN, ALONE)]:
                raise Disagreement(
                    f"ranks {others} of this group do not evaluate this batch with rank {transport.rank}: did they fail?",
                    others[0],
                )
            self._found = MIXES if MIXES in outcomes else max(outcomes)
        if self._found != ALONE:
            return self._function(gathered(self._cp, logits), labels)
        rows = self._rows
        return gathered(self._cp, _each(lambda x: x[:, :rows], self._function(mine, own)))

    @property
    def _rows(self) -> int:
        assert self._cp.last is not None
        return len(self._cp.last.own)

    def _own(self, logits: Any, labels: Any) -> tuple[Any, Any]:
        """Logits and labels of this rank's tokens; of one pretended token if it has none."""
        assert (forward := self._cp.last) is not None
        places = forward.pack.kept[forward.tokens]

        def own(x: Tensor) -> Tensor:
            if x.shape[:2] != forward.pack.shape:
                return x
            return x.flatten(0, 1)[places.to(x.device)][None]

        return _each(lambda x: x if x.ndim < 2 or x.shape[1] else x.new_zeros(1, 1, *x.shape[2:]), logits), _each(
            own, labels
        )

    def _try(self, logits: Any, labels: Any) -> int:
        """Whether the function works token by token, as far as this rank's tokens show."""
        rows = self._rows
        some = list(range(rows))[::-2]

        def chosen(x: Tensor) -> Tensor:
            return x[:, some] if x.ndim >= 2 and x.shape[:2] == (1, rows) else x

        try:
            whole = _leaves(self._function(logits, labels))
            if any(x.ndim < 2 or x.shape[:2] != (1, max(rows, 1)) for x in whole):
                return MIXES
            if rows < 2:
                return UNKNOWN
            part = _leaves(self._function(_each(chosen, logits), _each(chosen, labels)))
        except Exception:  # noqa: BLE001 (it may need whole rows; if it always fails, it does so below with them)
            return MIXES
        return (
            ALONE
            if len(whole) == len(part) and all(_close(a[:, some], b) for a, b in zip(whole, part, strict=True))
            else MIXES
        )


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6, equal_nan=True)


def _each(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The function of each tensor in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _each(function, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each(function, one) for one in value)
    return value


def _leaves(value: Any) -> list[Tensor]:
    """The tensors of a result. Raises for others."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, list | tuple | Mapping):
        raise TypeError(f"a {type(value).__name__} is no tensor")
    return [leaf for one in (value.values() if isinstance(value, Mapping) else value) for leaf in _leaves(one)]
