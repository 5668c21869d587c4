# SPDX-License-Identifier: MIT OR Apache-2.0
"""The loss of a router of experts, over the tokens of all ranks.

In Transformers it is a product of two means over tokens, for each expert: how many tokens choose it, and the router's probability for
it. The product of the means over all tokens is not the mean of the ranks' products, so the ranks add up the sums first. A token that several
answers share counts as often as it would in rows (`router_weights`). Each rank
compares the formula with the model's own result for its own tokens: a model with another formula is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpattn.errors import Unsupported
from .attention import Current

if TYPE_CHECKING:
    from .forward import Forward
    from .parallel import ContextParallel

# Names of a model's attributes, or of its config's.
CHOSEN = ("num_experts_per_tok", "top_k", "moe_topk")
WEIGHT = ("router_aux_loss_coef", "aux_loss_coef")


def keeps_router(base: Any, args: Any, out: Any) -> None:
    """A hook after the base model's forward: the router's logits of this rank's tokens."""
    forward: Any = Current.forward
    if getattr(forward, "tile", 0) is None and isinstance(out, dict):
        forward.router = out.get("router_logits")


class Sum(torch.autograd.Function):
    """The sum over the ranks. Each rank gets the gradient of its own part, times a factor."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, factor: float) -> Tensor:
        ctx.factor = factor
        whole = part.detach().cpu().clone()
        group.sum(whole)
        return whole.to(part.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor, None, None


def _setting(cp: ContextParallel, names: tuple[str, ...], config: bool) -> Any:
    # A model has copied them from its config. TRL's fused head reads the config.
    found = (getattr(one, name, None) for one in (cp.config, cp.model)[:: 1 if config else -1] for name in names)
    return next((value for value in found if value is not None), None)


def _sums(layers: list[Tensor], chosen: int, weights: Tensor | None = None) -> Tensor:
    """For each expert the number of tokens that choose it and the sum of its probabilities, over the layers; and the number of rows. Each token
    counts as often as its weight says."""
    experts, device = layers[0].shape[-1], layers[0].device
    # f64: the number of tokens times layers may exceed 2**24.
    counts, total = (
        torch.zeros(experts, dtype=torch.float64, device=device),
        torch.zeros(experts, dtype=torch.float64, device=device),
    )
    each = (
        torch.ones(len(layers[0]), dtype=torch.float64, device=device)
        if weights is None
        else weights.to(device, torch.float64)
    )
    for logits in layers:
        shares = logits.softmax(-1)
        counts = counts + shares.topk(chosen, dim=-1).indices.flatten().bincount(
            each.repeat_interleave(chosen), minlength=experts
        )
        total = total + each @ shares.double()
    return torch.cat([counts, total, each.sum()[None] * len(layers)])


def _loss(sums: Tensor) -> Tensor:
    counts, total = sums[:-1].chunk(2)
    return (counts * total).sum() * len(counts) / sums[-1] ** 2


def router_loss(cp: ContextParallel, forward: Forward, loss: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The loss over all tokens, and its share of the model's loss, from this rank's router logits and the model's own loss of its tokens."""
    assert forward.group is not None
    layers = [logits.flatten(0, -2) for logits in forward.router or () if isinstance(logits, Tensor)]
    chosen, weight = (_setting(cp, names, forward.reader is not None) for names in (CHOSEN, WEIGHT))
    known = bool(layers) and isinstance(chosen, int) and isinstance(weight, int | float)
    known = known and all(logits.shape == (len(forward.tokens), layers[0].shape[-1]) for logits in layers)
    if known:
        mine = _loss(_sums(layers, chosen)).detach()
        near = 1e-4 if layers[0].dtype in (torch.float32, torch.float64) else 2e-2
        known = bool(
            torch.isclose(loss.to(mine.dtype), mine, rtol=near, atol=0, equal_nan=True)
        )  # NaN in a model that diverges
    # All ranks agree before they exchange numbers of experts.
    agreed = torch.tensor([0 if known else 1])
    forward.group.sum(agreed)
    if agreed.item():
        raise Unsupported(
            f"output_router_logits is set, and the router's loss of {type(cp.model).__name__} is not that of Transformers' load_balancing_loss_func, "
            "which is supported: set model.config.output_router_logits = False, and router_aux_loss_coef=0.0 in the arguments of a TRL trainer"
        )
    weights = None if (every := forward.whole.router_weights) is None else every[forward.own]
    parts = _sums([forward.counted(logits) for logits in layers], chosen, weights)
    whole = _loss(Sum.apply(parts, forward.group, factor))  # type: ignore[no-untyped-call]
    return whole.to(loss.dtype), (whole * weight).to(loss.dtype)
