# SPDX-License-Identifier: MIT OR Apache-2.0
"""GRPO and RLOO with completions of a vLLM server: rewards, losses, importance ratios and parameters as in one process, one request and one push
for all processes, and failures of the server on all of them."""

from __future__ import annotations

import functools
import os
import tempfile
import unittest
import warnings
from contextlib import ExitStack
from typing import Any

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # TRL reads it when a trainer is made
try:
    import peft
    import requests  # noqa: F401
    import transformers
    import trl
    from datasets import Dataset, disable_progress_bars
except ImportError:
    raise unittest.SkipTest("transformers, peft, trl, datasets or requests is not installed") from None

import models
import processes
import torch
import vllm_double
from cpattn_hf.transformers import ContextParallel

transformers.utils.logging.set_verbosity_error()

STEPS = 3
GROUP = 4  # completions of a prompt
# Options of the configs, and of the trainer, beside those that all have.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "defaults": (trl.GRPOTrainer, {}, {}),
    "token_truncate": (
        trl.GRPOTrainer,
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.95, "vllm_importance_sampling_clip_max": 1.05, "mask_truncated_completions": True},
        {},
    ),
    "token_mask": (
        trl.GRPOTrainer,
        {
            "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.1, "loss_type": "grpo",
            "mask_truncated_completions": True, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.02,
        },
        {},
    ),
    "sequence_truncate": (
        trl.GRPOTrainer,
        {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_min": 0.97, "vllm_importance_sampling_clip_max": 1.03, "beta": 0.2},
        {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)},
    ),
    "sequence_mask": (
        trl.GRPOTrainer,
        {
            "vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.1, "steps_per_generation": 2, "num_iterations": 2, "mask_truncated_completions": True,
            "importance_sampling_level": "sequence",
        },
        {},
    ),
    "vespo": (trl.GRPOTrainer, {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.1, "eval_strategy": "steps", "eval_steps": STEPS}, {}),
    "no correction": (trl.GRPOTrainer, {"vllm_importance_sampling_correction": False}, {}),
    "rloo": (trl.RLOOTrainer, {"mask_truncated_completions": True, "beta": 0.0}, {}),
    "rloo, gemma2": (trl.RLOOTrainer, {}, {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}),
    "experts, mixtral": (trl.GRPOTrainer, {"router_aux_loss_coef": 0.5, "mask_truncated_completions": True}, {}),
}  # fmt: skip


def model_of(case: str) -> str:
    return case.partition(", ")[2] or "llama"


def prompts() -> Dataset:
    draw = torch.Generator().manual_seed(3)
    lengths = [5, 3, 7, 4, 6, 1, 9, 5]
    return Dataset.from_list(
        [
            {"prompt": "".join(f" w{n}" for n in torch.randint(3, models.WORDS, (length,), generator=draw).tolist())}
            for length in lengths
        ]
    )


def train(
    rank: int, world: int, address: str, case: str, batch: int, replicas: int, folder: str, share: bool = False
) -> dict[str, Any]:
    """Logs, parameters and completions of a rank; without context parallelism if `replicas` is 0. `tokens` are those of the last pass."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    warnings.simplefilter("ignore")
    disable_progress_bars()
    vllm_double.install(address)
    kind, options, more = CASES[case]
    config = trl.GRPOConfig if kind is trl.GRPOTrainer else trl.RLOOConfig
    args = config(
        folder, use_cpu=True, bf16=False, max_steps=STEPS, report_to=[], disable_tqdm=True, save_strategy="no", per_device_train_batch_size=batch, per_device_eval_batch_size=batch, logging_steps=1,
        optim="sgd", learning_rate=0.5, max_grad_norm=0.0, seed=1, logging_nan_inf_filter=False, ddp_find_unused_parameters=False, gradient_checkpointing=False,
        num_generations=GROUP, max_completion_length=6, temperature=0.8, use_vllm=True, vllm_mode="server", vllm_server_base_url=address, vllm_server_timeout=0.0, **options,
    )  # fmt: skip
    completions: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        completions.extend(completion_ids)
        return [sum(n % 7 for n in ids) / len(ids) + 0.1 * len(ids) for ids in completion_ids]

    model = models.build(model_of(case))
    cp = ContextParallel(model, replicas=replicas) if replicas else None
    made: Any = cp.trainer(kind, share_prompts=share) if cp else kind
    torch.manual_seed(0)
    trainer = made(
        model=model,
        args=args,
        train_dataset=prompts(),
        eval_dataset=prompts(),
        reward_funcs=reward,
        processing_class=models.tokenizer(),
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    logged = [
        {key: value for key, value in entry.items() if "time" not in key and "per_second" not in key}
        for entry in trainer.state.log_history
    ]
    weights = torch.cat([p.detach().flatten().double() for p in trainer.model.parameters() if p.requires_grad])
    tokens = len(cp.last.pack.ids) if cp else 0
    if cp:
        cp.close()
    return {"logs": logged, "weights": weights.numpy(), "completions": completions, "tokens": tokens}


def _every(rank: int, world: int, addresses: dict[str, str], *args: Any) -> dict[str, dict[str, Any]]:
    return {case: train(rank, world, address, case, *args) for case, address in addresses.items()}


def job(
    world: int, cases: tuple[str, ...], batch: int, replicas: int, share: bool = False
) -> tuple[dict[str, vllm_double.Double], list[dict[str, dict[str, Any]]]]:
    """For each case its server; and for each rank what it has found in each case."""
    with ExitStack() as stack:
        doubles = {case: stack.enter_context(vllm_double.serving(model_of(case))) for case in cases}
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        addresses = {case: address for case, (_, address) in doubles.items()}
        found = processes.run(_every, world, addresses, batch, replicas, folder, share, seconds=900)
    return {case: double for case, (double, _) in doubles.items()}, found


@functools.cache
def alone() -> Any:
    """Servers and results of one process of TRL."""
    doubles, [found] = job(1, tuple(CASES), 8, 0)
    return doubles, found


def _failed(rank: int, world: int, *args: Any) -> str:
    try:
        train(rank, world, *args)
    except Exception as error:  # noqa: BLE001 (the result)
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


@functools.cache
def ranks(share: bool) -> Any:
    """Servers and results of two ranks of a group."""
    return job(2, tuple(CASES), 8, 1, share)


class Rollouts(unittest.TestCase):
    def _same(self, name: str, found: dict[str, Any], one: dict[str, Any], logs: bool = True) -> None:
        self.assertLessEqual(models.apart(torch.tensor(found["weights"]), torch.tensor(one["weights"])), 3e-6, name)
        for a, b in zip(found["logs"], one["logs"], strict=True):
            self.assertEqual(a.keys(), b.keys(), name)
            for key in a if logs else [key for key in a if "reward" in key or "length" in key]:
                self.assertLessEqual(
                    abs((a[key] or 0) - (b[key] or 0)), 1e-5 * max(abs(b[key] or 0), 1), (name, key, a, b)
                )

    def _served(self, name: str, double: vllm_double.Double, one: vllm_double.Double) -> None:
        """One request and one push for all processes, with the same prompts and weights as of one process."""
        self.assertEqual(double.errors, [], name)
        self.assertEqual(double.requests, one.requests, name)
        self.assertEqual(len(double.pushes), len(one.pushes), name)
        for mine, its in zip(double.pushes, one.pushes, strict=True):
            self.assertEqual(list(mine), list(its), name)
            for tensor in mine:
                self.assertLessEqual(abs(mine[tensor] - its[tensor]), 1e-4 * max(abs(its[tensor]), 1), (name, tensor))

    def test_as_one_process(self) -> None:
        (usual, one), (doubles, several) = alone(), ranks(False)
        for case in CASES:
            # Four batches of an evaluation have one each.
            self.assertEqual(
                len(usual[case].requests),
                {"sequence_mask": 1, "vespo": STEPS + 4}.get(case, STEPS),
                "each step has a request",
            )
            self._served(case, doubles[case], usual[case])
            for found in several:
                self._same(case, found[case], one[case])
                self.assertEqual(found[case]["completions"], one[case]["completions"])

    def test_the_cases_differ(self) -> None:
        """Caps, masks and modes have an effect on these completions: otherwise nothing above would show them."""
        found = alone()[1]
        weights = [
            found[case]["weights"]
            for case in CASES
            if model_of(case) == "llama" and case not in ("rloo", "sequence_truncate")
        ]
        for i, mine in enumerate(weights):
            for its in weights[:i]:
                self.assertGreater(models.apart(torch.tensor(mine), torch.tensor(its)), 1e-5)
        truncated = [
            entry["completions/clipped_ratio"]
            for entry in found["defaults"]["logs"]
            if "completions/clipped_ratio" in entry
        ]
        self.assertTrue(0 < sum(truncated) / len(truncated) < 1 and truncated[0] > 0, truncated)

    def test_shared_prompts(self) -> None:
        """Each prompt is computed once, and all is as in rows."""
        (usual, one), (doubles, several), (_, rows) = alone(), ranks(True), ranks(False)
        for case in CASES:
            self._served(case, doubles[case], usual[case])
            for found in several:
                self._same(case, found[case], one[case])
                self.assertLess(found[case]["tokens"], rows[0][case]["tokens"])

    def test_replicas_as_processes(self) -> None:
        """Two groups of two ranks, as two processes of TRL, and as one process with both batches."""
        cases = "defaults", "rloo"
        (usual, one), (_, two), (doubles, several) = alone(), job(2, cases, 4, 0), job(4, cases, 4, 2)
        for case in cases:
            self._served(case, doubles[case], usual[case])
            for rank, found in enumerate(several):
                self._same(case, found[case], two[rank // 2][case])
                self._same(case, found[case], one[case], logs=False)
                self.assertEqual(found[case]["completions"], two[rank // 2][case]["completions"])

    def test_a_server_that_fails(self) -> None:
        """All processes raise, at once, what process 0 has seen."""
        places = {
            "/v1/completions": ("at a request to", 1), "/update_weights": ("at sending weights to", 0), "/init_weight_transfer_engine": ("at connecting to", 0),
            "/server_info": ("at connecting to", 1),
        }  # fmt: skip
        for path, (words, after) in places.items():
            with (
                self.subTest(path),
                vllm_double.serving("llama", fails=path, after=after) as (_, address),
                tempfile.TemporaryDirectory() as folder,
            ):
                said = processes.run(_failed, 4, address, "defaults", 4, 2, folder, seconds=400)
                self.assertIn("as the test wants it", said[0])
                for rank in (1, 2, 3):
                    self.assertIn(f"process 0 failed {words} the vLLM server", said[rank])
                    self.assertIn("as the test wants it", said[rank])
        with tempfile.TemporaryDirectory() as folder:
            for said in processes.run(_failed, 2, vllm_double.free_address(), "rloo", 4, 1, folder, seconds=400):
                self.assertIn("vLLM server can't be reached", said)


if __name__ == "__main__":
    unittest.main()
