# SPDX-License-Identifier: MIT OR Apache-2.0
"""A job under ZeRO that goes on with another number of ranks: DeepSpeed's own checkpoint is refused by it, its universal one has the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
try:
    import deepspeed
    import transformers
except ImportError:
    raise unittest.SkipTest("deepspeed or transformers is not installed") from None

import models
import processes
import torch
from cpattn_hf.transformers import ContextParallel

transformers.utils.logging.set_verbosity_error()
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))

LENGTHS = [20, 13, 30]


def _job(rank: int, world: int, stage: int, folder: str, begin: int, end: int, universal: bool) -> list[float] | str:
    """Losses of some steps, after which the job is saved; or why it could not be loaded."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage}, "checkpoint": {"load_universal": universal},
    }  # fmt: skip
    model = models.build("llama")
    ContextParallel(model, timeout=100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    if begin:
        try:
            engine.load_checkpoint(folder, tag="universal" if universal else f"step{begin}")
        except Exception as error:  # noqa: BLE001 (DeepSpeed's own)
            return f"{type(error).__name__}: {error}"
    losses = []
    for step in range(begin, end):
        loss = engine(**models.batch(LENGTHS, seed=step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if not begin:
        engine.save_checkpoint(folder, tag=f"step{end}")
    return losses


class Ranks(unittest.TestCase):
    def goes_on(self, stage: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            whole = processes.run(_job, 2, stage, f"{folder}/whole", 0, 4, False, seconds=200)[0]
            first = processes.run(_job, 2, stage, folder, 0, 2, False, seconds=200)[0]
            self.assertEqual(first, whole[:2])
            said = processes.run(_job, 3, stage, folder, 2, 4, False, seconds=200)
            self.assertTrue(
                all(isinstance(one, str) for one in said),
                "DeepSpeed takes its own checkpoint with another number of ranks",
            )
            self.assertIn("used a DP world size of 2 but the current world size is 3", said[0])
            done = subprocess.run(
                [
                    sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", f"{folder}/step2", "--output_folder", f"{folder}/universal",
                    "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state",
                ],
                capture_output=True, text=True, timeout=240, check=False,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            for rest in processes.run(_job, 3, stage, folder, 2, 4, True, seconds=200):
                self.assertIsInstance(rest, list, rest)
                for a, b in zip(rest, whole[2:], strict=True):
                    self.assertLessEqual(abs(a / b - 1), 1e-5, (rest, whole))

    def test_zero_2(self) -> None:
        self.goes_on(2)

    def test_zero_3(self) -> None:
        self.goes_on(3)


if __name__ == "__main__":
    unittest.main()
