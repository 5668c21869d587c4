# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps of an optimizer, made before or after ContextParallel and what owns the parameters: the losses of one process, step by step. Gradients alone
do not show an optimizer whose parameters are no longer the model's."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Callable
from typing import Any

import torch

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Unsupported
from cpattn_hf.transformers import ContextParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

transformers.utils.logging.set_verbosity_error()
STEPS = 4
PACK = models.batch([20, 1, 9, 14])


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def _steps(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**PACK).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone() -> list[float]:
    model, losses = models.build("llama"), []
    optimizer = _sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = models.part(model, PACK) / models.count(PACK)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _sharded(model: Any, **how: Any) -> Any:
    for part in (*model.model.layers, model):
        fully_shard(part, **how)
    return model


def _fsdp1(model: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


# What is done to a model, in this order. "cp" is ContextParallel, "sgd" the optimizer; others wrap or shard.
WRAPS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": _sharded,
    "fsdp2, kept whole": lambda model: _sharded(model, reshard_after_forward=False),
    "fsdp2, the model alone": fully_shard,
    "fsdp2, replicas": lambda model: _sharded(
        model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    ),
    "fsdp1": _fsdp1,
}
ORDERS: tuple[tuple[str, ...], ...] = (
    ("cp", "ddp", "sgd"), ("sgd", "cp", "ddp"), ("cp", "sgd", "ddp"),
    ("fsdp2", "cp", "sgd"), ("fsdp2", "sgd", "cp"), ("cp", "fsdp2", "sgd"), ("fsdp2, kept whole", "cp", "sgd"), ("fsdp2, kept whole", "sgd", "cp"),
    ("fsdp2, the model alone", "cp", "sgd"), ("fsdp2, replicas", "cp", "sgd"), ("cp", "fsdp2, replicas", "sgd"), ("cp", "fsdp1", "sgd"),
    # A second ContextParallel tries the model again.
    ("fsdp2", "cp", "close", "cp", "sgd"), ("fsdp2", "cp", "sgd", "close", "cp"), ("fsdp2", "refused", "cp", "sgd"), ("fsdp2", "refused", "sgd", "cp"),
)  # fmt: skip


def _refused(model: Any) -> None:
    """A trial that fails in the middle of a forward pass."""

    def fail(*_: Any) -> None:
        raise ValueError("in the second layer")

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    try:
        ContextParallel(model, timeout=60)
    except Unsupported as error:
        assert "in the second layer" in str(error), error
    else:
        raise AssertionError("not refused")
    hook.remove()


def _orders(rank: int, world: int) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    found = {}
    for order in ORDERS:
        inner = outer = models.build("llama")
        cp = optimizer = None
        for step in order:
            if step == "cp":
                cp = ContextParallel(inner, timeout=60)
            elif step == "refused":
                _refused(inner)
            elif step == "close":
                cp.close()
            elif step == "sgd":
                optimizer = _sgd(outer)
            else:
                outer = WRAPS[step](outer)
        found[", ".join(order)] = _steps(outer, optimizer)
        cp.close()
    return found


class Steps(unittest.TestCase):
    def test_every_order(self) -> None:
        expected = alone()
        for found in processes.run(_orders, 2, seconds=500):
            for order, losses in found.items():
                with self.subTest(order):
                    for a, b in zip(losses, expected, strict=True):
                        self.assertLessEqual(abs(a - b), 5e-6 * b, (losses, expected))


if __name__ == "__main__":
    unittest.main()
