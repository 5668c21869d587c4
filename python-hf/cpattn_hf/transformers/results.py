# SPDX-License-Identifier: MIT OR Apache-2.0
"""The outputs of a forward pass: loss and logits of this rank's tokens become what the model returns.

The loss is that of the whole batch on every rank. Router losses are those of all tokens (`router`), and readers (`scores`, `pooled`) make results
of all tokens themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from cpattn.torch.group import Total
from .router import router_loss
from .tiles import in_tiles, summed

if TYPE_CHECKING:
    from .forward import Forward
    from .parallel import ContextParallel


def results(cp: ContextParallel, model: Any, forward: Forward, out: Any, kwargs: dict[str, Any]) -> Any:
    weighted = None
    if isinstance(out.get("aux_loss"), Tensor):
        out["aux_loss"], weighted = router_loss(cp, forward, out["aux_loss"], cp.factor)
    if forward.reader is not None:
        aux, out = out.get("aux_loss"), forward.reader.result(model, forward, out, kwargs)
        if aux is not None:
            out["aux_loss"] = aux
    else:
        _losses(cp, model, forward, out, kwargs)
    if weighted is not None and out.get("loss") is not None:
        out["loss"] = out["loss"] + weighted
    return out


def _losses(cp: ContextParallel, model: Any, forward: Forward, out: Any, kwargs: dict[str, Any]) -> None:
    logits = out.logits
    if not len(forward.own):
        out["logits"] = logits[:, :0]
    if forward.labels is None:
        return
    if forward.hidden is None:
        part = summed(logits[0], forward.labels, forward.weights)
    else:
        out["logits"], part = None, in_tiles(cp, model, forward, kwargs)
    items = forward.items if forward.items is not None else forward.whole.count
    out["loss"] = Total.apply(part, cp.transport, cp.factor) / items  # type: ignore[no-untyped-call]
    if forward.ahead is not None:
        out["loss"], out["mtp_loss"] = out["loss"] + forward.ahead, forward.ahead.detach()
