# SPDX-License-Identifier: MIT OR Apache-2.0
"""`check` of ContextParallel of Diffusers: a call over the ranks compared with the model alone, by hand, and in the first call under a plan or a
processor that nobody has compared."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import torch.nn.functional as F

try:
    import diffusers
except ImportError:
    raise unittest.SkipTest("diffusers is not installed") from None

import diffusion_cases
import processes
from cpattn import Disagreement, InvalidArgument, Unsupported
from cpattn_hf.diffusers import ContextParallel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusion_cases import BOUND
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

diffusers.utils.logging.set_verbosity_error()


def error_of(job: Any) -> Exception | None:
    try:
        with torch.no_grad():
            job()
    except Exception as error:  # noqa: BLE001 (returned to the test)
        return error
    return None


def lacking(model: Any, *names: str) -> dict[str, Any]:
    """The plan of a model without some inputs, which then stay whole on each rank."""
    plan = model._cp_plan or diffusers.FluxTransformer2DModel._cp_plan
    return {
        key: {name: how for name, how in given.items() if name not in names} if isinstance(given, dict) else given
        for key, given in plan.items()
    }


def _whole_texts(rank: int, world: int) -> list[str]:
    """A text that the plan leaves whole, in each model with joint attention: counted once for each rank, and so refused."""
    wrong = []
    for case in ("Flux", "Flux2", "OvisImage", "LongCatImage"):
        model, inputs = diffusion_cases.build(case)
        cp = ContextParallel(model, timeout=60, plan=lacking(model, "encoder_hidden_states", "txt_ids"))
        for _ in range(2):  # it is refused until it is right
            error = error_of(lambda model=model, inputs=inputs: model(**inputs))
            if not isinstance(error, Unsupported) or "a text, counts once for each rank" not in str(error):
                wrong.append(f"{case}: {error!r}")
        cp.close()
    # Attention to keys that all ranks have whole is right: each key counts as often as any other.
    model, inputs = diffusion_cases.build("LTX")
    with torch.no_grad():
        expected = diffusion_cases.results(model(**inputs))
    cp = ContextParallel(model, timeout=60, plan=lacking(model, "encoder_hidden_states", "encoder_attention_mask"))
    with torch.no_grad():
        if not (far := diffusion_cases.apart(diffusion_cases.results(model(**inputs)), expected)) <= BOUND:
            wrong.append(f"a text of cross-attention: {far}")
    cp.close()
    # Results that are not gathered.
    model, inputs = diffusion_cases.build("Flux")
    cp = ContextParallel(
        model, timeout=60, plan={key: given for key, given in model._cp_plan.items() if key != "proj_out"}
    )
    error = error_of(lambda: model(**inputs))
    if not isinstance(error, Unsupported) or "(1, 77, 4)" not in str(error) or "gather all outputs" not in str(error):
        wrong.append(f"not gathered: {error!r}")
    cp.close()
    return wrong


class _Own(FluxAttnProcessor):  # type: ignore[misc]
    """A processor that computes attention itself, of the tokens of one rank."""

    def __call__(self, attn: Any, hidden_states: Any, *_: Any, **__: Any) -> Any:
        return F.scaled_dot_product_attention(hidden_states[:, None], hidden_states[:, None], hidden_states[:, None])[
            :, 0
        ]


def _processors(rank: int, world: int) -> list[str]:
    wrong = []
    model, inputs = diffusion_cases.build("Flux")
    model.single_transformer_blocks[1].attn.set_processor(_Own())
    with torch.no_grad():
        expected = diffusion_cases.results(model(**inputs))
    cp = ContextParallel(model, timeout=60)
    error = error_of(lambda: model(**inputs))
    if not isinstance(error, Unsupported) or "a processor that computes attention itself" not in str(error):
        wrong.append(f"a processor: {error!r}")
    with cp.off(), torch.no_grad():
        if not all(map(torch.equal, diffusion_cases.results(model(**inputs)), expected)):
            wrong.append("the model is another after a check")
    cp.close()
    # Of one rank alone.
    model, inputs = diffusion_cases.build("Flux")
    if rank:
        model.single_transformer_blocks[1].attn.set_processor(_Own())
    if not isinstance(
        error := error_of(lambda: ContextParallel(model, timeout=60)), Disagreement
    ) or "processors" not in str(error):
        wrong.append(f"a processor of one rank: {error!r}")
    return wrong


def _by_hand(rank: int, world: int) -> list[str]:
    """`check` at any time: small distances, no trace in the model and the generator, and what it refuses."""
    wrong = []
    for case in ("Flux", "QwenImage, masks", "LTX2", "Wan", "MiniMaxH3"):
        model, inputs = diffusion_cases.build(case)
        cp = ContextParallel(model.train(), timeout=60)
        before = torch.get_rng_state()
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "Flux"):
            if not 0 < (far := cp.check(**inputs)) < (1e-2 if case == "Flux" else 2e-6):
                wrong.append(f"{case}: {far}")
        if not torch.equal(before, torch.get_rng_state()) or not all(one.training for one in model.modules()):
            wrong.append(f"{case}: check leaves a trace")
        cp.close()
    model, inputs = diffusion_cases.build("Flux")
    cp = ContextParallel(model, timeout=60)
    with cp.off():
        if not isinstance(error := error_of(lambda: cp.check(**inputs)), InvalidArgument):
            wrong.append(f"off: {error!r}")
    other = {**inputs, "hidden_states": inputs["hidden_states"] + rank}
    if not isinstance(error := error_of(lambda: cp.check(**other)), Disagreement):
        wrong.append(f"other inputs: {error!r}")
    hook = model.register_forward_pre_hook(lambda *_: 1 // 0 if rank and cp.attention is None else None)
    error = error_of(lambda: cp.check(**inputs))
    if not isinstance(error, ZeroDivisionError if rank else InvalidArgument) or (
        not rank and "refused their check" not in str(error)
    ):
        wrong.append(f"a rank that fails alone: {error!r}")
    hook.remove()
    cp.check(*inputs.values()) if list(inputs) == [
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "img_ids",
        "txt_ids",
    ] else None
    with torch.no_grad():
        model.proj_out.weight += rank  # other weights
    error = error_of(lambda: cp.check(**inputs))
    if not isinstance(error, Unsupported) or "the same weights" not in str(error):
        wrong.append(f"other weights: {error!r}")
    cp.close()
    return wrong


def _once(rank: int, world: int) -> list[int]:
    """How often a model is called for a call of the user's: the first with each kind of inputs is compared, and none that `check` has seen."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    found = []
    for compiled in (False, True):
        model, inputs = diffusion_cases.build("Flux")
        call = torch.compile(model, backend="aot_eager", dynamic=False) if compiled else model
        model.register_forward_hook(count)
        cp = ContextParallel(model, timeout=60, plan=model._cp_plan)
        with torch.no_grad():
            short = {
                **inputs,
                "encoder_hidden_states": inputs["encoder_hidden_states"][:, :3],
                "txt_ids": inputs["txt_ids"][:3],
            }
            for job in (
                lambda: cp.check(**short),
                lambda: call(**inputs),
                lambda: call(**short),
                lambda: call(**inputs, guidance=None),
            ):
                calls = 0
                job()
                found.append(calls)
            rows = [diffusion_cases._random(1, 77, 48)] * 2
            controlled = {**inputs, "controlnet_block_samples": rows}
            error = error_of(lambda: call(**controlled))  # which the model's own plan leaves whole
            assert error is not None
        cp.close()
        model, inputs = diffusion_cases.build("Flux")
        model.register_forward_hook(count)
        call = torch.compile(model, backend="aot_eager", dynamic=False) if compiled else model
        cp = ContextParallel(model, timeout=60, plan=model._cp_plan)
        with torch.no_grad():
            for _ in range(2):
                calls = 0
                call(**inputs)
                found.append(calls)
        cp.close()
    return found


def _steps(rank: int, world: int) -> list[list[float]]:
    """Losses of SGD under fully_shard, made in each order, with an optimizer that is made after a check: those of one process."""
    found = []
    for order in (
        "alone",
        "sharded, over the ranks, check",
        "over the ranks, sharded",
        "sharded, over the ranks",
        "over the ranks, sharded, check",
    ):
        model, inputs = diffusion_cases.build("Flux")
        target = torch.randn(1, 77, 4, generator=torch.Generator().manual_seed(1))

        def shard(model: Any = model) -> None:
            mesh = init_device_mesh("cpu", (world,))
            for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

        cp = None
        for what in order.split(", "):
            if what == "sharded":
                shard()
            elif what == "over the ranks":
                cp = ContextParallel(model, timeout=60, plan=type(model)._cp_plan)
            elif what == "check":
                assert cp is not None
                cp.check(**inputs)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            loss = ((model(**inputs).sample - target) / 40).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
        if cp is not None:
            cp.close()
    return found


class Check(unittest.TestCase):
    def test_texts_that_each_rank_has_whole(self) -> None:
        for world in (2, 3):
            for wrong in processes.run(_whole_texts, world, seconds=300):
                self.assertEqual(wrong, [])

    def test_processors_that_compute_attention(self) -> None:
        for wrong in processes.run(_processors, 2, seconds=300):
            self.assertEqual(wrong, [])

    def test_at_any_time(self) -> None:
        for wrong in processes.run(_by_hand, 3, seconds=300):
            self.assertEqual(wrong, [])

    def test_only_the_first_call_of_a_kind_is_compared(self) -> None:
        for calls in processes.run(_once, 2, seconds=300):
            self.assertEqual(calls, [3, 1, 1, 1, 4, 1] * 2)

    def test_steps_under_fully_shard(self) -> None:
        for alone, *others in processes.run(_steps, 2, seconds=300):
            self.assertLess(alone[2], 0.98 * alone[0])
            for losses in others:
                for found, expected in zip(losses, alone, strict=True):
                    self.assertAlmostEqual(found, expected, delta=1e-5 * expected)


if __name__ == "__main__":
    unittest.main()
