# SPDX-License-Identifier: MIT OR Apache-2.0
"""Transformers of Diffusers on several processes: the results of one process, whatever the lengths, masks and heads."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import diffusers
except ImportError:
    raise unittest.SkipTest("diffusers is not installed") from None

import diffusion
import held
import processes
import programs
from cpattn import Disagreement, InvalidArgument, InvalidHandle, PeerError, Unsupported
from cpattn.diffusers import ContextParallel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

diffusers.utils.logging.set_verbosity_error()

# Of results of f32, whose sums are in another order: each is below 4e-6 (sweep_diffusers.py prints them).
BOUND = 1e-5
GRADIENT_BOUND = 3e-5
SHOW = "CPATTN_SHOW" in os.environ
MESHES: dict[int, list[dict[str, int]]] = {2: [{}], 3: [{"ring": 3}, {"ulysses": 3}]}


def _alike(rank: int, world: int, file: str, cases: list[str]) -> list[str]:
    """Every case. Returns the errors."""
    expected, wrong = torch.load(file), []
    for number, case in enumerate(cases):
        for mesh in MESHES[world] if processes.LONG else MESHES[world][number % len(MESHES[world]) :][:1]:
            model, inputs = diffusion.build(case)
            with torch.no_grad():
                cp = ContextParallel(model, timeout=60, **mesh)
                found = diffusion.results(model(**inputs))
                distance = diffusion.apart(found, expected[case])
                if rank == 0 and SHOW:
                    print(f"results {case} on {world}, {mesh}: {distance:.1e}", flush=True)
                if not distance <= BOUND:
                    wrong.append(f"{case} on {world} ranks, {mesh}: {distance:.1e}")
                cp.close()
                if not all(map(torch.equal, diffusion.results(model(**inputs)), expected[case])):
                    wrong.append(f"{case} is another model after close")
    return wrong


def alone(cases: list[str]) -> dict[str, list[torch.Tensor]]:
    found = {}
    for case in cases:
        model, inputs = diffusion.build(case)
        with torch.no_grad():
            found[case] = diffusion.results(model(**inputs))
    return found


def _attention(rank: int, world: int) -> list[str]:
    """The backend alone, in f64: ranks without queries or keys, groups of heads, other lengths and dims of k and v, and each kind of mask."""
    wrong = []
    model, _ = diffusion.build("Flux")
    cp = ContextParallel(model, timeout=60)
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
        whole = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((3, 7, 6, 16), (3, 7, 2, 16), (3, 7, 2, 24))]
        wide = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
        expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole), wide, scale=0.3, enable_gqa=True).transpose(1, 2)
        weights = torch.randn_like(expected)
        exact = torch.autograd.grad((expected * weights).sum(), whole)
        at_q, at_k = sum(of_q[:rank]), sum(of_k[:rank])
        mine = [x.detach()[:, at : at + many[rank]].clone().requires_grad_() for x, at, many in zip(whole, (at_q, at_k, at_k), (of_q, of_k, of_k), strict=True)]
        own = None if mask is None else mask[..., at_k : at_k + of_k[rank]]
        if own is not None and own.ndim == 4 and own.shape[2] > 1:
            own = own[:, :, at_q : at_q + of_q[rank]]
        processor = model.transformer_blocks[0].attn.processor
        settings, chosen = processor._parallel_config, processor._attention_backend
        o = dispatch_attention_fn(*mine, attn_mask=own, scale=0.3, enable_gqa=True, backend=chosen, parallel_config=settings)
        gradients_ = torch.autograd.grad((o * weights[:, at_q : at_q + of_q[rank]]).sum(), mine)
        parts = [(o, expected, at_q), *((a, b, at) for a, b, at in zip(gradients_, exact, (at_q, at_k, at_k), strict=True))]
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
        model, inputs = diffusion.build(case)
        cp = ContextParallel(model, timeout=60)
        return cp, lambda **changed: model(**{**inputs, **more, **changed})

    cp, flux = made("Flux")
    shape = (1, 77, 4)
    other = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    check("other inputs", Disagreement, "differ from those of rank 0", lambda: flux(hidden_states=other))
    check("other shapes", Disagreement, "differ from those of rank 0", lambda: flux(encoder_hidden_states=torch.zeros(1, 7 + rank, 24), txt_ids=torch.zeros(7 + rank, 3)))
    check("of one rank", Unsupported if rank else InvalidArgument, "unknown has tensors" if rank else "ranks [1] of this group refused", lambda: flux(**({"unknown": other} if rank else {})))
    check("dims", Unsupported, "img_ids has the shape (1, 77, 3)", lambda: flux(img_ids=torch.zeros(1, 77, 3)))
    flux()
    cp.model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    check("cache", Unsupported, "disable_cache", flux)
    cp.model.disable_cache()
    cp.model.set_attention_backend("native")
    check("backend", Unsupported, "set_attention_backend was called", flux)
    cp.close()
    cp.close()
    check("closed", InvalidHandle, "is closed", lambda: cp.off().__enter__())

    cp, flux = made("Flux")
    cp.model.set_attn_processor(FluxAttnProcessor())
    check("processors", Unsupported, "a processor was set", flux)
    cp.close()
    cp, flux2 = made("Flux2")
    check("kv_cache_mode", Unsupported, "kv_cache_mode", lambda: flux2(kv_cache_mode="extract", num_ref_tokens=3))
    cp.close()
    cp, ltx2 = made("LTX2")
    check("pairs", Unsupported, "video_self_attention_mask", lambda: ltx2(video_self_attention_mask=torch.ones(2, 49, 49)))
    check("weights", Unsupported, "weighs keys", lambda: ltx2(encoder_attention_mask=torch.full((2, 7), 0.5)))
    check("all keys", Unsupported, "hides all keys", lambda: ltx2(encoder_attention_mask=torch.zeros(2, 7)))
    cp.close()
    cp, qwen = made("QwenImage")
    check("ControlNet of one row", Unsupported, "controlnet_block_samples has the shape (15, 48)", lambda: qwen(controlnet_block_samples=[torch.zeros(15, 48)]))
    cp.close()

    def make(model: Any, **options: Any) -> None:
        ContextParallel(model, timeout=60, **options).close()

    flux_model, wan = diffusion.build("Flux")[0], diffusion.build("Wan")[0]
    twice = ContextParallel(flux_model, timeout=60)
    check("twice", InvalidArgument, "already has a ContextParallel", lambda: make(flux_model))
    twice.close()
    processor = flux_model.transformer_blocks[0].attn.processor
    twice = ContextParallel(flux_model, timeout=60)
    qkv = [torch.zeros(1, 3, 3, 16)] * 3
    how: dict[str, Any] = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config}
    check("dropout", Unsupported, "dropout_p is 0.1", lambda: dispatch_attention_fn(*qkv, dropout_p=0.1, **how))
    check("causal", Unsupported, "is_causal is True", lambda: dispatch_attention_fn(*qkv, is_causal=True, **how))
    check("mask of pairs", Unsupported, "differs between queries", lambda: dispatch_attention_fn(*qkv, attn_mask=torch.ones(3, 3).tril().bool(), **how))
    check("mask of others", Unsupported, "attn_mask has the shape (1, 1, 1, 5)", lambda: dispatch_attention_fn(*qkv, attn_mask=torch.ones(1, 1, 1, 5).bool(), **how))
    twice.close()
    flux_model._parallel_config = "another"
    check("Diffusers' own", Unsupported, "enable_parallelism was called", lambda: make(flux_model))
    check("no model", InvalidArgument, "a model of Diffusers is needed", lambda: make(torch.nn.Linear(3, 3)))
    check("gradients", InvalidArgument, "gradients is 'both'", lambda: make(wan, gradients="both"))
    check("layout", InvalidArgument, "layout is given", lambda: make(wan, layout="zigzag"))
    check("options of one rank", InvalidArgument, "arguments of ContextParallel" if rank else "gradients", lambda: make(wan, gradients="mean" if rank else "other"))
    check("other options", Disagreement, "gradients", lambda: make(wan, gradients="sum" if rank else "mean"))
    cp, ltx = made("LTX")
    check("one word", Unsupported, "encoder_hidden_states has 1 tokens", lambda: ltx(encoder_hidden_states=torch.zeros(2, 1, 16), encoder_attention_mask=torch.ones(2, 1)))
    cp.close()
    cp, flux = made("Flux")
    check("one token", Unsupported, "hidden_states has 1 tokens", lambda: flux(hidden_states=torch.zeros(1, 1, 4), img_ids=torch.zeros(1, 3)))
    cp.close()
    check("ulysses", InvalidArgument, "ulysses", lambda: make(wan, ulysses=5))
    check("window", InvalidArgument, "window_left is given", lambda: make(wan, window_left=5))
    check("parts of the group", InvalidArgument, "all are needed", lambda: make(wan, ulysses=1, ring=1))
    check("plan", InvalidArgument, "has no module there", lambda: make(wan, plan={"there": diffusion.rows_of(1)}))
    check("argument of plan", InvalidArgument, "names rows", lambda: make(wan, plan={"blocks.0": {"rows": wan._cp_plan["blocks.0"]["hidden_states"]}}))
    check("history", Unsupported, "is_amplify_history", lambda: make(diffusion._helios(is_amplify_history=True)[0]))
    dit = diffusers.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, norm_num_groups=1)
    check("no plan", Unsupported, "DiTTransformer2DModel has no _cp_plan", lambda: make(dit))
    check("processor", Unsupported, "has the processor AttnProcessor2_0", lambda: make(dit, plan={"": diffusion.rows_of(1)}))
    return wrong


def _broken(rank: int, world: int) -> str:
    """A rank that fails in the middle of a call, and begins another one."""
    model, inputs = diffusion.build("Flux")
    cp = ContextParallel(model, timeout=20)
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
    model, inputs = diffusion.build("Flux")
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
        model, inputs = diffusion.build(case)
        model.set_attention_backend("_native_math")
        inputs["hidden_states"] = inputs["hidden_states"] * (1 + group[0])
        with torch.no_grad():
            expected = diffusion.results(model(**inputs))
            cp = ContextParallel(model, group=group, timeout=60)
            seen = {name: module.processor._attention_backend.value for name, module in model.named_modules() if hasattr(module, "processor")}
            far.append(diffusion.apart(diffusion.results(model(**inputs)), expected))
            cp.close()
        again = {name: module.processor._attention_backend.value for name, module in model.named_modules() if hasattr(module, "processor")}
        assert set(seen.values()) == {"cpattn__native_math"} and set(again.values()) == {"_native_math"}, (seen, again)
    return far


def _closed(rank: int, world: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """What this process holds after one ContextParallel is closed, and after four: one that was refused too."""
    found = []
    for times in (1, 3):
        for _ in range(times):
            model, inputs = diffusion.build("LTX")
            cp = ContextParallel(model, timeout=60)
            model(**inputs)
            dist.barrier()
            cp.close()
            with contextlib.suppress(InvalidArgument):
                ContextParallel(model, timeout=60, gradients="both")
            del model, cp
        found.append(held.now())
    return found[0], found[1]


def _off(rank: int, world: int) -> bool:
    """The model as it was, each rank for itself, and over the ranks again."""
    model, inputs = diffusion.build("Flux")
    with torch.no_grad():
        expected = diffusion.results(model(**inputs))
        cp = ContextParallel(model, timeout=60)
        with cp.off():
            own = {**inputs, "hidden_states": inputs["hidden_states"] + rank}
            model(**own)
            before = diffusion.results(model(**inputs))
        after = diffusion.results(model(**inputs))
    return all(map(torch.equal, before, expected)) and 0 < diffusion.apart(after, expected) <= BOUND


def gradients(model: Any, inputs: Any) -> list[torch.Tensor]:
    """Of all parameters that have one, and of hidden_states, for a loss of all results."""
    torch.manual_seed(11)
    inputs = {**inputs, "hidden_states": inputs["hidden_states"].clone().requires_grad_()}
    found = diffusion.results(model(**inputs))
    torch.stack([(one * torch.randn(one.shape)).mean() for one in found]).sum().backward()
    every = [*(one for one in model.parameters() if one.requires_grad), inputs["hidden_states"]]
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in every]


def distance_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """In units of the largest of a parameter, or of a hundredth of the largest of all: smaller ones are sums that cancel."""
    most = max(one.abs().max().item() for one in expected)
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-2 * most)).item() for a, b in zip(found, expected, strict=True))


def _gradients(rank: int, world: int, file: str, cases: list[str]) -> list[str]:
    """Every case, with its gradients summed or as DDP averages them. Returns the errors."""
    expected, wrong = torch.load(file), []
    for number, case in enumerate(cases):
        model, inputs = diffusion.build(case)
        cp = ContextParallel(model, timeout=60, gradients=("mean", "sum")[number % 2])
        if number % 3 == 1:
            model.enable_gradient_checkpointing()
        if number % 2:
            found = gradients(model, inputs)
            for one in found:
                dist.all_reduce(one)
        else:
            found = gradients(DistributedDataParallel(model, find_unused_parameters=True), inputs)
            dist.all_reduce(found[-1].div_(world))  # which DDP leaves to the caller
        distance = distance_of(found, expected[case])
        if not distance <= GRADIENT_BOUND:
            wrong.append(f"{case} on {world} ranks: {distance:.1e}")
        if rank == 0 and SHOW:
            print(f"gradients {case} on {world}: {distance:.1e}", flush=True)
        cp.close()
    return wrong


def add_lora(model: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "proj_out", "x_embedder"]))


def adapted() -> tuple[Any, Any]:
    """With LoRA, whose parameters alone are trained."""
    model, inputs = diffusion.build("Flux")
    add_lora(model)
    return model, inputs


def _wrapped(rank: int, world: int) -> list[str]:
    """Under fully_shard, made before and after it; with LoRA; with compiled blocks; with a plan of the caller; in bfloat16 and under autocast.
    Returns the errors."""
    wrong = []

    def check(what: str, distance: float, bound: float) -> None:
        if not distance <= bound:
            wrong.append(f"{what}: {distance:.1e}")

    mesh = init_device_mesh("cpu", (world,))
    for case, first in (("Flux", True), ("Wan", False), ("Wan", True)):
        expected = gradients(*diffusion.build(case))
        model, inputs = diffusion.build(case)
        cp = ContextParallel(model, timeout=60) if first else None
        for block in [module for name, module in model.named_modules() if name.rpartition(".")[0].endswith("blocks")]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        cp = cp or ContextParallel(model, timeout=60)
        found = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients(model, inputs)]
        dist.all_reduce(found[-1].div_(world))
        check(f"fully_shard, {case}, first: {first}", distance_of(found, expected), GRADIENT_BOUND)
        cp.close()
    if importlib.util.find_spec("peft"):
        expected = gradients(*adapted())
        model, inputs = adapted()
        cp = ContextParallel(model, timeout=60, gradients="sum")
        found = gradients(model, inputs)
        for one in found:
            dist.all_reduce(one)
        check("LoRA", distance_of(found, expected), GRADIENT_BOUND)
        cp.close()
        model, inputs = diffusion.build("Flux")
        cp = ContextParallel(model, timeout=60)
        add_lora(model)
        try:
            model(**inputs)
        except Unsupported as error:
            if "proj_out was replaced" not in str(error):
                wrong.append(str(error))
        else:
            wrong.append("a module that is replaced afterwards is not refused")
        cp.close()
    model, inputs = diffusion.build("Flux")
    with torch.no_grad():
        expected = diffusion.results(model(**inputs))
        cp = ContextParallel(model, timeout=60)
        whole = torch.compile(model, backend="aot_eager", dynamic=False)
        check("compiled", diffusion.apart(diffusion.results(whole(**inputs)), expected), BOUND)
        model.compile_repeated_blocks(backend="aot_eager", dynamic=False)
        check("compiled blocks", diffusion.apart(diffusion.results(model(**inputs)), expected), BOUND)
        cp.close()
        model, inputs = diffusion.build("Flux")
        cp = ContextParallel(model, timeout=60, plan=diffusers.FluxTransformer2DModel._cp_plan)
        check("a plan that is given", diffusion.apart(diffusion.results(model(**inputs)), expected), BOUND)
        cp.close()
        for case in ("Flux", "LTX"):
            model, inputs = diffusion.build(case)
            exact = diffusion.results(model(**inputs))
            few = {name: one.bfloat16() if name.endswith("hidden_states") or name == "pooled_projections" else one for name, one in inputs.items()}
            for what, run in {
                "autocast": lambda model=model, inputs=inputs: under_autocast(model, inputs),
                "bfloat16": lambda model=model, few=few: model.bfloat16()(**few),
            }.items():
                bound = 1.5 * diffusion.apart([one.float() for one in diffusion.results(run())], exact)
                cp = ContextParallel(model, timeout=60)
                check(f"{what}, {case}", diffusion.apart([one.float() for one in diffusion.results(run())], exact), bound)
                cp.close()
    return wrong


def under_autocast(model: Any, inputs: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**inputs)


def _pipeline(rank: int, world: int) -> float:
    """A pipeline around the model, two steps with true guidance: how far its latents are from those of one process."""
    transformer, _ = diffusion.build("Flux")
    torch.manual_seed(2)
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), in_channels=3, out_channels=3, latent_channels=1, norm_num_groups=1)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(scheduler, vae, None, None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    words = {f"{name}prompt_embeds": torch.randn(1, 5, 24) for name in ("", "negative_")}
    words |= {f"{name}pooled_prompt_embeds": torch.randn(1, 24) for name in ("", "negative_")}

    def latents() -> torch.Tensor:
        draw = torch.Generator().manual_seed(4)
        found: torch.Tensor = pipe(height=10, width=14, num_inference_steps=2, true_cfg_scale=2.0, generator=draw, output_type="latent", **words).images
        return found

    expected = latents()
    cp = ContextParallel(pipe.transformer, timeout=60)
    found = latents()
    cp.close()
    return diffusion.apart([found], [expected])


class Models(unittest.TestCase):
    def test_wrapped(self) -> None:
        for wrong in processes.run(_wrapped, 2):
            self.assertEqual(wrong, [])

    def test_a_pipeline(self) -> None:
        for distance in processes.run(_pipeline, 2):
            self.assertTrue(0 < distance <= BOUND, distance)

    def test_the_example(self) -> None:
        done = programs.run(str(Path(__file__).parents[2] / "examples/python/diffusion.py"), 3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("3 ranks, 4 steps: the result of one process", done.stdout)

    def test_gradients_of_one_process(self) -> None:
        cases = [case for case in diffusion.CASES if processes.LONG or "," not in case or "masks" in case or "tokens" in case]
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.set_num_threads(1)
            torch.save({case: gradients(*diffusion.build(case)) for case in cases}, file)
            for world in MESHES:
                with self.subTest(world=world):
                    some = cases if processes.LONG else cases[world % 2 :: 2]
                    for wrong in processes.run(_gradients, world, file, some, seconds=200):
                        self.assertEqual(wrong, [])

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

    def test_results_of_one_process(self) -> None:
        cases = list(diffusion.CASES)
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.set_num_threads(1)
            torch.save(alone(cases), file)
            for world in MESHES:
                with self.subTest(world=world):
                    for wrong in processes.run(_alike, world, file, cases, seconds=200):
                        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
