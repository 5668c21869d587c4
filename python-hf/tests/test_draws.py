# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random draws in a forward pass: each rank has masks of its own, equal when a layer is computed again, and generators agree afterwards."""

from __future__ import annotations

import importlib.util
import unittest
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Unsupported
from cpattn_hf.transformers import ContextParallel
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config, OPTConfig, set_seed

transformers.utils.logging.set_verbosity_error()
LENGTHS = [93]  # on 4 ranks: not equally many tokens
P = 0.25


def gpt2(**more: Any) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=models.WORDS, n_embd=48, n_head=4, n_layer=2, n_positions=128, resid_pdrop=P, embd_pdrop=P, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).train()


class Masks:
    """Records the mask of each dropout of a model, by its call, or uses masks instead."""

    def __init__(self, model: Any, given: list[torch.Tensor] | None = None) -> None:
        self.found: list[torch.Tensor] = []
        self._given = iter(given or [])
        for layer in model.modules():
            if isinstance(layer, torch.nn.Dropout) and layer.p:
                layer.register_forward_hook(self._record if given is None else self._use)

    def _record(self, layer: Any, args: Any, out: torch.Tensor) -> None:
        self.found.append(torch.where(args[0] == 0, True, out != 0))

    def _use(self, layer: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return args[0] * next(self._given).to(out.dtype) / (1 - layer.p)


def _masks(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pack = models.batch(LENGTHS)
    gradients = {}
    for kind in ("plain", "checkpointing", "reentrant"):
        model = gpt2()
        cp = ContextParallel(model, gradients="sum", layout="zigzag")
        masks = Masks(model) if kind == "plain" else None
        if kind != "plain":
            models.checkpointing(model, kind == "reentrant")
        if kind == "reentrant":
            model.get_input_embeddings().register_forward_hook(
                lambda *given: given[-1].requires_grad_() if given[-1].is_leaf else None
            )
        set_seed(5)
        loss = model(**pack).loss
        after = torch.get_rng_state()
        torch.rand(7 + rank)  # a loader's draws, say: a layer that is computed again has its own
        loss.backward()
        gradients[kind] = (loss.item(), models.gradients(model))
        if masks is not None:
            # One process with the masks of all ranks has this loss and these gradients.
            every = [cp.gather(mask.float()) for mask in masks.found]
            alone = gpt2()
            Masks(alone, every)
            expected = alone(**pack).loss
            expected.backward()
            total = models.gradients(model)
            dist.all_reduce(total)
            found["as one process"] = (
                abs(loss.item() / expected.item() - 1),
                models.apart(total, models.gradients(alone)),
            )
            found["masks"] = [mask[0].numpy() for mask in masks.found]
        found[f"{kind}: state"] = after.numpy()
        cp.close()
    for kind in ("checkpointing", "reentrant"):
        same_loss = abs(gradients[kind][0] / gradients["plain"][0] - 1)
        found[kind] = (same_loss, models.apart(gradients[kind][1], gradients["plain"][1]))

    # Other draws; without draws the generator is as it was; a second pass has other masks, the same seed the same ones.
    model = gpt2()
    cp = ContextParallel(model)
    noise: list[torch.Tensor] = []
    hook = model.transformer.h[0].register_forward_hook(lambda *_: noise.append(torch.randn(64)))
    masks = Masks(model)
    with torch.no_grad():
        set_seed(5)
        for _ in range(2):
            model(**pack)
        set_seed(5)
        model(**pack)
    passes = [torch.cat([mask.flatten() for mask in masks.found[n * 5 : n * 5 + 5]]) for n in range(3)]
    found["another pass"], found["the same pass"] = (
        bool((passes[0] == passes[1]).all()),
        bool((passes[0] == passes[2]).all()),
    )
    found["noise"] = noise[0].numpy()
    hook.remove()
    state = torch.get_rng_state()
    model.eval()
    model(**pack)
    found["eval leaves the generator"] = torch.equal(state, torch.get_rng_state())
    model.train()
    fails = model.lm_head.register_forward_hook(lambda *_: 1 // 0)
    set_seed(5)
    try:
        model(**pack)
    except ZeroDivisionError:
        pass
    fails.remove()
    found["failed: state"] = torch.get_rng_state().numpy()
    cp.close()
    return found


def _collator(rank: int, world: int) -> list[float]:
    """Losses of a model of masked words whose collator has no seed of its own: all ranks have the same words, although they draw
    different numbers of masks in the model."""
    set_seed(3)
    config = BertConfig(
        vocab_size=models.WORDS, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, hidden_dropout_prob=P,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = AutoModelForMaskedLM.from_config(config).train()
    cp = ContextParallel(model)
    tokenizer = models.tokenizer()
    tokenizer.mask_token = tokenizer.eos_token
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm=True, mlm_probability=0.5, random_replace_prob=0.2
    )
    losses = [
        model(**collator([{"input_ids": list(range(3, 16))}, {"input_ids": [7, 8, 9]}])).loss.item() for _ in range(4)
    ]
    cp.close()
    return losses


def _lora(rank: int, world: int) -> list[Any]:
    """The masks of LoRA's dropout, of one forward pass."""
    import peft

    model = models.build("llama")
    cp = ContextParallel(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=P, target_modules=["q_proj", "v_proj"]))
    masks = Masks(wrapped.train())
    set_seed(5)
    assert wrapped(**models.batch([20, 20])).loss.isfinite()
    cp.close()
    return [mask[0].numpy() for mask in masks.found]


def _layers(rank: int, world: int) -> str:
    config = OPTConfig(
        vocab_size=96,
        hidden_size=32,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        attention_dropout=0.0,
        layerdrop=0.1,
    )
    try:
        ContextParallel(AutoModelForCausalLM.from_config(config))
    except Unsupported as error:
        return str(error)
    return "not refused"


class Draws(unittest.TestCase):
    def independent(self, masks: list[list[Any]]) -> None:
        """Bernoulli masks with 1 - P kept, whose pairs of ranks agree as often as independent ones: within 5 standard deviations."""
        for call in range(len(masks[0])):
            for a, mine in enumerate(masks):
                size = mine[call].size
                self.assertLessEqual(abs(float(mine[call].mean()) - (1 - P)), 5 * (P * (1 - P) / size) ** 0.5)
                for other in masks[:a]:
                    rows = min(len(mine[call]), len(other[call]))
                    agree, usual = float((mine[call][:rows] == other[call][:rows]).mean()), P**2 + (1 - P) ** 2
                    self.assertLessEqual(
                        abs(agree - usual), 5 * (usual * (1 - usual) / mine[call][:rows].size) ** 0.5, f"call {call}"
                    )

    def test_each_rank_has_masks_of_its_own(self) -> None:
        found = processes.run(_masks, 4)
        self.assertEqual(len(found[0]["masks"]), 5)
        self.independent([one["masks"] for one in found])
        for one in found:
            for name in ("as one process", "checkpointing", "reentrant"):
                self.assertTrue(one[name][0] <= 1e-6 and one[name][1] <= 1e-5, (name, one[name]))
            self.assertFalse(one["another pass"])
            self.assertTrue(one["the same pass"] and one["eval leaves the generator"])
            for name in ("plain", "checkpointing", "reentrant", "failed"):
                self.assertTrue((one[f"{name}: state"] == found[0]["plain: state"]).all(), name)
        for a in range(4):
            for b in range(a):
                self.assertFalse((found[a]["noise"] == found[b]["noise"]).any())

    def test_a_collator_draws_the_same_on_all_ranks(self) -> None:
        found = processes.run(_collator, 3)
        self.assertEqual([one == found[0] for one in found], [True] * 3)
        self.assertEqual(len(set(found[0])), 4)

    @unittest.skipUnless(importlib.util.find_spec("peft"), "PEFT is not installed")
    def test_lora(self) -> None:
        self.independent(processes.run(_lora, 3))

    def test_layers_left_out_at_random(self) -> None:
        for said in processes.run(_layers, 2):
            self.assertIn("config.layerdrop is 0.1, which is not supported", said)


if __name__ == "__main__":
    unittest.main()
