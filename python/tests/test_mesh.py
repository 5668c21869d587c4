# SPDX-License-Identifier: MIT OR Apache-2.0
"""A DeviceMesh says which ranks share a pass: losses and gradients of one process, and refusals by name."""

from __future__ import annotations

import unittest
from typing import Any

import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error
from cpattn_hf.transformers import ContextParallel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

transformers.utils.logging.set_verbosity_error()
PACKS = [models.batch([20, 1, 9], seed=1), models.batch([14, 22], seed=2)]


def _mesh(*dims: tuple[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(size for _, size in dims), mesh_dim_names=tuple(name for name, _ in dims))


def _said(**options: Any) -> str:
    try:
        ContextParallel(models.build("llama"), timeout=60, **options).close()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def _meshes(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    one = models.build("llama")
    expected = sum(models.part(one, pack) for pack in PACKS) / sum(map(models.count, PACKS))
    expected.backward()
    both = _mesh(("dp", 2), ("cp", 2))
    for name, mesh, shards in (
        ("dp, cp", both, False),
        ("dp, cp, sharded", both, True),
        ("one of size 1", _mesh(("dp", 2), ("cp", 2), ("tp", 1)), False),
    ):
        model = models.build("llama")
        cp = ContextParallel(model, mesh=mesh, timeout=60)
        assert (cp.ranks, cp.replicas, cp.replica, cp.rank) == (2, 2, rank // 2, rank % 2)
        if shards:
            for part in (*model.model.layers, model):
                fully_shard(part)
        loss = model(**PACKS[cp.replica], num_items_in_batch=sum(map(models.count, PACKS))).loss * cp.replicas
        loss.backward()
        if shards:
            for parameter in model.parameters():
                parameter.grad = parameter.grad.full_tensor()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        total = models.gradients(model)
        if not shards:
            dist.all_reduce(total)
            total /= world
        cp.close()
        found[name] = (
            abs(mean.item() / world - expected.item()) / expected.item(),
            models.apart(total, models.gradients(one)),
        )
    # The group that the mesh has already.
    part, model = both["cp"], models.build("llama")
    cp = ContextParallel(model, mesh=part, timeout=60, gradients="sum")
    assert (cp.ranks, cp.replicas) == (2, 1) and cp._group is part.get_group("cp")
    loss = model(**PACKS[rank // 2]).loss.item()
    alone = models.alone("llama", PACKS[rank // 2])[0]
    cp.close()
    found["the dimension alone"] = abs(loss - alone) / alone, 0.0
    found["group"] = _said(mesh=both, group=[0, 1, 2, 3])
    found["replicas"] = _said(mesh=both, replicas=2)
    found["no mesh"] = _said(mesh=4)
    found["no name"] = _said(mesh=_mesh(("dp", 2), ("context", 2)))
    found["pp"] = _said(mesh=_mesh(("pp", 2), ("cp", 2)))
    found["first"] = _said(mesh=_mesh(("cp", 2), ("dp", 2)))
    return found


class Mesh(unittest.TestCase):
    def test_meshes(self) -> None:
        for found in processes.run(_meshes, 4, seconds=200):
            for name, words in (
                ("group", "mesh and group is [0, 1, 2, 3] are both given"), ("replicas", "mesh and replicas is 2 are both given"),
                ("no mesh", "mesh is 4, a torch.distributed.device_mesh.DeviceMesh is needed"), ("no name", "('dp', 'context'), 'cp' is needed"),
                ("pp", "mesh has the dimension 'pp' of 2 ranks"), ("first", "put 'cp' last"),
            ):  # fmt: skip
                self.assertIn(words, found.pop(name), name)
            for name, (far, distance) in found.items():
                with self.subTest(name):
                    self.assertTrue(far <= 1e-6 and distance <= 1e-5, (far, distance))


if __name__ == "__main__":
    unittest.main()
