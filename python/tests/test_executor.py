# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans that PyTorch runs: the tests of cpattn.torch, Transformers and Diffusers with kernels of others.

The jobs are those of the other test modules. A context that is not told its kernels has those of this test.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
import unittest
from pathlib import Path
from typing import Any

import models
import test_compile
import test_gather
import test_latent
import test_serving
import test_slices
import test_slopes
import test_torch
import test_transformers
import torch
import torch.distributed as dist
from processes import LONG, run, start

import cpattn
from cpattn.torch import Context
from cpattn.torch.executor import Network

JOBS = {
    test_torch: "results exchanges gradcheck log_sum_exp shares subgroups second_derivatives",
    test_slices: "cross refusals",
}
if LONG:
    JOBS = {
        test_torch: JOBS[test_torch] + " kinds strides contexts precision overlaps",
        test_slices: "values drawn of_layers cross refusals",
    }


class NotCounted(test_torch.Copies):
    """PyTorch's operators move rows by copies of tensors."""

    @property
    def count(self) -> int:  # type: ignore[override]
        return 0

    @count.setter
    def count(self, _: int) -> None:
        pass


def use(kernels: str) -> None:
    """Makes these the kernels of contexts in this process."""
    usual, leave = Context.__init__, Context.close

    @functools.wraps(usual)
    def changed(self: Any, *args: Any, **options: Any) -> None:
        options.pop("reproducible", None)  # which no kernel of others honours
        usual(self, *args, **{"kernels": kernels, **options})

    def together(self: Any) -> None:
        # No rank leaves before all have made their last call.
        if self.world == dist.get_world_size():
            dist.barrier()
        leave(self)

    Context.__init__, Context.close = changed, together  # type: ignore[method-assign]
    test_torch.Copies = NotCounted  # type: ignore[misc]


def with_kernels(rank: int, world: int, kernels: str, module: str, names: str, *args: Any) -> Any:
    """Jobs of a test module with other kernels; the result of the last one."""
    use(kernels)
    for name in names.split():
        result = getattr(importlib.import_module(module), name)(rank, world, *args)
        dist.barrier()
    return result


def stripes(rank: int, world: int) -> str:
    """The layout that is chosen for a kernel of rectangles where stripes would balance best."""
    ends, slices = [0, 700, 828, 1852, 1980, 2108, 2236, 2364, 6460], [cpattn.Slice(0, 6460, 0, 2153, high=0)]
    chosen = []
    for more in (
        {"kernels": "math"},
        {"kernels": "torch"},
        {"kernels": "torch", "layout": "striped", "layout_parameter": 128},
    ):
        context = Context(heads=8, kv_heads=2, head_dim=64, ring=world, **more)  # type: ignore[arg-type]
        chosen.append(context.batch(ends, slices=slices).plan.describe().layout.name)
        dist.barrier()
        context.close()
    return " ".join(chosen)


def in_flight(rank: int, world: int) -> None:
    """Forwards of several batches before any backward, which come in another order: the bits of one after another."""
    context = Context(heads=4, kv_heads=2, head_dim=8, kernels="math", ring=world)
    batches = [context.batch(ends) for ends in ([0, 9, 40], [0, 33], [0, 1, 2, 25])]
    inputs = [
        [
            batch.shard(test_torch.draw(batch.cu_seqlens[-1], h, 8, dtype=torch.float32)).requires_grad_()
            for h in (4, 2, 2)
        ]
        for batch in batches
    ]
    want = [
        torch.autograd.grad(batch.attention(*x).square().sum(), x) for batch, x in zip(batches, inputs, strict=True)
    ]
    losses = [batch.attention(*x).square().sum() for batch, x in zip(batches, inputs, strict=True)]
    for at in (1, 2, 0):
        for a, b in zip(torch.autograd.grad(losses[at], inputs[at]), want[at], strict=True):
            assert torch.equal(a, b), at
    dist.barrier()
    context.close()


def of_models(rank: int, world: int, kernels: str, names: list[str], file: str) -> list[str]:
    """Losses and gradients of models of Transformers, as on one process."""
    use(kernels)
    test_transformers.models.MODELS = {name: models.MODELS[name] for name in names}
    return test_transformers._right(rank, world, file)


def alone(rank: int, world: int) -> str:
    """After a first run one rank ends: what the others say."""
    context = Context(heads=2, head_dim=4, ring=world, timeout=20.0, kernels="math")
    batch = context.batch([0, 9])
    q = torch.randn(len(batch.tokens), 2, 4)
    batch.attention(q, q, q)
    dist.barrier()
    if rank == 1:
        return "left"
    for _ in range(2):
        try:
            batch.attention(q, q, q)
        except cpattn.PeerError as error:
            said = str(error)
    return said


def raising(rank: int, world: int) -> str:
    """One rank's kernel lacks what the batch asks for, and another kernel on one rank."""
    for kernels in (["math", "torch"][rank == 1], ["math", "mine"][rank == 1]):
        try:
            Context(heads=2, head_dim=4, kernels=kernels)
        except cpattn.Error as error:
            said = f"{type(error).__name__} {error}"
    return said


def over_gloo(rank: int, world: int) -> str:
    """What a group says that has gloo for a device's tensors."""
    try:
        Network(dist.new_group(backend="gloo"), range(world), torch.device("cuda", 0), 5.0)
    except cpattn.Unsupported as error:
        return str(error)
    return ""


class Executed(unittest.TestCase):
    def test_batches(self) -> None:
        for module, names in JOBS.items():
            run(with_kernels, 4, "math", module.__name__, names, seconds=600)

    def test_compiled(self) -> None:
        run(with_kernels, 2, "math", test_compile.__name__, "compiled", "aot_eager", seconds=300)

    def test_scores(self) -> None:
        run(with_kernels, 3, "math", test_slopes.__name__, "all_of_it")
        run(with_kernels, 2, "math", test_latent.__name__, "everything")

    def test_rows_of_other_ranks(self) -> None:
        for wrong in run(with_kernels, 3, "math", test_gather.__name__, "_right", seconds=300):
            self.assertEqual(wrong, [])

    def test_batches_in_flight(self) -> None:
        run(in_flight, 2)

    def test_models(self) -> None:
        """With checkpointing, sinks, windows."""
        names = ["llama", "gpt-oss"]
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save({name: models.alone(name, models.batch(test_transformers.PACK)) for name in names}, file)
            for wrong in run(of_models, 3, "math", names, file, seconds=300):
                self.assertEqual(wrong, [])

    def test_no_stripes_for_kernels_of_rectangles(self) -> None:
        self.assertEqual(run(stripes, 2), ["STRIPED ZIGZAG_PACK STRIPED"] * 2)

    def test_a_rank_that_ends(self) -> None:
        for rank, outcome in enumerate(start(alone, 3, seconds=90)):
            if rank != 1:
                self.assertRegex(
                    outcome.value, "^the group has failed: make a new context on every rank. Its first error was: "
                )
                self.assertRegex(
                    outcome.value,
                    f"rank {rank}: operation . \\((fetch|return|exchange).*, ring, step .\\) with .*1.* failed: ",
                )

    def test_ranks_with_different_kernels(self) -> None:
        said = run(raising, 3)
        self.assertIn("kernels is 'mine', 'cpattn', one of", said[1])
        for one in (said[0], said[2]):
            self.assertIn("ranks [1] of this group refused their kernels", one)

    def test_gloo_for_a_device(self) -> None:
        """It would read tensors on the host before their streams have written them."""
        expected = "group has the backend ProcessGroupGloo for cuda, and device is cuda:0: .* init_process_group .*'cpu:gloo,cuda:nccl'"
        for text in run(over_gloo, 2):
            self.assertRegex(text, expected)

    def test_combined(self) -> None:
        for worst in run(with_kernels, test_serving.WORLD, "math", test_serving.__name__, "job"):
            self.assertLess(max(worst), 1.0)


if __name__ == "__main__":
    unittest.main()
