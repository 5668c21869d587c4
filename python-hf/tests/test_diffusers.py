# SPDX-License-Identifier: MIT OR Apache-2.0
"""Transformers of Diffusers on several processes: the results of one process, whatever the lengths, masks and heads."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import diffusers
except ImportError:
    raise unittest.SkipTest("diffusers is not installed") from None

import diffusion_cases
import processes
import programs
from cpattn import Unsupported
from cpattn_hf.diffusers import ContextParallel
from diffusion_cases import BOUND, GRADIENT_BOUND
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

diffusers.utils.logging.set_verbosity_error()

SHOW = "CPATTN_SHOW" in os.environ
MESHES: dict[int, list[dict[str, int]]] = {2: [{}], 3: [{"ring": 3}, {"ulysses": 3}]}


def _alike(rank: int, world: int, file: str, cases: list[str]) -> list[str]:
    """Every case. Returns the errors."""
    expected, wrong = torch.load(file), []
    for number, case in enumerate(cases):
        for mesh in MESHES[world] if processes.LONG else MESHES[world][number % len(MESHES[world]) :][:1]:
            model, inputs = diffusion_cases.build(case)
            with torch.no_grad():
                cp = ContextParallel(model, timeout=60, **mesh)
                found = diffusion_cases.results(model(**inputs))
                distance = diffusion_cases.apart(found, expected[case])
                if rank == 0 and SHOW:
                    print(f"results {case} on {world}, {mesh}: {distance:.1e}", flush=True)
                if not distance <= BOUND:
                    wrong.append(f"{case} on {world} ranks, {mesh}: {distance:.1e}")
                cp.close()
                if not all(map(torch.equal, diffusion_cases.results(model(**inputs)), expected[case])):
                    wrong.append(f"{case} is another model after close")
    return wrong


def alone(cases: list[str]) -> dict[str, list[torch.Tensor]]:
    found = {}
    for case in cases:
        model, inputs = diffusion_cases.build(case)
        with torch.no_grad():
            found[case] = diffusion_cases.results(model(**inputs))
    return found


def gradients(model: Any, inputs: Any) -> list[torch.Tensor]:
    """Of all parameters that have one, and of hidden_states, for a loss of all results."""
    torch.manual_seed(11)
    inputs = {**inputs, "hidden_states": inputs["hidden_states"].clone().requires_grad_()}
    found = diffusion_cases.results(model(**inputs))
    torch.stack([(one * torch.randn(one.shape)).mean() for one in found]).sum().backward()
    every = [*(one for one in model.parameters() if one.requires_grad), inputs["hidden_states"]]
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in every]


def distance_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """In units of the largest of a parameter, or of a hundredth of the largest of all: smaller ones are sums that cancel."""
    most = max(one.abs().max().item() for one in expected)
    return max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-2 * most)).item()
        for a, b in zip(found, expected, strict=True)
    )


def _gradients(rank: int, world: int, file: str, cases: list[str]) -> list[str]:
    """Every case, with its gradients summed or as DDP averages them. Returns the errors."""
    expected, wrong = torch.load(file), []
    for number, case in enumerate(cases):
        model, inputs = diffusion_cases.build(case)
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
    model.add_adapter(
        LoraConfig(
            r=2,
            lora_alpha=4,
            init_lora_weights=False,
            target_modules=["to_q", "to_k", "to_v", "proj_out", "x_embedder"],
        )
    )


def adapted() -> tuple[Any, Any]:
    """With LoRA, whose parameters alone are trained."""
    model, inputs = diffusion_cases.build("Flux")
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
        expected = gradients(*diffusion_cases.build(case))
        model, inputs = diffusion_cases.build(case)
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
        model, inputs = diffusion_cases.build("Flux")
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
    model, inputs = diffusion_cases.build("Flux")
    with torch.no_grad():
        expected = diffusion_cases.results(model(**inputs))
        cp = ContextParallel(model, timeout=60)
        whole = torch.compile(model, backend="aot_eager", dynamic=False)
        check("compiled", diffusion_cases.apart(diffusion_cases.results(whole(**inputs)), expected), BOUND)
        model.compile_repeated_blocks(backend="aot_eager", dynamic=False)
        check("compiled blocks", diffusion_cases.apart(diffusion_cases.results(model(**inputs)), expected), BOUND)
        cp.close()
        model, inputs = diffusion_cases.build("Flux")
        cp = ContextParallel(model, timeout=60, plan=diffusers.FluxTransformer2DModel._cp_plan)
        check("a plan that is given", diffusion_cases.apart(diffusion_cases.results(model(**inputs)), expected), BOUND)
        cp.close()
        for case in ("Flux", "LTX"):
            model, inputs = diffusion_cases.build(case)
            exact = diffusion_cases.results(model(**inputs))
            few = {
                name: one.bfloat16() if name.endswith("hidden_states") or name == "pooled_projections" else one
                for name, one in inputs.items()
            }
            for what, run in {
                "autocast": lambda model=model, inputs=inputs: under_autocast(model, inputs),
                "bfloat16": lambda model=model, few=few: model.bfloat16()(**few),
            }.items():
                bound = 1.5 * diffusion_cases.apart([one.float() for one in diffusion_cases.results(run())], exact)
                cp = ContextParallel(model, timeout=60)
                check(
                    f"{what}, {case}",
                    diffusion_cases.apart([one.float() for one in diffusion_cases.results(run())], exact),
                    bound,
                )
                cp.close()
    return wrong


def under_autocast(model: Any, inputs: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**inputs)


def _pipeline(rank: int, world: int) -> float:
    """A pipeline around the model, two steps with true guidance: how far its latents are from those of one process."""
    transformer, _ = diffusion_cases.build("Flux")
    torch.manual_seed(2)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,), in_channels=3, out_channels=3, latent_channels=1, norm_num_groups=1
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(scheduler, vae, None, None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    words = {f"{name}prompt_embeds": torch.randn(1, 5, 24) for name in ("", "negative_")}
    words |= {f"{name}pooled_prompt_embeds": torch.randn(1, 24) for name in ("", "negative_")}

    def latents() -> torch.Tensor:
        draw = torch.Generator().manual_seed(4)
        found: torch.Tensor = pipe(
            height=10,
            width=14,
            num_inference_steps=2,
            true_cfg_scale=2.0,
            generator=draw,
            output_type="latent",
            **words,
        ).images
        return found

    expected = latents()
    cp = ContextParallel(pipe.transformer, timeout=60)
    found = latents()
    cp.close()
    return diffusion_cases.apart([found], [expected])


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
        cases = [
            case
            for case in diffusion_cases.CASES
            if processes.LONG or "," not in case or "masks" in case or "tokens" in case
        ]
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.set_num_threads(1)
            torch.save({case: gradients(*diffusion_cases.build(case)) for case in cases}, file)
            for world in MESHES:
                with self.subTest(world=world):
                    some = cases if processes.LONG else cases[world % 2 :: 2]
                    for wrong in processes.run(_gradients, world, file, some, seconds=200):
                        self.assertEqual(wrong, [])

    def test_results_of_one_process(self) -> None:
        cases = list(diffusion_cases.CASES)
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.set_num_threads(1)
            torch.save(alone(cases), file)
            for world in MESHES:
                with self.subTest(world=world):
                    some = cases if processes.LONG or world == 3 else cases[::2]
                    for wrong in processes.run(_alike, world, file, some, seconds=200):
                        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
