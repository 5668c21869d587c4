# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a forward pass gathers rows of other ranks: `reads` for layers that run their own attention, `gather` and `halo` for mixers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cpattn.errors import Unsupported
from cpattn.torch import Batch
from cpattn.torch.group import Gathered, Halo, Reads
from ..masks import Parts, Window
from ..pack import Pack


class Gathers:
    """The methods of a forward pass over this batch. A rank without tokens has a row all the same, which it does not send."""

    batch: Batch
    pack: Pack

    def reads(self, window: Window | Parts) -> Reads:
        if isinstance(window, Parts) or self.pack.slices is not None:
            what = "blocks or chunks" if isinstance(window, Parts) else "slices"
            raise Unsupported(
                f"the model has layers that run their own attention on gathered keys, which take documents with or without a window, and the mask has {what}: "
                "give each answer its own prompt, documents within a chunk, and no token types; or use cpattn.torch, whose batches gather by any slices"
            )
        return self.batch.reads(window_left=window[0], window_right=window[1])

    def gather(self, x: Tensor | Sequence[Tensor], side: str = "k", **window: int) -> Gathered:
        reads = self.batch.reads(side, **window)
        rows = reads.gather(*(one[: reads.given] for one in ([x] if isinstance(x, Tensor) else x)))
        return reads.said(rows[0] if isinstance(x, Tensor) else rows, rows[0].device)

    def halo(self, x: Tensor, taps: int) -> Halo:
        reads = self.batch.halo_reads(taps)
        halo = reads.halo(reads.gather(x[: reads.given])[0], taps)
        return halo if reads.given else Halo(halo.rows, halo.places.new_zeros(1, taps + 1))
