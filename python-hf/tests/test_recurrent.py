# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recurrent layers of Transformers on each rank's own tokens, with their states passed on: logits, loss and gradients of one process."""

from __future__ import annotations

import tempfile
import unittest
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import hybrids
import kernels
import models
import processes
from cpattn import Disagreement, InvalidArgument, Unsupported
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.hybrids import form_of, mixer_of
from cpattn_hf.transformers.hybrids.states.choice import Cost, by_heads, by_states
from cpattn_hf.transformers.hybrids.states.passing import Passing
from cpattn_hf.transformers.hybrids.states.segments import Segment, segments_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

transformers.utils.logging.set_verbosity_error()
# Documents with borders everywhere, one of one long document, and one with fewer tokens than ranks.
PACKS = [[33, 1, 70, 2, 3, 1, 20], [150], [3]]


def _alone(name: str, lengths: list[int]) -> tuple[float, torch.Tensor, torch.Tensor]:
    model, pack = hybrids.build(name), models.batch(lengths)
    logits = torch.cat([model(input_ids=ids, use_cache=False).logits[0] for ids, _ in models.documents(pack)]).detach()
    loss = models.part(model, pack) / max(models.count(pack), 1)
    loss.backward()
    return loss.item(), logits, models.gradients(model)


def _wrong(name: str, alone: Any, packs: list[list[int]], change: Any = None, **options: Any) -> list[str]:
    model, wrong = hybrids.build(name), []
    if change:
        change(model)
    cp = ContextParallel(model, gradients="sum", timeout=60, **{"recurrent": "states", **options})
    for lengths in packs:
        loss, logits, gradients = alone[name, tuple(lengths)]
        model.zero_grad()
        out = model(**models.batch(lengths))
        out.loss.backward()
        total = models.gradients(model)
        dist.all_reduce(total)
        found = {"loss": abs(out.loss.item() - loss) / loss, "gradients": models.apart(total, gradients)}
        if not options.get("tile"):
            found["logits"] = models.apart(cp.gather(out.logits)[0], logits)
        if said := [f"{what} {error:.1e}" for what, error in found.items() if not error <= 1e-5]:
            wrong.append(f"{name} {lengths} {options}: {', '.join(said)}")
    cp.close()
    return wrong


def _right(rank: int, world: int, names: list[str], file: str) -> list[str]:
    alone, wrong = torch.load(file), []
    for name in names:
        for layout, packs in (("contiguous", PACKS[:2]), ("zigzag", PACKS)):
            wrong += _wrong(name, alone, packs, ulysses=1, ring=world, layout=layout)
    return wrong


def _checkpointed(rank: int, world: int, names: list[str], file: str) -> list[str]:
    alone, wrong = torch.load(file), []
    for name in names:
        for reentrant in (False, True):

            def change(model: Any) -> None:
                models.checkpointing(model, reentrant)
                if reentrant:
                    model.enable_input_require_grads()

            wrong += _wrong(name, alone, PACKS[:1], change, tile=40)
    return wrong


def _wrapped(rank: int, world: int, names: list[str], file: str) -> list[str]:
    """DDP and FSDP, also where a rank has no token: each rank has gradients of all parameters, and takes part in each exchange."""
    alone, wrong = torch.load(file), []
    for name in names:
        for kind in ("ddp", "fsdp"):
            model = hybrids.build(name)
            cp = ContextParallel(model, timeout=60, recurrent="states")
            if kind == "ddp":
                whole: Any = torch.nn.parallel.DistributedDataParallel(model)
            else:
                for layer in model.get_decoder().layers:
                    fully_shard(layer)
                whole = fully_shard(model)
            for lengths in PACKS[1:]:
                loss_alone, _, gradients = alone[name, tuple(lengths)]
                whole.zero_grad()
                loss = whole(**models.batch(lengths)).loss
                loss.backward()
                grads = [torch.zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]
                grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
                total = torch.cat([g.flatten().double() for g in grads])
                error, distance = abs(loss.item() - loss_alone) / loss_alone, models.apart(total, gradients)
                if not (error <= 1e-5 and distance <= 1e-5):
                    wrong.append(f"{name} {lengths}, {kind}: loss {error:.1e}, gradients {distance:.1e}")
            cp.close()
    return wrong


def _frozen(rank: int, world: int, names: list[str], file: str) -> list[str]:
    """Only one weight of the last recurrent layer trains: no rank leaves out an exchange of the backward pass, and layers before it keep
    nothing for it."""
    wrong = []
    for name in names:
        found = []
        for recurrent in ("heads", "states"):
            model = hybrids.build(name)
            layers = [module for module in model.modules() if mixer_of(module)]
            chosen = {id(p) for p in list(layers[-1].parameters())[:1]}
            for p in model.parameters():
                p.requires_grad_(id(p) in chosen)

            def frozen(layer: Any, args: Any, out: Any) -> None:
                if (out[0] if isinstance(out, tuple) else out).requires_grad:
                    wrong.append(f"{name} {recurrent}: a frozen layer's output requires grad")

            for layer in layers[:-1]:
                layer.register_forward_hook(frozen)
            cp = ContextParallel(model, gradients="sum", timeout=60, recurrent=recurrent)
            for lengths in PACKS:
                model(**models.batch(lengths)).loss.backward()
            total = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad])
            dist.all_reduce(total)
            found.append(total)
            cp.close()
        if not models.apart(found[1], found[0]) <= 1e-5:
            wrong.append(f"{name}: gradients {models.apart(found[1], found[0]):.1e}")
    return wrong


def _apart(rank: int, world: int) -> list[str]:
    """A change in one document leaves all logits of the others as they are, bit by bit."""
    wrong = []
    pack = models.batch(PACKS[0])
    other = {**pack, "input_ids": pack["input_ids"].clone()}
    other["input_ids"][0, 34:104:5] += 1  # in the third document
    other["input_ids"] %= models.WORDS
    for name in hybrids.MODELS:
        model = hybrids.build(name)
        cp = ContextParallel(model, gradients="sum", timeout=60, recurrent="states", layout="contiguous")
        with torch.no_grad():
            one, two = (cp.gather(model(**given).logits)[0] for given in (pack, other))
        cp.close()
        same = (one == two).all(1)
        if not (same[:34].all() and same[104:].all()):
            wrong.append(f"{name}: another document changed")
        if same[34:104].all():
            wrong.append(f"{name}: the document did not change")
    return wrong


def _kernel_of_fla(rank: int, world: int, names: list[str], file: str) -> list[str]:
    """A kernel that takes several sequences a call, with the arguments of fla's: one call for segments of a kind, with the same results."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    usual, calls = module.torch_chunk_gated_delta_rule, []

    def chunk_gated_delta_rule(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
        initial_state: torch.Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        calls.append(0 if cu_seqlens is None else len(cu_seqlens) - 1)
        assert cu_seqlens is None or (len(q) == 1 and cu_seqlens.dtype == torch.int64)
        ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        assert initial_state is None or len(initial_state) == len(ends) - 1
        found = []
        for at, (a, b) in enumerate(pairwise(ends)):
            state = None if initial_state is None else initial_state[at : at + 1]
            rows = (one[:, a:b] for one in (q, k, v))
            how = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            found.append(usual(*rows, g=g[:, a:b], beta=beta[:, a:b], initial_state=state, **how))
        return torch.cat([o for o, _ in found], 1), torch.cat([s for _, s in found]) if output_final_state else None

    module.torch_chunk_gated_delta_rule = kernels.handed(usual, chunk_gated_delta_rule, lambda: None)
    try:
        wrong = _wrong("qwen3_5_text", torch.load(file), PACKS[:1], layout="zigzag_pack")
    finally:
        module.torch_chunk_gated_delta_rule = usual
    return wrong + ([] if max(calls) > 1 else [f"calls {calls}"])


def _counted(rank: int, world: int) -> tuple[dict[tuple[str, int], int], list[str]]:
    """The rows of all kernel calls of a rank in one pass of one document, and what `explain` says."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    usual, rows = module.torch_chunk_gated_delta_rule, []
    found: dict[tuple[str, int], int] = {}
    said: list[str] = []

    def counts(query: torch.Tensor, *args: Any, **options: Any) -> Any:
        rows.append(query.shape[1])
        return usual(query, *args, **options)

    module.torch_chunk_gated_delta_rule = counts
    try:
        for recurrent in ("states", "heads", "auto"):
            model = hybrids.build("qwen3_5_text")
            cp = ContextParallel(model, recurrent=recurrent, layout="contiguous", ring=world, ulysses=1)
            try:
                cp.explain()
            except InvalidArgument as error:
                said.append(str(error))
            for length in (80, 160):
                rows.clear()
                model(**models.batch([length]))
                found[recurrent, length] = sum(rows)
            said.append(cp.explain().splitlines()[-1])
            cp.close()
    finally:
        module.torch_chunk_gated_delta_rule = usual
    return found, said


def _kinds(rank: int, world: int, names: list[str], file: str) -> list[str]:
    """With kernels of PyTorch, in bfloat16 and under autocast; beside the form of heads."""
    wrong = []
    for name in names:
        for kind, options, bound in (
            ("kernels of the model", {"kernels": "model"}, 1e-5),
            ("bfloat16", {}, 0.1),
            ("autocast", {}, 0.05),
        ):
            found = []
            for recurrent in ("heads", "states"):
                model = hybrids.build(name)
                model = model.to(torch.bfloat16) if kind == "bfloat16" else model
                model.set_attn_implementation("sdpa")
                cp = ContextParallel(model, gradients="sum", timeout=60, recurrent=recurrent, **options)
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    loss = model(**models.batch(PACKS[0])).loss
                loss.backward()
                total = models.gradients(model)
                dist.all_reduce(total)
                found.append((loss.item(), total))
                cp.close()
            (loss_of_heads, of_heads), (loss_of_states, of_states) = found
            far = max(abs(loss_of_states / loss_of_heads - 1), models.apart(of_states, of_heads))
            if not far <= bound:
                wrong.append(f"{name}, {kind}: {far:.1e}")
    return wrong


def _bytes(rank: int, world: int) -> list[tuple[str, int, int, int]]:
    """In packs of few long documents: bytes that a rank sends and gets for a layer's states, forward; those of the rank with the most, as
    `explain` says; and with a state for each segment alone."""
    usual, found = Passing._others, []
    for name in ("mamba2", "mamba", "qwen3_5_text", "minimax", "recurrent_gemma"):
        counted: list[int] = []

        def others(self: Any, decay: torch.Tensor, state: torch.Tensor, backward: bool) -> Any:
            talk, exchange = self._talk, self._talk.exchange

            class Counting:
                def exchange(self, got: Any, sent: Any, arriving: list[int], leaving: list[int]) -> None:
                    counted.append(sum(arriving) + sum(leaving))
                    exchange(got, sent, arriving, leaving)

            self._talk = Counting()
            try:
                return usual(self, decay, state, backward)
            finally:
                self._talk = talk

        model = hybrids.build(name)
        cp = ContextParallel(model, recurrent="states", layout="contiguous", ring=world, ulysses=1, timeout=60)
        Passing._others = others  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                model(**models.batch([5] * 8 + [110] + [5] * 8))
        finally:
            Passing._others = usual  # type: ignore[method-assign]
        (layer,) = {type(one): one for one in model.modules() if mixer_of(one)}.values()
        forward, form = cp.last, form_of(layer)
        assert forward is not None and form is not None
        few = by_states(form.counts(layer), forward.every_segment).bytes
        found.append((name, counted[0], forward.passed[type(layer).__name__][2].bytes, few))
        cp.close()
    return found


def _refused(rank: int, world: int) -> dict[str, str]:
    from transformers.models.mamba2 import modeling_mamba2 as module

    said: dict[str, str] = {}

    def refuse(name: str, model: Any, **options: Any) -> None:
        try:
            ContextParallel(model, timeout=60, **options).close()
            said[name] = "not refused"
        except (Disagreement, InvalidArgument, Unsupported) as error:
            said[name] = str(error)

    refuse("word", hybrids.build("mamba2"), recurrent="state")
    refuse("number", hybrids.build("mamba2"), recurrent=1)
    refuse("none of them", models.build("llama"), recurrent="states")
    refuse("none, heads", models.build("llama"), recurrent="heads")
    refuse("differs", hybrids.build("mamba2"), recurrent="heads" if rank else "states")
    refuse("stripes", hybrids.build("qwen3_5_text"), recurrent="states", layout="striped")
    for name, here in (("hooks", True), ("hooks of one rank", rank == 1)):
        model = hybrids.build("mamba2")
        if here:
            model.backbone.layers[0].mixer.in_proj._hf_hook = None  # as accelerate marks it; the last layer has none
        refuse(name, model, recurrent="states" if name == "hooks" else "auto")
    refuse("hooks of one rank, heads", model, recurrent="heads")
    usual = module.__dict__.pop("mamba2_chunk_scan")
    try:
        refuse("another version", hybrids.build("mamba2"), recurrent="states")
    finally:
        module.mamba2_chunk_scan = usual
    return said


class Recurrent(unittest.TestCase):
    def _run(self, job: Any, worlds: tuple[int, ...], names: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save({(name, tuple(of)): _alone(name, of) for name in names for of in PACKS}, file)
            for world in worlds:
                for wrong in processes.run(job, world, list(names), file, seconds=500):
                    self.assertEqual(wrong, [], f"{world} processes")

    def test_results_of_one_process(self) -> None:
        self._run(_right, (2, 4) if processes.LONG else (4,), hybrids.MODELS)

    def test_checkpointing_and_tiles(self) -> None:
        self._run(_checkpointed, (3,), ("qwen3_next", "jamba", "mamba2", "recurrent_gemma"))

    def test_ddp_and_fsdp(self) -> None:
        self._run(_wrapped, (4,), ("qwen3_5_text", "nemotron_h", "jamba", "lfm2"))

    def test_frozen_weights(self) -> None:
        self._run(_frozen, (4,), ("qwen3_5_text", "mamba2", "minimax"))

    def test_other_kernels_and_types(self) -> None:
        self._run(_kinds, (2,), ("qwen3_5_text", "nemotron_h"))

    def test_a_kernel_for_several_sequences(self) -> None:
        self._run(_kernel_of_fla, (3,), ("qwen3_5_text",))

    def test_documents_are_apart(self) -> None:
        for wrong in processes.run(_apart, 3, seconds=500):
            self.assertEqual(wrong, [])

    def test_rows_are_those_of_the_rank(self) -> None:
        """With 2 heads of keys and 4 ranks, two ranks get the whole document for a head each, or each rank a quarter of it."""
        every = processes.run(_counted, 4, seconds=200)
        for length in (80, 160):
            for kind, rows in (
                ("states", [length // 4] * 4),
                ("heads", [1, 1, length, length]),
                ("auto", [length // 4] * 4),
            ):
                self.assertEqual(sorted(found[kind, length] for found, _ in every), rows, kind)
        for _, said in every:
            self.assertEqual(said, every[0][1])
            self.assertIn("explain needs a forward pass", said[0])
            self.assertIn("Qwen3_5GatedDeltaNet: layers pass states; the rank with the most", said[1])
            self.assertIn("Qwen3_5GatedDeltaNet: layers get whole documents", said[3])
            self.assertEqual(said[5], said[1])

    def test_refusals(self) -> None:
        for said in processes.run(_refused, 2, seconds=200):
            self.assertIn("recurrent is 'state', 'auto', 'states'", said["word"])
            self.assertIn("recurrent is 1, ", said["number"])
            self.assertIn("recurrent is 'states', and LlamaForCausalLM has no recurrent layer", said["none of them"])
            self.assertIn("recurrent is 'heads', and LlamaForCausalLM has no recurrent layer", said["none, heads"])
            self.assertIn("recurrent", said["differs"])
            self.assertIn("layout is 'striped'", said["stripes"])
            self.assertIn("Mamba2Mixer.in_proj has a hook of accelerate", said["hooks"])
            self.assertIn("list of layers that can pass states", said["hooks of one rank"])
            self.assertEqual(said["hooks of one rank, heads"], "not refused")
            self.assertIn("has no function mamba2_chunk_scan", said["another version"])

    def test_bytes_of_states(self) -> None:
        """On a device with the crate's kernels, and in packs of few long documents, a state goes to each rank with a later segment."""
        every = processes.run(_bytes, 4, seconds=200)
        for ranks in zip(*every, strict=True):
            name, _, most, few = ranks[0]
            self.assertEqual(max(counted for _, counted, _, _ in ranks), most, name)
            self.assertGreater(most, few, name)

    def test_the_choice(self) -> None:
        """States where heads leave ranks without work or cost more bytes; heads where each rank gets whole documents anyway."""

        def states(lengths: list[int], heads: int, world: int, layout: str = "contiguous") -> bool:
            ends = [0, *accumulate(lengths)]
            tokens = torch.arange(ends[-1])
            shares = (
                tokens.tensor_split(world)
                if layout == "contiguous"
                else [tokens[one::world].contiguous() for one in range(world)]
            )
            every = [segments_of(one, ends) for one in shares]
            wide, chunk = 128, 64
            token = heads * (5 * chunk * wide + 3 * wide * wide)
            more = heads * (2 * chunk * wide + 4 * wide * wide)
            cost = Cost(heads, 6 * heads * wide, 2 * heads * wide * wide, token, more)
            return by_states(cost, every).total < by_heads(cost, lengths, world, 2).total

        self.assertTrue(states([1 << 16], 16, 64))  # more ranks than heads
        self.assertTrue(states([1 << 16], 16, 8))  # a state is less than the tokens
        self.assertFalse(states([1 << 8], 16, 8))  # and more than these
        self.assertFalse(states([1 << 12], 16, 8, "striped"))


class Segments(unittest.TestCase):
    def test_runs_of_tokens(self) -> None:
        tokens = torch.tensor([0, 1, 2, 3, 8, 9, 4, 5, 12])
        self.assertEqual(
            segments_of(tokens, (0, 3, 3, 10, 13)),
            [
                Segment(0, 0, 3, 0, True, True),
                Segment(2, 0, 1, 3, True, False),
                Segment(2, 5, 7, 4, False, True),
                Segment(2, 1, 3, 6, False, False),
                Segment(3, 2, 3, 8, False, True),
            ],
        )
        self.assertEqual(segments_of(tokens[:0], (0, 3)), [])


if __name__ == "__main__":
    unittest.main()
