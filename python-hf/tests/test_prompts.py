# SPDX-License-Identifier: MIT OR Apache-2.0
"""`share_prompts`: log-probabilities, entropies, the router's loss and gradients of drawn groups as those of TRL's rows in one process; and what is
refused."""

from __future__ import annotations

import unittest
from typing import Any

try:
    import transformers
    import trl
    from trl.trainer.utils import add_fused_lm_head
except ImportError:
    raise unittest.SkipTest("transformers or trl is not installed") from None

import hybrids
import images
import models
import processes
import torch
from cpattn import Error
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.prompts import log_probabilities, packed

transformers.utils.logging.set_verbosity_error()

NAMES = ["llama", "gemma2", "mixtral", "gpt-oss"]


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows of TRL: prompts of which some are equal, not side by side, and some have one token; completions of which some are masked as a whole. Ids
    of padding are drawn too: nobody may read them."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    prompts = [torch.randint(3, models.WORDS, (length,), generator=draw) for length in (number(8, 14), 1, number(2, 9))]
    if number(0, 2):  # one that begins as another one
        prompts.append(torch.cat([prompts[0], prompts[2]]))
    rows, before, after = number(5, 9), max(map(len, prompts)), number(3, 9)
    ids, mask = (
        torch.randint(3, models.WORDS, (rows, before + after), generator=draw),
        torch.zeros(rows, before + after, dtype=torch.int64),
    )
    for row in range(rows):
        prompt, length = prompts[number(0, len(prompts))], number(0, after + 1) * (number(0, 4) > 0)
        ids[row, before - len(prompt) : before] = prompt
        mask[row, before - len(prompt) : before + length] = 1
    return ids, mask, after


def objective(found: tuple[Any, Any, Any], mask: torch.Tensor) -> torch.Tensor:
    """A loss in which each number has a factor of its own."""
    logps, entropies, aux = found
    factors = torch.linspace(-1, 1, logps.numel(), dtype=logps.dtype).view(logps.shape) * mask
    loss = (factors * logps).sum() + 0.3 * (factors.flip(0) * mask * entropies).sum()
    return loss if aux is None else loss + 0.7 * aux


def usual(model: Any, ids: torch.Tensor, mask: torch.Tensor, after: int, router: bool) -> tuple[Any, Any, Any]:
    """As TRL's trainers compute them."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-after] = -100
    out = model(
        input_ids=ids,
        attention_mask=mask,
        labels=labels,
        fused_lm_head=True,
        **({"output_router_logits": True} if router else {}),
    )
    return out.log_probs[:, -after:], out.entropy[:, -after:], out.aux_loss if router else None


def _compared(rank: int, world: int, name: str, seeds: list[int]) -> list[str]:
    wrong: list[str] = []
    router = name == "mixtral"
    model, one = models.build(name), models.build(name)
    for each in (model, one):
        add_fused_lm_head(each, temperature=0.8, outputs=("log_probs", "entropy"))
    cp = ContextParallel(model, gradients="sum")
    for seed in seeds:
        ids, mask, after = drawn(seed)
        expected = usual(one, ids, mask, after, router)
        found = log_probabilities(model, ids, mask, after, True, router)
        for what, a, b in zip(("log_probs", "entropy", "aux_loss"), found, expected, strict=True):
            if b is not None and not float((a - b).detach().abs().max()) < 2e-5:
                wrong.append(f"{name}, {seed}: {what} are apart by {float((a - b).detach().abs().max())}")
        model.zero_grad()
        one.zero_grad()
        objective(found, mask[:, -after:]).backward()
        objective(expected, mask[:, -after:]).backward()
        gradients = models.gradients(model)
        torch.distributed.all_reduce(gradients)
        if not models.apart(gradients, models.gradients(one)) < 2e-6:
            wrong.append(f"{name}, {seed}: gradients are apart by {models.apart(gradients, models.gradients(one))}")
    cp.close()
    return wrong


def _refused(rank: int, world: int) -> list[str]:
    said: list[str] = []

    def refuse(model: Any, call: Any) -> None:
        cp = ContextParallel(model)
        try:
            call(cp)
            said.append("not refused")
        except Error as error:
            said.append(f"{type(error).__name__}: {error}")
        cp.close()

    refuse(models.build("llama"), lambda cp: cp.trainer(trl.DPOTrainer, share_prompts=True))
    refuse(models.build("llama"), lambda cp: cp.trainer(trl.GRPOTrainer, share_prompts="all"))

    class Other(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    refuse(models.build("llama"), lambda cp: cp.trainer(Other, share_prompts=True))
    refuse(hybrids.build("lfm2"), lambda cp: cp.trainer(trl.GRPOTrainer, share_prompts=True))
    refuse(images.build("gemma3"), lambda cp: cp.trainer(trl.RLOOTrainer, share_prompts=True))
    refuse(
        models.build("llama"),
        lambda cp: log_probabilities(
            cp.model, torch.ones(1, 4, dtype=torch.int64), torch.tensor([[1, 1, 0, 1]]), 2, False, False
        ),
    )
    return said


class Prompts(unittest.TestCase):
    def test_as_rows(self) -> None:
        for name in NAMES:
            for wrong in processes.run(_compared, 3, name, list(range(6))):
                self.assertEqual(wrong, [])

    def test_each_prompt_once(self) -> None:
        for seed in range(20):
            ids, mask, after = drawn(seed)
            pack, before = packed(ids, mask, after), ids.shape[1] - after
            prompts = [tuple(row[:before][kept[:before].bool()].tolist()) for row, kept in zip(ids, mask, strict=True)]
            tokens = 0
            for prompt in set(prompts):
                answers = [
                    int(kept[before:].sum())
                    for kept, its in zip(mask, prompts, strict=True)
                    if its == prompt and kept[before:].any()
                ]
                tokens += sum(answers) + (len(prompt) - 1 if answers else len(prompt)) + len(answers)
            self.assertEqual(pack.inputs["input_ids"].shape[1], tokens)
            self.assertEqual(
                int(pack.inputs["router_weights"].sum()), int(mask.sum()), "a token counts as often as in rows"
            )
            self.assertEqual(len(pack.places), int(mask[:, before:].sum()))

    def test_refusals(self) -> None:
        words = [
            "share_prompts is True and the trainer is DPOTrainer", "share_prompts is 'all'", "has _get_per_token_logps_and_entropies in test_prompts", "has layers that mix whole documents", "has a part around its text model",
            "padding before or inside of completions",
        ]  # fmt: skip
        for said in processes.run(_refused, 2):
            for text, part in zip(said, words, strict=True):
                self.assertIn(part, text)


if __name__ == "__main__":
    unittest.main()
