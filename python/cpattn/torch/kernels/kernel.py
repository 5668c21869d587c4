# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a kernel is, what it honours, and the refusal of what it does not.

A kernel computes attention between packed rows on one device. It knows neither ranks nor plans. Its `form` says what it takes:

- "rows": for each row of q, intervals of rows of k (`rows.Rows`). Any band of any ranges is one call.
- "rectangles": sequences of packed rows with one pair of window limits for all (`rectangles.Rectangles`), as every kernel for
  variable lengths has them.

Sinks, merges and the gradient of lse are no options of a kernel: they are computed outside of it, exactly, for every kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...arguments import instance, one_of
from ...errors import Unsupported
from ...options import LseBase

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Honours:
    """What a kernel computes right. Everything else is refused by `refuse` before it is called.

    `devices` are device types, None: all. `head_dim` is the largest, `head_dim_multiple` what q's, k's and v's are padded to with
    columns of zeros. `returns_f32`: o comes back in f32 (f64 for f64) and is not rounded to the inputs' type. `group`: q heads per kv
    head may be more than one. `strides`: rows and heads of q, k, v and d_o may have any, else these are contiguous.
    `windows`: any limits, else none or 0 on the right. `square`: 0 on the right only where a sequence has as many keys as rows, whatever the
    corner is that the kernel counts from. `takes_delta`: its backward reads delta and no o."""

    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...] | None = None
    head_dim: int | None = None
    head_dim_multiple: int = 1
    value_dim: bool = False
    windows: bool = True
    softcap: bool = False
    slopes: bool = False
    group: bool = True
    returns_f32: bool = False
    deterministic: bool = False
    strides: bool = False
    takes_delta: bool = False
    backward: bool = True
    max_logit: bool = False
    square: bool = False


class Kernel:
    """The base of all kernels. `name` is what errors and `explain` call it.

    q is [rows, heads, head_dim], k and v [keys, kv heads, dim], o [rows, heads, value dim], lse [heads, rows] in natural logarithms.
    The tensors of a call of rectangles are contiguous.

    Inputs are valid during the call only, and their memory is used again: keep copies. What is returned is read before the next call."""

    name: str = ""
    form: Literal["rows", "rectangles"] = "rectangles"
    honours: Honours

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Any) -> tuple[Tensor, Tensor]:
        """o and lse of all rows of q. Rows without keys: o = 0, lse = -inf."""
        raise NotImplementedError

    def backward(
        self,
        d_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        lse: Tensor,
        call: Any,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv with p = exp(s - lse) and ds = p·(dp - delta): `lse` and `delta` [heads, rows] are those of whole rows, of which
        a call may have a part of the keys. `o` is some tensor with rowsum(o·d_o) = delta, for kernels that compute delta themselves."""
        raise NotImplementedError

    def prepare(self, call: Any) -> None:
        """Called once for each call of a plan, before the first run."""

    def of(self, dtype: torch.dtype) -> Kernel:
        """The kernel for inputs of a type."""
        return self

    def __repr__(self) -> str:
        return f"<kernel {self.name!r}>"


def refuse(kernel: Kernel, settings: Mapping[str, Any]) -> None:
    """Raises Unsupported for the options of a plan that a kernel cannot honour: all of them in one text, each by its name.

    `settings` has the names of `PlanOptions`, of a call and of a context; those that are missing are not asked for: dtype (of
    PyTorch), device, head_dim, value_dim, heads, kv_heads, window_left, window_right, softcap, alibi_slopes, return_max_logit,
    dropout, dropout_seed, key_indices, lse_base, block_table, page_size, page_stride, deterministic, reproducible, backward, lse_gradient."""
    instance("kernel", kernel, Kernel, "a kernel is needed: see cpattn.torch.kernels.find")
    wanted, dtype = Asked(settings), settings.get("dtype")
    able, faults = (kernel.of(dtype) if dtype is not None else kernel).honours, []

    def no(name: str, value: Any, needed: str) -> None:
        faults.append(f"{name} is {value}, {needed}")

    if dtype is not None and dtype not in able.dtypes:
        no("dtype", dtype, f"one of {', '.join(map(str, able.dtypes))} is needed")
    if (
        (device := settings.get("device")) is not None
        and able.devices is not None
        and torch.device(device).type not in able.devices
    ):
        no("device", device, f"one of {', '.join(able.devices)} is needed")
    head_dim = settings.get("head_dim") or 0
    value_dim = settings.get("value_dim") or head_dim
    # Other differences of dims, and groups of heads, are padded and expanded outside of the kernel.
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if able.head_dim is not None and dim > able.head_dim:
            no(name, dim, f"at most {able.head_dim} is needed")
    if (
        able.head_dim is not None
        and settings.get("lse_gradient")
        and not able.takes_delta
        and head_dim <= able.head_dim >= value_dim
    ):
        # Its columns: see `packed`.
        if (needed := value_dim + columns_of_delta(dtype)) > able.head_dim:
            no(
                "the gradient of lse",
                "used",
                f"value_dim of at most {able.head_dim - needed + value_dim} is needed, or return_lse=False",
            )
    for name in ("window_left", "window_right"):
        # Every causal mask is a window with the limit 0 on the right.
        if settings.get(name) is not None and not able.windows and not (name == "window_right" and settings[name] == 0):
            no(name, settings[name], "None is needed")
    if wanted.number("softcap") and not able.softcap:
        no("softcap", settings["softcap"], "0 is needed")
    if settings.get("alibi_slopes") is not None and not able.slopes:
        no("alibi_slopes", "set", "None is needed")
    if settings.get("return_max_logit") and not able.max_logit:
        no("return_max_logit", True, "False is needed")
    if wanted.number("dropout"):
        no("dropout", settings["dropout"], "0 is needed")
    if settings.get("dropout_seed") is not None:
        no("dropout_seed", settings["dropout_seed"], "None is needed: no plan has dropout")
    if settings.get("lse_base") is not None and one_of("lse_base", settings["lse_base"], LseBase) != LseBase.NATURAL:
        no("lse_base", repr(settings["lse_base"]), "'natural' is needed")
    for name in ("key_indices", "block_table"):
        if settings.get(name) is not None:
            no(name, "set", "None is needed")
    for name in ("page_size", "page_stride"):
        if settings.get(name) is not None:
            no(name, settings[name], "None is needed")
    if settings.get("reproducible"):
        no("reproducible", True, "False is needed: the order of a kernel's sums depends on its rows")
    if settings.get("deterministic") and not able.deterministic:
        no("deterministic", True, "False is needed")
    if settings.get("backward") and not able.backward:
        no("backward", True, "a forward without gradients is needed (torch.no_grad)")
    if faults:
        raise Unsupported(
            f"kernels={kernel.name!r} honours no such call: {'; '.join(faults)}. {way_out(kernel, settings)}"
        )


def columns_of_delta(dtype: torch.dtype | None) -> int:
    """How many numbers of a type hold one of f32."""
    return 3 if dtype in HALF else 1


@dataclass(frozen=True)
class Asked:
    settings: Mapping[str, Any]

    def number(self, name: str) -> float:
        return self.settings.get(name) or 0


def way_out(kernel: Kernel, settings: Mapping[str, Any]) -> str:
    """What to use instead."""
    ours = 'kernels="cpattn", the kernels of this library'
    of_ours = ("dropout_seed", "key_indices", "lse_base", "block_table", "page_size", "page_stride")
    if (
        settings.get("dropout")
        or settings.get("reproducible")
        or kernel.name == "math"
        or any(settings.get(name) is not None for name in of_ours)
    ):
        return f"Use {ours}"
    return f'Use {ours}, or kernels="math", which has no such limit'
