# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether a model's own loss is the mean cross entropy of its labels, which is what the ranks compute together.

The model gets no labels in a pass over several ranks, since the label of a token may be on another rank. So whatever a class of a model
does with labels beside this (a penalty on its logits, a weight, a smoothing) would be lost. The trial runs it once with labels, alone,
and compares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .router import WEIGHT

# Of a model that does not shift its labels (BartForCausalLM and its relatives): `shift_labels` are not shifted either.
PLACES = "its own loss compares each token with the label at the same place: give such labels as shift_labels"


def of_labels(logits: Tensor, labels: Tensor, shifted: bool) -> Tensor:
    """The mean cross entropy of one row of labels, in f64."""
    logits, labels = (logits[:-1], labels[1:]) if shifted else (logits, labels)
    return F.cross_entropy(logits.double(), labels)


def difference(model: Any, out: Any, labels: Tensor, shifted: bool) -> str:
    """What a model's loss is instead, and the way out; nothing if it is the expected one, or if the model makes none.

    A router's loss, which `router` adds, is a part of it where the model says so."""
    loss, logits, aux = (out.get(name) for name in ("loss", "logits", "aux_loss"))
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor):
        return ""
    # Most models make it in f32 of logits in half precision; some in half precision.
    most = 2e-5 if loss.dtype in (torch.float32, torch.float64) else 0.02
    router = torch.zeros((), dtype=torch.float64)
    if isinstance(aux, Tensor):
        weights = (getattr(one, name, None) for one in (model, model.config.get_text_config()) for name in WEIGHT)
        router = aux.double() * next((value for value in weights if value is not None), 0.0)

    def is_loss(usual: Tensor) -> bool:
        return bool(torch.isclose(loss.double(), usual + router, rtol=most, atol=most))

    usual = of_labels(logits[0], labels, shifted)
    if is_loss(usual):
        return ""
    if shifted and is_loss(of_labels(logits[0], labels, False)):
        return PLACES
    return (
        f"its own loss of {len(labels)} tokens is {float(loss):.6g}, and the mean cross entropy of their labels is {float(usual + router):.6g}: "
        "give no labels, and compute the loss from the logits of this rank's tokens (cp.last.tokens) or of all (cp.gather)"
    )
