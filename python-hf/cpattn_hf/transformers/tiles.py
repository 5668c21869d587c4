# SPDX-License-Identifier: MIT OR Apache-2.0
"""The loss of this rank's tokens, at once or with the logits of one tile of tokens in memory at a time, in both directions.

For tiles the base model's forward keeps its hidden states (`keeps_hidden`), so that the head computes no logits in the forward pass of the
model. After it the model runs once more for each tile, with these hidden states in place of the base model's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from cpattn.errors import Unsupported
from .attention import Current
from .zero import in_parts

if TYPE_CHECKING:
    from .forward import Forward
    from .parallel import ContextParallel


def summed(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    # In f32 as in Transformers.
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits, labels.long(), ignore_index=-100, reduction="sum" if weights is None else "none")
    return losses if weights is None else (losses * weights).sum()


# The number of tokens of a tile where none is given.
TILE = 1024


def in_tiles(cp: ContextParallel, model: Any, forward: Forward, kwargs: dict[str, Any]) -> Tensor:
    """The summed loss of this rank's tokens, `cp.tile` of them at a time."""
    assert forward.hidden is not None
    total: Tensor = sum(
        tiles(cp, model, forward, kwargs, summed, forward.weights), forward.hidden.new_zeros((), dtype=torch.float32)
    )
    return total


def tiles(
    cp: ContextParallel,
    model: Any,
    forward: Forward,
    kwargs: dict[str, Any],
    function: Callable[..., Tensor],
    weights: Tensor | None = None,
) -> list[Tensor]:
    """The results of a function of the logits and labels of a tile, and weights if there are any, for the tiles of this rank's tokens.
    Its logits are computed again in the backward pass."""
    assert forward.hidden is not None and forward.labels is not None
    hidden, size = forward.hidden, forward.size

    def part(rows: Tensor, labels: Tensor, *weights: Tensor) -> Tensor:
        outer, Current.forward = Current.forward, forward
        forward.tile = rows
        try:
            logits = model.forward(**kwargs).logits[0]
        finally:
            forward.tile, Current.forward = None, outer
        return function(logits, labels, *weights)

    number = number_of(cp, forward, size, model.get_output_embeddings())
    each = () if weights is None else (weights.tensor_split(number),)
    parts = zip(hidden.tensor_split(number, dim=1), forward.labels.tensor_split(number), *each, strict=True)
    return [checkpoint(part, *one, use_reentrant=False) for one in parts]


def number_of(cp: ContextParallel, forward: Forward, size: int, head: Any) -> int:
    """The number of tiles, the same on all ranks: with FSDP and ZeRO-3, each tile gathers the head's parameters, over the replicas too. What a function
    of a user calls is not known."""
    module = isinstance(head, nn.Module)
    sharded = module and any(isinstance(one, FSDPModule) for one in head.modules())
    number: int = -(
        -max(forward.batch.plan.share(rank).q_tokens for rank in range(forward.batch.context.world)) // size
    )
    if (cp.replicas > 1 or cp.sizes) and (not module or sharded or in_parts(head)):
        number = cp._most(number)
    if sharded and TorchVersion(torch.__version__) < "2.11":
        raise Unsupported(
            f"tile is {size}, fully_shard wraps the head separately, and torch.__version__ is {torch.__version__}, which does not gather the "
            "head's parameters again for each tile: use PyTorch 2.11 or later, or leave tile out"
        )
    return number


def keeps_hidden(usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The base model's forward. Keeps the hidden states, so that the head computes no logits, or returns those of a tile."""
    forward: Any = Current.forward
    if not getattr(forward, "size", 0):  # without tiles, or tried by `probe`
        return usual(*args, **kwargs)
    if forward.tile is not None:
        return forward.outputs(last_hidden_state=forward.tile)
    out = usual(*args, **kwargs)
    forward.hidden, forward.outputs = out["last_hidden_state"], type(out)
    out["last_hidden_state"] = forward.hidden[:, :0]
    return out
