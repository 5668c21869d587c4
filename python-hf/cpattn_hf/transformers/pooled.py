# SPDX-License-Identifier: MIT OR Apache-2.0
"""Heads that read one token of each row: ...ForSequenceClassification, with which rewards are computed too.

Such a model computes scores of all tokens (`model.score`) and takes those of the last token of a row that is not the padding's id. Here
the scores of this rank's tokens are kept, given to all ranks, and then the rows' tokens are taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpattn.errors import InvalidArgument, Unsupported
from .scores import Fused, Reader

if TYPE_CHECKING:
    from .forward import Forward
    from .parallel import ContextParallel


def pools(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    return type(inner).__name__.endswith("ForSequenceClassification") and isinstance(
        getattr(model, "score", None), torch.nn.Module
    )


class Kept:
    """The scores of a pass of a model's head, which has a hook during the pass alone: PEFT may wrap, replace or copy a head between two passes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.scores: Tensor | None = None
        self._hook: Any = None

    def replace(self) -> None:
        """Keeps what the hooks return that the head has now: ZeRO-3 gathers its parameters again for the backward pass of that."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._model.score.register_forward_hook(self._keep)

    def restore(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self.scores = None

    def _keep(self, module: Any, args: Any, scores: Tensor) -> None:
        self.scores = scores

    def take(self) -> Tensor:
        """`[1, tokens, classes]`"""
        scores, self.scores = self.scores, None
        if scores is None or scores.ndim != 3:
            raise Unsupported("the model's head `score` gave no scores of all tokens, which are needed")
        return scores


class Pooled(Reader):
    def __init__(self, cp: ContextParallel, factor: float, kept: Kept, inputs: Any) -> None:
        super().__init__(cp, factor)
        self.kept, self.labels, self.ids, self.mask = (
            kept,
            inputs.get("labels"),
            inputs["input_ids"],
            inputs.get("attention_mask"),
        )
        padding = getattr(cp.config, "pad_token_id", None)
        if padding is None and len(self.ids) > 1:
            raise InvalidArgument(
                f"input_ids has {len(self.ids)} rows and config.pad_token_id is None: set it, so that the last token of a row is known"
            )
        if self.labels is not None and (
            not isinstance(self.labels, Tensor) or self.labels.shape[:1] != self.ids.shape[:1]
        ):
            shape = tuple(self.labels.shape) if isinstance(self.labels, Tensor) else self.labels
            raise InvalidArgument(f"labels is {shape}, a tensor with the labels of {len(self.ids)} rows is needed")
        places = torch.arange(self.ids.shape[1], device=self.ids.device).expand(self.ids.shape)
        self.last = places[:, -1] if padding is None else (places * (self.ids != padding)).argmax(-1)
        if self.mask is not None and not bool((at := self.mask.gather(1, self.last[:, None])[:, 0].bool()).all()):
            row = int((~at).nonzero()[0])
            raise InvalidArgument(
                f"attention_mask is 0 at place {int(self.last[row])} of row {row}, the last token there with another id than the padding's "
                f"({padding}), which the head reads: put the padding's id where attention_mask is 0"
            )

    def bytes(self) -> bytes:
        return (
            b"" if self.labels is None else self.labels.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        )

    def result(self, model: Any, forward: Forward, out: Any, kwargs: dict[str, Any]) -> Any:
        scores = self.all(forward, self.kept.take()[0])
        logits = scores[torch.arange(len(self.last), device=scores.device), self.last.to(scores.device)]
        out["logits"] = logits
        if self.labels is not None:
            out["loss"] = model.loss_function(
                logits=logits, labels=self.labels, pooled_logits=logits, config=model.config
            )
        return out


def reader_of(cp: ContextParallel, kept: Kept | None, inputs: Any) -> Reader | None:
    """What makes the results of a forward pass, if it is not the model's own loss and logits."""
    if inputs.get("fused_lm_head"):
        return Fused(cp, cp.factor, inputs.get("shift_labels") is not None)
    return Pooled(cp, cp.factor, kept, inputs) if kept else None
