# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dropout of attention: which pairs are dropped, `cpattn.torch` against the formula with that mask, and Transformers' models with
`attention_dropout` against one process with the masks of all its layers."""

from __future__ import annotations

import importlib.util
import itertools
import random
import unittest
from typing import Any

import processes
import torch
import torch.distributed as dist
from dense import dense, error, gradients
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cpattn
from cpattn.torch import Context, dropout_mask
from cpattn.torch.dropout import of_call

DOCUMENTS = [0, 5, 5, 6, 40, 41, 93]
P = 0.3


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox 4x32-10 by its definition."""
    a, b, c, d = counter
    (k0, k1), low = key, 2**32 - 1
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = q >> 32 ^ b ^ k0, q & low, p >> 32 ^ d ^ k1, p & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return a, b, c, d


class Masks(unittest.TestCase):
    def test_the_rule(self) -> None:
        """By the definition, at the ends of all ranges and at some places between."""
        self.assertEqual(
            philox((0,) * 4, (0, 0)), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
        )  # Random123's known answer
        draw, last = random.Random(3), 2**32 - 1
        for seed in (0, 2**64 - 1, 0x123456789ABCDEF):
            for q, k, head in [
                (0, 0, 0),
                (last - 2, last - 6, last),
                *((draw.randrange(2**31), draw.randrange(2**31), draw.randrange(64)) for _ in range(5)),
            ]:
                found = cpattn.dropout_mask(P, seed, head, 2, 6, q_first=q, k_first=k)
                words = [
                    philox((i, j // 4, head, 0), (seed % 2**32, seed >> 32))[j % 4]
                    for i in (q, q + 1)
                    for j in range(k, k + 6)
                ]
                self.assertEqual(list(found), [int(word >= P * 2**32) for word in words])

    def test_tensors(self) -> None:
        kept = dropout_mask(P, 7, 3, 40, 50)
        self.assertEqual((kept.dtype, kept.shape), (torch.bool, (3, 40, 50)))
        self.assertEqual(kept[2, 11].tolist(), [bool(x) for x in cpattn.dropout_mask(P, 7, 2, 1, 50, q_first=11)])
        self.assertTrue(torch.equal(kept[:, :30, :30], dropout_mask(P, torch.tensor(7), 3, 30)))
        self.assertFalse(torch.equal(kept, dropout_mask(P, 8, 3, 40, 50)))
        self.assertTrue(dropout_mask(0.0, 7, 2, 3).all() and dropout_mask(P, 7, 2, 0, 5).shape == (2, 0, 5))
        self.assertTrue(torch.equal(dropout_mask(P, 2**64 - 1, 1, 9), dropout_mask(P, torch.tensor(-1), 1, 9)))


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def against_the_formula(rank: int, world: int) -> None:
    """o and gradients on meshes of all kinds, with sinks, slices and other k, with gradients of o and of lse's part in them."""
    n, hq, hk, d = DOCUMENTS[-1], 6, 3, 8
    whole = [draw(n, h, d, seed=h + d + i) for i, h in enumerate((hq, hk, hk))]
    d_o, sinks = draw(n, hq, d, seed=9), draw(hq, seed=5).float()
    seed = 2**63 + 12345
    keep = dropout_mask(P, seed, hq, n).double() / (1 - P)
    exact = [x.clone().requires_grad_() for x in (*whole, sinks)]
    want_o = _dropped(exact, keep)
    want = gradients(want_o, d_o, exact)
    for more in (
        {"ulysses": 3},
        {"ring": 3, "layout": "zigzag"},
        {"ring": 3, "layout": "striped", "layout_parameter": 2, "circulate": "queries"},
        {"ring": 3, "gather": True},
    ):
        context = Context(heads=hq, kv_heads=hk, head_dim=d, dtype=torch.float64, sinks=True, **more)  # type: ignore[arg-type]
        batch = context.batch(DOCUMENTS)
        for given in (seed, torch.tensor(seed - 2**64)):
            mine = [batch.shard(x).requires_grad_() for x in whole] + [sinks.clone().requires_grad_()]
            o = batch.attention(*mine, dropout_p=P, dropout_seed=given)
            found = gradients(o, batch.shard(d_o), mine)
            dist.all_reduce(found[3])
            for name, a, b in zip(("o", "dq", "dk", "dv"), (o, *found), (want_o, *want)):
                assert error(a, batch.shard(b)) < 1e-13, (name, more, error(a, batch.shard(b)))
            assert error(found[3], want[3]) < 1e-6
        dist.barrier()
        context.close()


def _dropped(inputs: list[torch.Tensor], keep: torch.Tensor) -> torch.Tensor:
    """The formula with the mask: the values of all keys, one head's weights at a time, times the mask."""
    q, k, v, sinks = inputs
    eye = torch.eye(len(k), dtype=v.dtype)[:, None].expand(-1, k.shape[1], -1)  # o is then the probabilities
    p = dense(q, k, eye, DOCUMENTS, sinks=sinks).transpose(0, 1) * keep
    return torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))


def drawn_seeds(rank: int, world: int) -> None:
    """Without a seed it is drawn from PyTorch's generator: the same on all ranks, again in recomputation, another one for the next call;
    ranks whose generators differ are found."""
    context = Context(heads=6, kv_heads=3, head_dim=8, dropout=P)
    batch = context.batch(DOCUMENTS)
    q, k, v = (batch.shard(draw(93, h, 8, seed=h).float()) for h in (6, 3, 3))
    torch.manual_seed(4)
    seed = of_call(P, None, 0.0)
    torch.manual_seed(4)
    first, second = batch.attention(q, k, v), batch.attention(q, k, v)
    assert torch.equal(first, batch.attention(q, k, v, dropout_seed=seed)) and not torch.equal(first, second)
    assert torch.equal(batch.attention(q, k, v, dropout_p=0.0), batch.attention(q, k, v, dropout_p=0, dropout_seed=5))
    assert error(batch.attention(q, k, v, dropout_p=0.0), first) > 0.1
    results = []
    for again in (False, True):
        torch.manual_seed(4)
        mine = [x.clone().requires_grad_() for x in (q, k, v)]
        o = checkpoint(batch.attention, *mine, use_reentrant=False) if again else batch.attention(*mine)
        torch.rand(3)
        results.append([o, *gradients(o, torch.ones_like(o), mine)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    for wrong in not_restored(batch, (q, k, v)):
        raise AssertionError(wrong)
    torch.manual_seed(rank)
    try:
        batch.attention(q, k, v)
    except (cpattn.Disagreement, cpattn.PeerError) as said:
        assert rank or "dropout_seed" in str(said), said
    else:
        raise AssertionError("ranks with different seeds were not refused")
    dist.barrier()
    context.close()


def not_restored(batch: Any, tensors: tuple[torch.Tensor, ...]) -> list[str]:
    """Checkpoints whose recomputation draws, or is given, another seed are refused; with one seed gradients are those without a checkpoint."""
    wrong = []
    compiled = torch.compile(batch.attention, backend="aot_eager", dynamic=False)
    for name, attend, right in (
        ("drawn", lambda *given: batch.attention(*given, dropout_p=P), False),
        ("compiled", lambda *given: compiled(*given, dropout_p=P), False),
        ("counted", lambda *given, count=itertools.count(50): batch.attention(*given, dropout_seed=next(count)), False),
        ("a context's, one seed", lambda *given: batch.attention(*given, dropout_seed=77), True),
        ("without", lambda *given: batch.attention(*given, dropout_p=0.0), True),
    ):
        for reentrant in (False, True):
            mine = [x.clone().requires_grad_() for x in tensors]
            try:
                checkpoint(attend, *mine, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
            except cpattn.Unsupported as error:
                if right or "give dropout_seed" not in str(error):
                    wrong.append(f"{name}: {error}")
                continue
            if not right:
                wrong.append(f"{name}, reentrant {reentrant}: not refused")
                continue
            exact = gradients(attend(*mine), torch.ones_like(tensors[0]), mine)
            if not all(torch.equal(x.grad, want) for x, want in zip(mine, exact)):  # type: ignore[arg-type]
                wrong.append(f"{name}: gradients differ")
    return wrong


def refusals(rank: int, world: int) -> None:
    context = Context(heads=6, kv_heads=3, head_dim=8)
    batch = context.batch(DOCUMENTS)
    q, k, v = (batch.shard(draw(93, h, 8, seed=h).float()) for h in (6, 3, 3))
    for words, given in (
        ("dropout_p is 1.0, a probability", {"dropout_p": 1.0}),
        ("dropout_p is 'x', a finite number", {"dropout_p": "x"}),
        ("dropout_seed is -1, at least 0", {"dropout_p": P, "dropout_seed": -1}),
        (
            "dropout_seed is a tensor of torch.float32 of the shape ()",
            {"dropout_p": P, "dropout_seed": torch.tensor(1.0)},
        ),
    ):
        try:
            batch.attention(q, k, v, **given)  # type: ignore[arg-type]
        except cpattn.InvalidArgument as said:
            assert words in str(said), said
        else:
            raise AssertionError(words)
    dist.barrier()
    context.close()


class Masked:
    """`F.dropout` of one process with the masks of attention's calls: weights are of [1, heads, tokens, tokens]."""

    def __init__(self, seeds: list[int]) -> None:
        self._seeds, self._usual = iter(seeds), F.dropout

    def __call__(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not (training and p and x.ndim == 4):
            return self._usual(x, p, training, inplace)
        return x * dropout_mask(p, next(self._seeds), x.shape[1], x.shape[2], x.shape[3]) / (1 - p)


def model_of(kind: str, hidden: float = 0.0) -> Any:
    import models
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    transformers.utils.logging.set_verbosity_error()

    small = {
        "vocab_size": models.WORDS,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    if kind == "bert":  # the default of attention_probs_dropout_prob is 0.1
        config = transformers.BertConfig(**small, hidden_dropout_prob=hidden)
        return AutoModelForMaskedLM.from_config(config, attn_implementation="eager").train()
    if kind in ("llama", "lora"):
        return models.build("llama", attention_dropout=P)
    config = transformers.GPT2Config(
        vocab_size=models.WORDS,
        n_embd=48,
        n_head=4,
        n_layer=2,
        n_positions=128,
        resid_pdrop=hidden,
        embd_pdrop=hidden,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def in_transformers(rank: int, world: int) -> None:
    import models
    from transformers import set_seed

    from cpattn_hf.transformers import ContextParallel

    pack = models.batch([61])
    for kind in ("bert", "gpt2", "llama"):
        results, state = [], {}
        for how in ("plain", "checkpointing"):
            model = model_of(kind)
            cp = ContextParallel(model, gradients="sum", layout="zigzag")
            if how == "checkpointing":
                models.checkpointing(model, False)
            set_seed(5 + rank)  # rank 0's generator decides
            loss = model(**pack).loss
            state[how] = torch.get_rng_state()
            torch.rand(3 + rank)
            loss.backward()
            total = models.gradients(model)
            dist.all_reduce(total)
            results.append((loss.item(), total, [one.number for one in cp.last.draws.seeds]))  # type: ignore[union-attr]
            seeds = results[-1][2]
            cp.close()
        (loss, total, calls), again = results
        assert len(calls) == 2 and calls == again[2] and torch.equal(*state.values())
        assert abs(again[0] / loss - 1) < 1e-6 and models.apart(again[1], total) < 1e-5, (kind, again[0], loss)
        # One process with these masks.
        alone, usual = model_of(kind), F.dropout
        F.dropout = torch.nn.functional.dropout = Masked(seeds)  # type: ignore[assignment]
        try:
            expected = alone(**{name: x for name, x in pack.items() if name != "position_ids"}).loss
        finally:
            F.dropout = torch.nn.functional.dropout = usual
        expected.backward()
        assert abs(loss / expected.item() - 1) < 1e-5 and models.apart(total, models.gradients(alone)) < 1e-4, (
            kind,
            loss,
            expected.item(),
        )


def lora(model: Any) -> None:
    """Adapters in a model's layers, as a user adds them after ContextParallel, with a dropout of their own."""
    import peft

    torch.manual_seed(1)
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, lora_dropout=P, init_lora_weights=False, target_modules=["q_proj", "v_proj"]), model
    )
    model.train()


def by_place(rank: int, world: int) -> None:
    """With dropout="position" three ranks train as one does, also when layers are computed again; other draws are refused."""
    import models
    from transformers import AutoModelForCausalLM, OPTConfig, set_seed

    from cpattn_hf.transformers import ContextParallel

    pack = models.batch([33, 28])
    for kind in ("bert", "gpt2", *(("lora",) if importlib.util.find_spec("peft") else ())):
        results = []
        for group, again in ((None, False), (None, True), ([rank], False)):
            model = model_of(kind, 0.2)
            cp = ContextParallel(model, group=group, gradients="sum", dropout="position")
            if kind == "lora":
                lora(model)
            if again:
                models.checkpointing(model, False)
            set_seed(5)
            loss = model(**pack).loss
            loss.backward()
            total = models.gradients(model)
            if group is None:
                dist.all_reduce(total)
            results.append((loss.item(), total))
            cp.close()
            assert not any("forward" in vars(layer) for layer in model.modules())
        for loss, total in results[:2]:
            assert abs(loss / results[2][0] - 1) < 1e-6 and models.apart(total, results[2][1]) < 1e-5, (
                kind,
                loss,
                results[2][0],
            )
    model = AutoModelForCausalLM.from_config(
        OPTConfig(
            vocab_size=models.WORDS,
            hidden_size=32,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        )
    ).train()
    cp = ContextParallel(model, dropout="position")
    try:
        model(**pack)
    except cpattn.Unsupported as said:
        assert "draws random numbers outside of torch.nn.Dropout" in str(said), said
    else:
        raise AssertionError("OPT's functional dropout was not refused")
    cp.close()
    try:
        ContextParallel(model, dropout=0.1)  # type: ignore[arg-type]
    except cpattn.InvalidArgument as said:
        assert "dropout is 0.1, 'rank'" in str(said), said
    else:
        raise AssertionError("a number was taken")


def passes(rank: int, world: int) -> None:
    """Replicas drop other places, each in its own batch. A layer of a pass that began with the generator's state of another pass, in flight
    with it, is computed again with the tokens of its own."""
    import models
    from transformers import set_seed

    from cpattn_hf.transformers import ContextParallel

    model = model_of("gpt2", P)
    cp = ContextParallel(model, replicas=world)
    set_seed(5)
    model(**models.batch([20]))
    seeds = [torch.zeros(2, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(seeds, torch.tensor([one.number >> 1 for one in cp.last.draws.seeds]))  # type: ignore[union-attr]
    assert len({int(one) for both in seeds for one in both}) == 2 * world, seeds
    cp.close()
    results = []
    for again in (False, True):
        model = model_of("gpt2", P)
        cp = ContextParallel(model, gradients="sum", dropout="position", ring=world, layout="zigzag")
        if again:
            models.checkpointing(model, False)
        losses = []
        for lengths in ([60], [30, 30]):  # as many tokens on each rank, and other ones
            set_seed(5)
            losses.append(model(**models.batch(lengths)).loss)
        (losses[0] + losses[1]).backward()
        results.append(models.gradients(model))
        cp.close()
    assert models.apart(*results) < 1e-6, models.apart(*results)


def towers(rank: int, world: int) -> None:
    """A dropout of LoRA in a vision tower draws as in one process, also where the tower is computed again."""
    import images
    import models
    from transformers import set_seed

    from cpattn_hf.transformers import ContextParallel

    each, results = images.documents("gemma3"), []
    pack = {**images.packed(each), "cu_seqlens": images.ends(each)}
    for group, again in ((None, False), (None, True), ([rank], False)):
        model = images.build("gemma3")
        cp = ContextParallel(model, group=group, gradients="sum", dropout="position")
        lora(model)
        if again:
            models.checkpointing(model, False)
        set_seed(5)
        model(**pack).loss.backward()
        results.append(models.gradients(model))
        if group is None:
            dist.all_reduce(results[-1])
        cp.close()
    assert max(models.apart(one, results[2]) for one in results[:2]) < 1e-5, results
    cp = ContextParallel(model, vision="shard", dropout="position")
    try:
        model(**pack)
    except cpattn.Unsupported as said:
        assert "or in a vision tower with vision='shard'" in str(said), said
    else:
        raise AssertionError("dropout of images that each rank draws was not refused")
    cp.close()


def the_hash(rank: int, world: int) -> None:
    from cpattn_hf.transformers.dropout import hashed

    tokens, seed = torch.tensor([0, 5, 2**31 - 1]), 0xFEDCBA9876543210
    found = hashed(tokens, 7, seed)
    for row, token in zip(found.tolist(), tokens.tolist()):
        assert row == [philox((token, j // 4, 0, 1), (seed % 2**32, seed >> 32))[j % 4] for j in range(7)]


TRANSFORMERS = (in_transformers, by_place, passes, *((towers,) if importlib.util.find_spec("peft") else ()), the_hash)


def everything(rank: int, world: int) -> None:
    for check in (
        against_the_formula,
        refusals,
        *(TRANSFORMERS if importlib.util.find_spec("transformers") else ()),
        drawn_seeds,
    ):
        check(rank, world)
        dist.barrier()


class OverRanks(unittest.TestCase):
    def test_everything(self) -> None:
        processes.run(everything, 3)


if __name__ == "__main__":
    unittest.main()
