# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows of this rank's tokens given to all ranks, with gradients, and what is computed from them: log-probabilities of labels.

Every rank gets the rows of all tokens, and computes from them what one process would compute. In the backward pass each rank takes the
gradient of the rows of its own tokens, so the gradients of all ranks together are those of the whole batch, each counted once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import ModelOutput

from cpattn.arguments import number
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.torch.group import Collectives
from .pack import Pack
from .tiles import TILE, tiles

if TYPE_CHECKING:
    from .forward import Forward
    from .parallel import ContextParallel


def spread(pack: Pack, tokens: Tensor, rows: Tensor, fill: float, group: Collectives) -> Tensor:
    """From rows of this rank's tokens, `[tokens, ...]`, to `[rows, tokens, ...]` in the order of input_ids, on all ranks."""
    # As bytes: each row comes from one rank, so the sum is exact in any dtype.
    every = torch.zeros((len(pack.ids), *rows.shape[1:]), dtype=rows.dtype)
    every[tokens.cpu()] = rows.detach().cpu()
    group.sum(every.view(-1).view(torch.uint8))
    if len(pack.ids) < (places := pack.shape[0] * pack.shape[1]):
        own, every = every, torch.full((places, *rows.shape[1:]), fill, dtype=rows.dtype)
        every[pack.kept.cpu()] = own
    return every.reshape(*pack.shape, *rows.shape[1:]).to(rows.device)


class Spread(torch.autograd.Function):
    """`spread` with gradients: each rank takes those of its own rows, times a factor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forward: Forward, factor: float) -> Tensor:
        assert forward.group is not None
        ctx.places, ctx.factor = forward.whole.kept[forward.own], factor
        return spread(forward.whole, forward.own, rows, 0, forward.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.flatten(0, 1)[ctx.places.to(gradient.device)] * ctx.factor, None, None


class Reader:
    """What is made of the outputs of a forward pass, other than the loss of the model's labels."""

    # The number of tokens whose logits exist at a time, 0 if the model computes its head itself.
    tile = 0

    def __init__(self, cp: ContextParallel, factor: float) -> None:
        self.cp, self.factor = cp, factor

    def bytes(self) -> bytes:
        """Bytes that are equal for equal arguments, other than those of the documents."""
        return b""

    def arguments(self, forward: Forward) -> dict[str, Any]:
        """More arguments of the model's forward."""
        return {}

    def result(self, model: Any, forward: Forward, out: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def all(self, forward: Forward, rows: Tensor) -> Tensor:
        """From rows for the tokens that this rank's model got, `[tokens, ...]`, to those of all tokens."""
        whole: Tensor = Spread.apply(forward.counted(rows), forward, self.factor)  # type: ignore[no-untyped-call]
        return whole


class Fused(Reader):
    """The outputs of TRL's `add_fused_lm_head`, with which its trainers compute their losses: numbers of tokens, no logits.

    The head runs on this rank's tokens, in parts. Its temperature, its scale and its kernel are TRL's."""

    def __init__(self, cp: ContextParallel, factor: float, shifted: bool) -> None:
        super().__init__(cp, factor)
        self.shifted = shifted

    def arguments(self, forward: Forward) -> dict[str, Any]:
        assert forward.labels is not None
        return {"shift_labels": forward.labels[None], "fused_lm_head": True}

    def result(self, model: Any, forward: Forward, out: Any, kwargs: dict[str, Any]) -> Any:
        for field in fields(out):
            rows = getattr(out, field.name)
            if isinstance(rows, Tensor) and rows.ndim == 2:
                whole = self.all(forward, rows[0])
                # The label of the last token of a row is in no row.
                out[field.name] = whole if self.shifted else whole[:, :-1]
        count = forward.items if forward.items is not None else max(forward.whole.count, 1)
        out["loss"] = -out.log_probs.sum() / count
        return out


@dataclass
class Scores(ModelOutput):
    """Of the label of each token, `[rows, tokens]` in the order of input_ids, on all ranks; 0 at tokens without a label.

    The label of a token is the next token, at the place of the token before it, as logits are."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None


class LogProbs(Reader):
    """For `ContextParallel.logprobs`."""

    def __init__(self, cp: ContextParallel, factor: float, temperature: float, entropy: bool, inputs: Any) -> None:
        super().__init__(cp, factor)
        if cp._kept:
            raise Unsupported(
                f"logprobs of {type(cp.model).__name__}, whose head gives no words: call the model, whose logits are those of rows"
            )
        if inputs.get("labels") is None and inputs.get("shift_labels") is None:
            raise InvalidArgument(
                "inputs has no labels, which are needed: the ids of the tokens whose log-probabilities you want, -100 at others"
            )
        if not (temperature := number("temperature", temperature)) > 0:
            raise InvalidArgument(f"temperature is {temperature}, more than 0 is needed")
        self.temperature, self.entropy, self.tile = temperature, entropy, cp.tile or TILE
        self._calls = 0

    def bytes(self) -> bytes:
        return repr((self.temperature, self.entropy)).encode()

    def scores_of(self, out: Any) -> Scores:
        """The result, which the model that was called has handed on."""
        if not self._calls or not isinstance(out, Scores):
            raise InvalidArgument(
                f"the model that was called gave a {type(out).__name__} without calling the model of this ContextParallel: give one that wraps it"
            )
        return out

    def result(self, model: Any, forward: Forward, out: Any, kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        assert forward.labels is not None
        if forward.hidden is None:
            rows = self._rows(out.logits[0], forward.labels)
        else:
            rows = torch.cat(tiles(self.cp, model, forward, kwargs, self._rows))
        return Scores(*self.all(forward, rows).unbind(-1))

    def _rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """`[tokens, 1 or 2]`: the log-probability of the label of each token, and the entropy of its logits."""
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        every = F.log_softmax(logits, dim=-1)
        known = labels != -100
        found = [every.gather(-1, labels.clamp(min=0).long()[:, None])[:, 0]]
        if self.entropy:
            # A word of probability 0 has the logarithm -inf.
            found.append(-(every.exp() * every.clamp(min=torch.finfo(every.dtype).min)).sum(-1))
        return torch.stack([row.masked_fill(~known, 0) for row in found], dim=-1)
