# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the planner alone does, and what it refuses. `.ci/python` runs it with a library that it builds, with PyTorch and beside a full
library; `python/wheels --planner --check` runs it with the small wheel, in an environment where only that and NumPy are installed.

python python/tests/planner.py [FULL_LIBRARY]

With the path of a full library, a group of two processes has one of each. Not a module of unittest: with the full wheel there is nothing to
see.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

since = time.perf_counter()
import cpattn

IMPORT = time.perf_counter() - since


def refused(text: str, call: Any) -> None:
    try:
        call()
    except cpattn.Unsupported as error:
        assert text in str(error), error
        assert "full wheel" in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")


def plans() -> None:
    """Plans, proofs, schedules and the moves of heads are those of the full library; attention is refused before anything moves."""
    plan = cpattn.Plan([0, 61, 61, 200], 4, 16, kv_heads=2, world=4, ulysses=2, ring=2)
    plan.verify()
    assert len(plan.schedule(0, "forward").ops) > 3
    assert sorted(token for rank in range(4) for token in plan.tokens("q", rank)) == list(range(200))

    def moved(number: int, rank: cpattn.Rank) -> None:
        share, rows = plan.share(number), len(plan.tokens("q", number))
        tokens = np.random.default_rng(number).random((rows, 4, 16), np.float32)
        heads = np.full(
            (
                sum(len(plan.tokens("q", u)) for u in range(4) if plan.share(u).ring == share.ring),
                share.q_head_end - share.q_head_begin,
                16,
            ),
            np.nan,
            np.float32,
        )
        back, kv, lse = (
            np.full_like(tokens, np.nan),
            np.ones((rows, 2, 16), np.float32),
            np.zeros((4, rows), np.float32),
        )
        for _ in range(2):
            rank.to_heads(plan, "q", tokens, heads)
            rank.to_tokens(plan, "q", heads, back)
            assert (back == tokens).all()
            refused(
                "the planner alone", lambda: rank.forward(plan, q=tokens, k=kv, v=kv, o=np.empty_like(back), lse=lse)
            )

    cpattn.on_all(cpattn.local_group(4), moved)


def attends() -> None:
    """One rank of PyTorch's own kernels, and the reference, against PyTorch alone."""
    import torch
    import torch.distributed as dist

    import cpattn.torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    refused("kernels is 'cpattn'", lambda: cpattn.torch.Context(heads=4, head_dim=16, kernels="cpattn"))
    torch.manual_seed(3)
    q, k, v = (torch.randn(200, 4, 16, requires_grad=True) for _ in range(3))
    parts = [x.split([61, 139]) for x in (q, k, v)]
    right = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[i].transpose(0, 1) for x in parts), is_causal=True
            ).transpose(0, 1)
            for i in range(2)
        ]
    )
    grown = torch.autograd.grad(right.square().sum(), (q, k, v))
    for kernels in (None, "torch", "math"):
        with closing(cpattn.torch.Context(heads=4, head_dim=16, kernels=kernels)) as context:
            batch = context.batch([0, 61, 200])
            o = batch.attention(q, k, v)
            torch.testing.assert_close(o, right)
            torch.testing.assert_close(torch.autograd.grad(o.square().sum(), (q, k, v)), grown, atol=1e-4, rtol=1e-4)
    dist.destroy_process_group()


SECONDS = 120.0


def one_of_two(number: int, path: str) -> None:
    """A rank of a group in which one has the full library. Attention is refused on both, long before the deadline, and says what to do;
    the group goes on."""
    import torch.distributed as dist

    from cpattn.torch import GlooTransport

    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=number, world_size=2)
    plan = cpattn.Plan([0, 61, 200], 4, 16, kv_heads=2, world=2, ulysses=2)
    rows = len(plan.tokens("q", number))
    q, kv = np.ones((rows, 4, 16), np.float32), np.ones((rows, 2, 16), np.float32)
    made = {"q": q, "k": kv, "v": kv, "o": np.empty_like(q), "lse": np.empty((4, rows), np.float32)}
    heads, back = np.full((200, 2, 16), np.nan, np.float32), np.full_like(q, np.nan)
    with closing(cpattn.Rank(GlooTransport(timeout=SECONDS))) as rank:
        for _ in range(2):
            since = time.monotonic()
            if "kernels" in cpattn.library_features():
                try:
                    rank.forward(plan, **made)
                except cpattn.Disagreement as error:
                    assert "the library of rank 0 has no kernels" in str(error), error
                else:
                    raise AssertionError("not refused")
            else:
                refused("the planner alone", lambda: rank.forward(plan, **made))
            assert time.monotonic() - since < SECONDS / 2
            rank.to_heads(plan, "q", q, heads)
            rank.to_tokens(plan, "q", heads, back)
            assert (back == q).all()
    dist.destroy_process_group()


def beside(full: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "store"))
        other = subprocess.Popen(
            [sys.executable, __file__, "--rank", "1", path], env=os.environ | {"CPATTN_LIBRARY": full}
        )
        try:
            one_of_two(0, path)
            assert other.wait(2 * SECONDS) == 0
        finally:
            other.kill()


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return one_of_two(int(sys.argv[2]), sys.argv[3])
    assert cpattn.library_features() == frozenset(), cpattn.library_features()
    library = Path(os.environ.get("CPATTN_LIBRARY") or Path(cpattn.__file__).with_name("libcpattn.so"))
    if "CPATTN_LIBRARY" not in os.environ:
        assert importlib.metadata.version("cpattn").endswith("+planner")
    plans()
    with_torch = importlib.util.find_spec("torch") is not None
    if with_torch:
        attends()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for full in sys.argv[1:]:
            beside(full)
    print(
        f"the planner alone: {library.stat().st_size / 1e6:.2f} MB, imported in {1000 * IMPORT:.0f} ms"
        f"{'' if with_torch else '; PyTorch is not installed, so nothing was attended'}"
    )


if __name__ == "__main__":
    sys.exit(main())
