# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ContextParallel of Diffusers refuses, on all ranks, how its ranks end, and attention over the ranks alone."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist

try:
    import diffusers
except ImportError:
    raise unittest.SkipTest("diffusers is not installed") from None

import diffusion_cases
import processes
import resources
from cpattn import Disagreement, InvalidArgument, InvalidHandle, PeerError, Unsupported
from cpattn_hf.diffusers import ContextParallel
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_first_block_cache, apply_layer_skip
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusion_cases import BOUND
from torch.nn.parallel import DistributedDataParallel

diffusers.utils.logging.set_verbosity_error()


def _attention(rank: int, world: int) -> list[str]:
    """The backend alone, in f64: ranks without queries or keys, groups of heads, other lengths and dims of k and v, and each kind of mask."""
    wrong = []
    model, _ = diffusion_cases.build("Flux")
    ContextParallel(model, timeout=60)
    of_k = [3, 0, 4]
    torch.manual_seed(6)
    kept = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [1] * 7, [1, 0, 1, 1, 0, 0, 1]], dtype=torch.bool)
    added = torch.where(kept, 0.0, -1e4).double()
    masks = {
        "none": None, "[batch, keys]": kept, "[batch, 1, 1, keys]": kept[:, None, None], "[1, 1, 1, keys]": kept[:1, None, None], "added": added[:, None, None],
        "lowest": added[:, None, None].clamp(max=0).mul(1e300),
        "of all heads and queries": kept[:, None, None].expand(3, 6, 7, 7),
    }  # fmt: skip
    for name, mask in masks.items():
        of_q = [1, 4, 2] if "queries" in name else [0, 5, 2]
        whole = [
            torch.randn(shape, dtype=torch.float64).requires_grad_()
            for shape in ((3, 7, 6, 16), (3, 7, 2, 16), (3, 7, 2, 24))
        ]
        wide = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in whole), wide, scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        weights = torch.randn_like(expected)
        exact = torch.autograd.grad((expected * weights).sum(), whole)
        at_q, at_k = sum(of_q[:rank]), sum(of_k[:rank])
        mine = [
            x.detach()[:, at : at + many[rank]].clone().requires_grad_()
            for x, at, many in zip(whole, (at_q, at_k, at_k), (of_q, of_k, of_k), strict=True)
        ]
        own = None if mask is None else mask[..., at_k : at_k + of_k[rank]]
        if own is not None and own.ndim == 4 and own.shape[2] > 1:
            own = own[:, :, at_q : at_q + of_q[rank]]
        processor = model.transformer_blocks[0].attn.processor
        settings, chosen = processor._parallel_config, processor._attention_backend
        o = dispatch_attention_fn(
            *mine, attn_mask=own, scale=0.3, enable_gqa=True, backend=chosen, parallel_config=settings
        )
        gradients_ = torch.autograd.grad((o * weights[:, at_q : at_q + of_q[rank]]).sum(), mine)
        parts = [
            (o, expected, at_q),
            *((a, b, at) for a, b, at in zip(gradients_, exact, (at_q, at_k, at_k), strict=True)),
        ]
        for what, (found, all_, at) in zip(("o", "dq", "dk", "dv"), parts, strict=True):
            distance = (found - all_[:, at : at + found.shape[1]]).abs().amax().item() if found.numel() else 0.0
            if not distance <= 1e-12 or found.shape[1] != (of_q if what in ("o", "dq") else of_k)[rank]:
                wrong.append(f"{what} with mask {name}: {distance:.1e}")
        # Other attention, to keys that each rank has whole, is that of one process.
        alone = dispatch_attention_fn(*whole, attn_mask=wide, scale=0.3, enable_gqa=True, backend=chosen)
        if not torch.equal(alone, expected):
            wrong.append(f"attention of whole keys with mask {name}")
    return wrong


def _refusals(rank: int, world: int) -> list[str]:
    """What is refused, on all ranks alike, after which the model goes on."""
    wrong = []

    def check(name: str, kind: type[Exception], text: str, job: Any) -> None:
        try:
            with torch.no_grad():
                job()
        except kind as error:
            if text not in str(error):
                wrong.append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 (reported to the test)
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{name} is not refused")

    def made(case: str, **more: Any) -> tuple[Any, Any]:
        model, inputs = diffusion_cases.build(case)
        cp = ContextParallel(model, timeout=60)
        return cp, lambda **changed: model(**{**inputs, **more, **changed})

    cp, flux = made("Flux")
    shape = (1, 77, 4)
    other = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    check("other inputs", Disagreement, "differ from those of rank 0", lambda: flux(hidden_states=other))
    check(
        "other shapes",
        Disagreement,
        "differ from those of rank 0",
        lambda: flux(encoder_hidden_states=torch.zeros(1, 7 + rank, 24), txt_ids=torch.zeros(7 + rank, 3)),
    )
    check(
        "of one rank",
        Unsupported if rank else InvalidArgument,
        "unknown has tensors" if rank else "ranks [1] of this group refused",
        lambda: flux(**({"unknown": other} if rank else {})),
    )
    check("dims", Unsupported, "img_ids has the shape (1, 77, 3)", lambda: flux(img_ids=torch.zeros(1, 77, 3)))
    flux()
    cp.model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    check("cache", Unsupported, "disable_cache", flux)
    cp.model.disable_cache()
    apply_layer_skip(cp.model, LayerSkipConfig(indices=[1], fqn="transformer_blocks"))
    check("skipped layers", Unsupported, "transformer_blocks.1 has the hook layer_skip_hook", flux)
    HookRegistry.check_if_exists_or_initialize(cp.model).remove_hook("layer_skip_hook", recurse=True)
    apply_first_block_cache(cp.model, diffusers.FirstBlockCacheConfig(threshold=0.1))
    check("hooks of a cache", Unsupported, "transformer_blocks.0 has the hook fbc_leader_block_hook", flux)
    for hook in ("fbc_leader_block_hook", "fbc_block_hook"):
        HookRegistry.check_if_exists_or_initialize(cp.model).remove_hook(hook, recurse=True)
    wrapped = DistributedDataParallel(cp.model)
    for what in (cp.model, wrapped, cp, cp.model.transformer_blocks[0]):
        for how in (copy.deepcopy, copy.copy, pickle.dumps, lambda what: torch.save(what, io.BytesIO())):
            if what in (cp.model, cp) or how is not copy.copy and (what is wrapped or how is not copy.deepcopy):
                check("a copy", Unsupported, "close it before you copy", lambda how=how, what=what: how(what))
    del wrapped
    flux()
    cp.model.set_attention_backend("native")
    check("backend", Unsupported, "set_attention_backend was called", flux)
    cp.close()
    cp.close()
    again = pickle.loads(pickle.dumps(cp.model))
    if not torch.equal(again.proj_out.weight, cp.model.proj_out.weight):
        wrong.append("a copy after close")
    check("closed", InvalidHandle, "is closed", lambda: cp.off().__enter__())

    # Hooks that move weights change no result.
    for case in ("Flux", "Wan"):
        model, inputs = diffusion_cases.build(case)
        with torch.no_grad():
            expected = diffusion_cases.results(model(**inputs))
            cp, call = made(case)
            cp.model.enable_group_offload(
                onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
            )
            cp.model.enable_layerwise_casting(storage_dtype=torch.float64, compute_dtype=torch.float32)
            if not (far := diffusion_cases.apart(diffusion_cases.results(call()), expected)) <= BOUND:
                wrong.append(f"offloading {case}: {far:.1e}")
        cp.close()
    cp, flux = made("Flux")
    cp.model.set_attn_processor(FluxAttnProcessor())
    check("processors", Unsupported, "a processor was set", flux)
    cp.close()
    cp, flux2 = made("Flux2")
    check("kv_cache_mode", Unsupported, "kv_cache_mode", lambda: flux2(kv_cache_mode="extract", num_ref_tokens=3))
    cp.close()
    cp, ltx2 = made("LTX2")
    check(
        "pairs", Unsupported, "video_self_attention_mask", lambda: ltx2(video_self_attention_mask=torch.ones(2, 49, 49))
    )
    check("weights", Unsupported, "weighs keys", lambda: ltx2(encoder_attention_mask=torch.full((2, 7), 0.5)))
    check("all keys", Unsupported, "hides all keys", lambda: ltx2(encoder_attention_mask=torch.zeros(2, 7)))
    cp.close()
    cp, qwen = made("QwenImage")
    apply_layer_skip(
        cp.model,
        LayerSkipConfig(
            indices=[0], fqn="transformer_blocks", skip_attention=False, skip_attention_scores=True, skip_ff=False
        ),
    )
    check("skipped scores", Unsupported, "transformer_blocks.0.attn has the hook layer_skip_hook", qwen)
    HookRegistry.check_if_exists_or_initialize(cp.model).remove_hook("layer_skip_hook", recurse=True)
    check(
        "ControlNet of one row",
        Unsupported,
        "controlnet_block_samples has the shape (15, 48)",
        lambda: qwen(controlnet_block_samples=[torch.zeros(15, 48)]),
    )
    cp.close()

    def make(model: Any, **options: Any) -> None:
        ContextParallel(model, timeout=60, **options).close()

    flux_model, wan = diffusion_cases.build("Flux")[0], diffusion_cases.build("Wan")[0]
    twice = ContextParallel(flux_model, timeout=60)
    check("twice", InvalidArgument, "already has a ContextParallel", lambda: make(flux_model))
    twice.close()
    processor = flux_model.transformer_blocks[0].attn.processor
    twice = ContextParallel(flux_model, timeout=60)
    qkv = [torch.zeros(1, 3, 3, 16)] * 3
    how: dict[str, Any] = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config}
    check("dropout", Unsupported, "dropout_p is 0.1", lambda: dispatch_attention_fn(*qkv, dropout_p=0.1, **how))
    check("causal", Unsupported, "is_causal is True", lambda: dispatch_attention_fn(*qkv, is_causal=True, **how))
    check(
        "mask of pairs",
        Unsupported,
        "differs between queries",
        lambda: dispatch_attention_fn(*qkv, attn_mask=torch.ones(3, 3).tril().bool(), **how),
    )
    check(
        "mask of others",
        Unsupported,
        "attn_mask has the shape (1, 1, 1, 5)",
        lambda: dispatch_attention_fn(*qkv, attn_mask=torch.ones(1, 1, 1, 5).bool(), **how),
    )
    twice.close()
    flux_model._parallel_config = "another"
    check("Diffusers' own", Unsupported, "enable_parallelism was called", lambda: make(flux_model))
    check("compiled before", InvalidArgument, "wrap or compile it afterwards", lambda: make(torch.compile(flux_model)))
    check("no model", InvalidArgument, "a model of Diffusers is needed", lambda: make(torch.nn.Linear(3, 3)))
    check("gradients", InvalidArgument, "gradients is 'both'", lambda: make(wan, gradients="both"))
    check("layout", InvalidArgument, "layout is given", lambda: make(wan, layout="zigzag"))
    with torch.no_grad():
        wan.proj_out.bias[3] += rank
    check("other weights", Disagreement, "proj_out.bias differs over the ranks", lambda: make(wan))
    make(wan, compare_weights=False)
    with torch.no_grad():
        wan.proj_out.bias[3] -= rank
    check("compare_weights", InvalidArgument, "compare_weights is 'no'", lambda: make(wan, compare_weights="no"))
    check(
        "options of one rank",
        InvalidArgument,
        "arguments of ContextParallel" if rank else "gradients",
        lambda: make(wan, gradients="mean" if rank else "other"),
    )
    check("other options", Disagreement, "gradients", lambda: make(wan, gradients="sum" if rank else "mean"))
    cp, ltx = made("LTX")
    check(
        "one word",
        Unsupported,
        "encoder_hidden_states has 1 tokens",
        lambda: ltx(encoder_hidden_states=torch.zeros(2, 1, 16), encoder_attention_mask=torch.ones(2, 1)),
    )
    cp.close()
    cp, flux = made("Flux")
    check(
        "one token",
        Unsupported,
        "hidden_states has 1 tokens",
        lambda: flux(hidden_states=torch.zeros(1, 1, 4), img_ids=torch.zeros(1, 3)),
    )
    cp.close()
    check("ulysses", InvalidArgument, "ulysses", lambda: make(wan, ulysses=5))
    check("window", InvalidArgument, "window_left is no argument of ContextParallel", lambda: make(wan, window_left=5))
    check("parts of the group", InvalidArgument, "all are needed", lambda: make(wan, ulysses=1, ring=1))
    check("plan", InvalidArgument, "has no module there", lambda: make(wan, plan={"there": diffusion_cases.rows_of(1)}))
    check(
        "argument of plan",
        InvalidArgument,
        "names rows",
        lambda: make(wan, plan={"blocks.0": {"rows": wan._cp_plan["blocks.0"]["hidden_states"]}}),
    )
    check(
        "history", Unsupported, "is_amplify_history", lambda: make(diffusion_cases._helios(is_amplify_history=True)[0])
    )
    dit = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, norm_num_groups=1
    )
    check("no plan", Unsupported, "DiTTransformer2DModel has no _cp_plan", lambda: make(dit))
    check(
        "processor",
        Unsupported,
        "has the processor AttnProcessor2_0",
        lambda: make(dit, plan={"": diffusion_cases.rows_of(1)}),
    )
    return wrong


def _broken(rank: int, world: int) -> str:
    """A rank that fails in the middle of a call, and begins another one."""
    model, inputs = diffusion_cases.build("Flux")
    ContextParallel(model, timeout=20)
    with torch.no_grad():
        if rank == 1:
            hook = model.single_transformer_blocks[0].register_forward_pre_hook(lambda *_: 1 // 0)
            try:
                model(**inputs)
            except ZeroDivisionError:
                hook.remove()
        try:
            model(**inputs)
        except Exception as error:  # noqa: BLE001 (returned to the test)
            return f"{type(error).__name__}: {error}"
    return "no error"


def _silent(rank: int, world: int) -> str:
    """A rank that fails in the middle of a call, and does nothing more."""
    model, inputs = diffusion_cases.build("Flux")
    cp = ContextParallel(model, timeout=4)
    with torch.no_grad():
        model(**inputs)
        if rank == 1:
            model.single_transformer_blocks[0].register_forward_pre_hook(lambda *_: 1 // 0)
        try:
            model(**inputs)
        except (ZeroDivisionError, PeerError) as error:
            time.sleep(8 * rank)
            cp.close()
            return type(error).__name__
    return "no error"


def _groups(rank: int, world: int) -> list[float]:
    """Two groups with their own inputs, by their ranks; and a backend that was chosen before, which attention to whole keys keeps."""
    far = []
    group = [0, 1] if rank < 2 else [2, 3]
    for case in ("Flux", "Wan"):
        model, inputs = diffusion_cases.build(case)
        model.set_attention_backend("_native_math")
        inputs["hidden_states"] = inputs["hidden_states"] * (1 + group[0])
        with torch.no_grad():
            expected = diffusion_cases.results(model(**inputs))
            cp = ContextParallel(model, group=group, timeout=60)
            seen = {
                name: module.processor._attention_backend.value
                for name, module in model.named_modules()
                if hasattr(module, "processor")
            }
            far.append(diffusion_cases.apart(diffusion_cases.results(model(**inputs)), expected))
            cp.close()
        again = {
            name: module.processor._attention_backend.value
            for name, module in model.named_modules()
            if hasattr(module, "processor")
        }
        assert set(seen.values()) == {"cpattn__native_math"} and set(again.values()) == {"_native_math"}, (seen, again)
    return far


def _closed(rank: int, world: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """What this process holds after one ContextParallel is closed, and after four: one that was refused too."""
    found = []
    for times in (1, 3):
        for _ in range(times):
            model, inputs = diffusion_cases.build("LTX")
            cp = ContextParallel(model, timeout=60)
            model(**inputs)
            dist.barrier()
            cp.close()
            with contextlib.suppress(InvalidArgument):
                ContextParallel(model, timeout=60, gradients="both")
            del model, cp
        found.append(resources.now())
    return found[0], found[1]


def _off(rank: int, world: int) -> bool:
    """The model as it was, each rank for itself, and over the ranks again; one `off` in another, and a close inside."""
    model, inputs = diffusion_cases.build("Flux")
    with torch.no_grad():
        expected = diffusion_cases.results(model(**inputs))
        cp = ContextParallel(model, timeout=60)
        with cp.off():
            own = {**inputs, "hidden_states": inputs["hidden_states"] + rank}
            model(**own)
            before = diffusion_cases.results(model(**inputs))
            with cp.off():
                pass
            model(**own)
        after = diffusion_cases.results(model(**inputs))
        with cp.off():
            cp.close()
        closed = diffusion_cases.results(model(**inputs))
        ContextParallel(model, timeout=60).close()
    return (
        all(map(torch.equal, [*before, *closed], [*expected, *expected]))
        and 0 < diffusion_cases.apart(after, expected) <= BOUND
    )


class Calls(unittest.TestCase):
    def test_attention(self) -> None:
        for wrong in processes.run(_attention, 3):
            self.assertEqual(wrong, [])

    def test_refusals(self) -> None:
        for wrong in processes.run(_refusals, 2, seconds=200):
            self.assertEqual(wrong, [])

    def test_a_rank_at_another_place(self) -> None:
        for said in processes.run(_broken, 2):
            self.assertRegex(said, "^Disagreement: .*(at another place of the model|differ from those of rank 0)")

    def test_a_rank_that_does_nothing_more(self) -> None:
        self.assertEqual(processes.run(_silent, 2), ["PeerError", "ZeroDivisionError"])

    def test_groups(self) -> None:
        for far in processes.run(_groups, 4):
            self.assertLessEqual(max(far), BOUND)

    def test_close_leaves_nothing(self) -> None:
        for once, often in processes.run(_closed, 2):
            self.assertEqual(once, often)

    def test_off(self) -> None:
        self.assertEqual(processes.run(_off, 2), [True, True])


if __name__ == "__main__":
    unittest.main()
