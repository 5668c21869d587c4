# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a model does with positions, and with numbers of the tokens of its row, seen from PyTorch's calls during a trial.

A model may have a table with a row for each position, which ends somewhere. Or it counts the tokens of its row (`torch.arange`) and computes with the
numbers, as for a scale that grows with the position. On a rank these are other numbers. A trial with few tokens does not show it if only a large
number changes anything: so it is repeated with larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cpattn import UNLIMITED

# Names in configs of the number of positions of a model.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
# Positions from here on are no exact numbers in f32.
EXACT = 1 << 24
# Other tensors have rows of tokens, in a trial fewer than this, of which a router of experts takes some.
LEAST = 128
aten = torch.ops.aten
# Calls that take rows from a table by numbers.
TAKES = (aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default)
INDEXES = (
    *TAKES,
    aten.scatter.src,
    aten.index_add.default,
    aten.index_put.default,
    aten.index_put_.default,
    aten.index_copy.default,
)
COUNTS = (aten.arange.default, aten.arange.start)


def far_position(config: Any, rows: int) -> int:
    """A position that the model has, from which on no number of its config is larger, if there is one."""
    most = next((one for name in LENGTHS if isinstance(one := getattr(config, name, None), int)), 0)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in filter(lambda one: isinstance(one, dict), (rope, *rope.values())):
        if one.get("rope_type") in ("dynamic", "longrope"):  # longer documents are refused
            most = min(
                most,
                one.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or most,
            )
    return min(most, rows, EXACT, max(_numbers(config.to_dict()), default=0) + 64)


def _numbers(value: Any) -> Iterator[int]:
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _numbers(one)
        if isinstance(one, int):
            yield one


class Places(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """The number of `rows` that tables have for positions, and which calls of arange a model computes with, `counted`. Those of `moved` count from
    `by`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.moved, self.by = frozenset[int](), 0
        self.begin(torch.zeros(0))

    def begin(self, positions: Tensor) -> None:
        """A pass with these positions, counted from any number."""
        self._positions, self.rows = positions, UNLIMITED
        self._counted = self._rows = frozenset[int]()
        self._calls, self._of = 0, dict[int, tuple[Tensor, frozenset[int]]]()

    @property
    def counted(self) -> frozenset[int]:
        """The calls of arange in the pass that become numbers that are no whole ones, and choose no rows of a tensor."""
        return self._counted - self._rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TAKES:
            self._take(func, args)
        out = func(*args, **kwargs)
        if func in INDEXES:
            self._rows |= self._known(
                args[1] if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) else args
            )
        if func in COUNTS and out.numel() == self._positions.numel() and not out.is_floating_point():
            self._calls += 1
            out = out + self.by if self._calls in self.moved else out
            self._of[id(out)] = out, frozenset((self._calls,))
        elif isinstance(out, Tensor) and self._of and out.dtype != torch.bool:
            # Kept with the tensor, so that no other one gets its id. Several numbers may cancel out: they are moved together.
            if calls := self._known(args):
                if out.is_floating_point():
                    self._counted |= calls
                else:
                    self._of[id(out)] = out, calls
        return out

    def _known(self, tensors: Any) -> frozenset[int]:
        """The calls of arange that tensors come from."""
        known = (self._of.get(id(one)) for one in tensors if isinstance(one, Tensor))
        return frozenset[int]().union(*(one[1] for one in known if one is not None))

    def _take(self, func: Any, args: Any) -> None:
        table, index, size = args[0], args[1], len(args[0]) if args[0].ndim else 0
        if func is aten.index.Tensor:
            index = next(iter(args[1]), None)
        elif func in (aten.gather.default, aten.index_select.default):
            index, size = args[2], table.shape[args[1]] if table.ndim else 0
            if func is aten.gather.default and index.ndim == table.ndim and index.ndim > 1:
                index = index.movedim(args[1], 0).flatten(1)[:, 0]
        if func is not aten.embedding.default and size < LEAST:
            return
        if isinstance(index, DTensor):  # of tensor parallelism, whose ranks all have the same numbers
            index = index.to_local()
        if isinstance(index, Tensor) and index.dtype != torch.bool and index.numel() == self._positions.numel():
            before = torch.unique(index.flatten() - self._positions).tolist()
            if len(before) == 1:
                self.rows = min(self.rows, size - int(before[0]))
