# SPDX-License-Identifier: MIT OR Apache-2.0
"""CPU time of a step of GRPO with a long prompt and 8 completions, with share_prompts and without; not a test.

    capi/build && PYTHONPATH=python:python-hf:python/tests:python-hf/tests python3 python-hf/tests/measure_prompts.py 2048 64

The arguments are the tokens of the prompt and of a completion. Completions are drawn, not generated. Time is that of the CPU, of both processes
together, the least of several steps.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from typing import Any

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
import models
import processes
import torch
import transformers
import trl
from cpattn_hf.transformers import ContextParallel
from datasets import Dataset, disable_progress_bars

GROUP, STEPS = 8, 4


def seconds(rank: int, world: int, prompt: int, answer: int, folder: str) -> dict[bool, list[float]]:
    """CPU seconds of this rank for each step, without share_prompts and with it; runs of both take turns."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    warnings.simplefilter("ignore")
    disable_progress_bars()
    words = torch.randint(3, models.WORDS, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    data = Dataset.from_list([{"prompt": "".join(f" w{n}" for n in words)}] * 2)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(2)
        ids = [torch.randint(3, models.WORDS, (answer,), generator=draw).tolist() for _ in prompts]
        return {
            "prompt_ids": [words] * len(prompts),
            "completion_ids": ids,
            "logprobs": [[-1.0] * answer] * len(prompts),
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(n % 7 for n in ids) / len(ids) for ids in completion_ids]

    found: dict[bool, list[float]] = {False: [], True: []}
    for share in (False, True) * 2:
        model = models.build(
            "llama",
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
        )
        cp = ContextParallel(model)
        args = trl.GRPOConfig(
            folder, use_cpu=True, bf16=False, max_steps=STEPS, report_to=[], disable_tqdm=True, save_strategy="no", per_device_train_batch_size=GROUP, num_generations=GROUP,
            max_completion_length=answer, optim="sgd", learning_rate=0.1, num_iterations=2, beta=0.0, gradient_checkpointing=False,
        )  # fmt: skip

        class Times(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                torch.distributed.barrier()
                self.began = time.process_time()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                found[share].append(time.process_time() - self.began)  # noqa: B023

        trainer = cp.trainer(trl.GRPOTrainer, share_prompts=share)(
            model=model,
            args=args,
            train_dataset=data,
            reward_funcs=reward,
            processing_class=models.tokenizer(),
            rollout_func=rollout,
            callbacks=[Times()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        cp.close()
    return found


def main() -> None:
    prompt, answer = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        ranks = processes.run(seconds, 2, prompt, answer, folder, seconds=550)
    # Steps 0 and 2 of a run have the passes before the update too; step 0 has the plans of both.
    for name, steps in (("with the passes before the update", [2]), ("the loss alone", [1, 3])):
        mean = {
            share: min(sum(found[share][run * STEPS + step] for found in ranks) for run in range(2) for step in steps)
            for share in (False, True)
        }
        print(
            f"{prompt} + {GROUP} x {answer} tokens, {name}: {mean[False]:.2f} and {mean[True]:.2f} CPU seconds of 2 ranks, {mean[False] / mean[True]:.1f} times"
        )


if __name__ == "__main__":
    main()
