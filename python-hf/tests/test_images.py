# SPDX-License-Identifier: MIT OR Apache-2.0
"""Batches with images and videos: nine models of images and texts have the loss, the logits and the gradients of one process, those of vision tower and
projector among them, with the tower on all ranks and with each image on one rank. Documents and ranks end inside of images."""

from __future__ import annotations

import os
import tempfile
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import images
import models
import processes
from cpattn import Disagreement, Error, InvalidArgument, Unsupported
from cpattn.torch.agree import content
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.images import Rows, _alone
from cpattn_hf.transformers.towers import Features, images_of_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers.utils.generic import ModelOutput

transformers.utils.logging.set_verbosity_error()
STRIPED = {"ring": 3, "layout": "striped", "layout_parameter": 1}
# By name: the model, with "videos" for documents with videos too, whether the documents are rows with padding, and options.
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "qwen2.5-vl": ("qwen2_5_vl videos", False, {"vision": "shard", **STRIPED}),
    "qwen3-vl, rows, tiles": ("qwen3_vl videos", True, {"tile": 5}),
    "qwen3-vl, videos, shards": ("qwen3_vl videos", False, {"vision": "shard"}),
    "qwen3-vl, shards": ("qwen3_vl", False, {"vision": "shard", **STRIPED}),
    "qwen3.5": ("qwen3_5", False, {}),
    "gemma3, rows": ("gemma3", True, {"vision": "shard"}),
    "gemma3": ("gemma3", False, STRIPED),
    "gemma4, rows": ("gemma4", True, STRIPED),
    "gemma4": ("gemma4", False, {"vision": "shard", "tile": 5}),
    "paligemma": ("paligemma", False, {"vision": "shard"}),
    "llama4": ("llama4", True, {"vision": "shard", **STRIPED}),
    "mistral3": ("mistral3", False, {"vision": "shard"}),
    "internvl": ("internvl", True, {}),
}
if transformers.__version__.startswith("5.24."):  # whose Llama 4 reads `image_outputs` of a result that has none
    del CASES["llama4"], images.MODELS["llama4"]
LITTLE: dict[str, Any] = {"every": [[0, 1]], "grids": [(2, 2)]}  # an image and a word: fewer tokens than ranks
TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant", "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "remove_unused_columns": False,
}  # fmt: skip


def batch(each: list[dict[str, torch.Tensor]], rows: bool) -> dict[str, torch.Tensor]:
    return images.padded(each) if rows else {**images.packed(each), "cu_seqlens": images.ends(each)}


def alone(model: Any, each: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    model.zero_grad()
    loss, logits = images.one_by_one(model, each)
    loss.backward()
    return {"loss": loss.detach(), "logits": torch.cat(logits), "gradients": models.gradients(model)}


def cut(model: Any) -> dict[str, Any]:
    """Gemma 3 with documents that end inside of images: one process embeds all, and runs the documents one by one."""
    pack, ends = images.packed(images.documents("gemma3", 2)), [0, 5, 16, 25, 42]
    model.zero_grad()
    inner, total, logits = model.model, torch.zeros(()), []
    features = inner.get_image_features(pack["pixel_values"], return_dict=True).pooler_output
    embeddings = inner.get_input_embeddings()(pack["input_ids"])
    embeddings = embeddings.masked_scatter((pack["input_ids"] == images.IMAGE)[..., None], features)
    labels = pack["labels"].clone()
    labels[:, ends[:-1]] = -100
    for a, b in zip(ends, ends[1:]):
        logits.append(model(inputs_embeds=embeddings[:, a:b], token_type_ids=pack["token_type_ids"][:, a:b]).logits[0])
        total = total + F.cross_entropy(logits[-1][:-1], labels[0, a + 1 : b], ignore_index=-100, reduction="sum")
    loss = total / (labels != -100).sum()
    loss.backward()
    return {
        "loss": loss.detach(),
        "logits": torch.cat(logits).detach(),
        "gradients": models.gradients(model),
        "embeddings": embeddings.detach(),
        "ends": torch.tensor(ends),
    }


def documents(name: str) -> list[dict[str, torch.Tensor]]:
    model, _, videos = name.partition(" ")
    return images.with_videos(model, images.documents(model)) if videos else images.documents(model)


def references() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in images.MODELS:
        model = images.build(name)
        made |= {
            case: alone(model, documents(case))
            for case in {case for case, *_ in CASES.values() if case.split()[0] == name} | {name}
        }
        if name == "gemma3":
            made["cut"] = cut(model)
        if name == "qwen3_vl":
            made["little"] = alone(model, images.documents(name, **LITTLE))
            made["trained"] = torch.cat([(p - 0.1 * g).flatten() for p, g in zip(model.parameters(), _step(model))])
            made["types"] = model.model.get_rope_index(**_index(images.documents(name)))[0]
    return made


def _index(each: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    rows = images.padded(each)
    return {name: rows[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")}


def _step(model: Any) -> list[torch.Tensor]:
    alone(model, images.documents("qwen3_vl")[:2])
    return [p.grad.clone() for p in model.parameters()]


def differs(
    cp: Any, out: Any, expected: dict[str, Any], rows: torch.Tensor | None = None, summed: bool = True
) -> list[str]:
    """What is not as in one process."""
    found = {"loss": out.loss.detach()}
    if out.logits is not None:
        whole = cp.gather(out.logits)
        found["logits"] = whole[0] if rows is None else whole[rows.bool()]
    found["gradients"] = models.gradients(cp.model)
    if summed:
        dist.all_reduce(found["gradients"])
    distances = {name: models.apart(one.double(), expected[name].double()) for name, one in found.items()}
    return [f"{name}: {far:.1e}" for name, far in distances.items() if not far < 1e-5]


def _right(rank: int, world: int, file: str) -> list[str]:
    expected, wrong, model, last = torch.load(file), list[str](), None, ""
    for case, (name, rows, options) in CASES.items():
        if name.split()[0] != last:
            last = name.split()[0]
            model = images.build(last)
        model.zero_grad()
        cp = ContextParallel(model, gradients="sum", **options)
        given = batch(documents(name), rows)
        out = model(**given)
        out.loss.backward()
        wrong += [f"{case}: {one}" for one in differs(cp, out, expected[name], given.get("attention_mask"))]
        if name == "gemma3" and not rows:
            wrong += _embedded(cp, expected["cut"])
        cp.close()
        if case == "qwen3-vl, shards":
            wrong += [f"qwen3-vl: {one}" for one in _qwen(model, expected)]
            last = ""  # it was trained
    return wrong + _fully_sharded(expected["qwen3_vl"])


def _fully_sharded(expected: dict[str, Any]) -> list[str]:
    """FSDP2, whose ranks gather the tower's parameters together, also those without an image."""
    model = images.build("qwen3_vl")
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks, model.model.visual, model):
        fully_shard(layer)
    cp = ContextParallel(model, vision="shard")
    out = model(**batch(images.documents("qwen3_vl"), False))
    out.loss.backward()
    found = torch.cat([p.grad.full_tensor().flatten().double() for p in model.parameters()])
    cp.close()
    far = models.apart(found, expected["gradients"])
    return [f"FSDP2: {far}"] * (not far < 1e-5)


def _embedded(cp: Any, expected: dict[str, Any]) -> list[str]:
    """Documents that end inside of images, with the images themselves and with embeddings in their place."""
    pack = {**images.packed(images.documents("gemma3", 2)), "cu_seqlens": expected["ends"]}
    cp.model.zero_grad()
    out = cp.model(**pack)
    out.loss.backward()
    wrong = [f"images that documents cut: {one}" for one in differs(cp, out, expected)]
    embeddings = {name: pack[name] for name in ("labels", "token_type_ids", "cu_seqlens")} | {
        "inputs_embeds": expected["embeddings"]
    }
    with torch.no_grad():
        out = cp.model(**embeddings)
    return wrong + [
        f"embeddings: {name}"
        for name in ("loss", "logits")
        if models.apart(out[name] if name == "loss" else cp.gather(out[name])[0], expected[name]) > 1e-5
    ]


def _qwen(model: Any, expected: dict[str, Any]) -> list[str]:
    each, wrong = images.documents("qwen3_vl"), list[str]()
    rows, pack = images.padded(each), images.packed(each)
    # DDP averages over the ranks, and needs a gradient of each parameter on each of them.
    model.zero_grad()
    models.checkpointing(model, reentrant=False)
    cp = ContextParallel(model, vision="shard")
    ddp = DistributedDataParallel(model)
    out = ddp(**batch(each, False))
    out.loss.backward()
    wrong += [f"DDP: {one}" for one in differs(cp, out, expected["qwen3_vl"], summed=False)]
    model.gradient_checkpointing_disable()
    wrong += _scored(cp, batch(each, False), expected["qwen3_vl"])
    # Positions of three rows and of four, as the caller computes them.
    three = expected["types"]
    text = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    row = torch.cat([three[:, at, mask.bool()] for at, mask in enumerate(rows["attention_mask"])], 1)[:, None]
    for name, given in (
        ("3 rows", rows | {"position_ids": three}), ("4 rows", pack | {"position_ids": torch.cat([images.positions(each)[None], row])}),
        ("4 rows with padding", rows | {"position_ids": torch.cat([text[None], three])}),
    ):  # fmt: skip
        with torch.no_grad():
            far = abs(float(model(**given).loss - expected["qwen3_vl"]["loss"]))
        wrong += [f"positions of {name}: {far}"] * (far > 1e-5)
    wrong += [f"{name}: {one}" for name, one in _agree(cp, each, rank=dist.get_rank())]
    wrong += _drawn(model, batch(each, False))
    with cp.off(), torch.no_grad():
        far = abs(float(model(**each[0]).loss - images.one_by_one(model, each[:1])[0]))
        wrong += [f"off: {far}"] * (far > 1e-5)
    cp.close()
    cp = ContextParallel(model, gradients="sum")
    wrong += _drawn(model, batch(each, False), same=True)
    cp.close()
    cp = ContextParallel(model, gradients="sum", vision="shard")
    little = batch(images.documents("qwen3_vl", **LITTLE), False)
    model.zero_grad()
    out = model(**little)
    out.loss.backward()
    wrong += [f"fewer tokens than ranks: {one}" for one in differs(cp, out, expected["little"])]
    cp.close()
    return wrong + _trained(model, expected["trained"])


def _scored(cp: Any, given: dict[str, torch.Tensor], expected: dict[str, Any]) -> list[str]:
    """Log-probabilities of labels, from the model that DDP wrapped before."""
    with torch.no_grad():
        scores = cp.logprobs(given).log_probs
    labels = given["labels"].clone()
    labels[0, given["cu_seqlens"][:-1]] = -100
    far = abs(float(-scores.sum() / (labels != -100).sum() - expected["loss"]))
    return [f"logprobs: {far}"] * (not far < 1e-5)


def _drawn(model: Any, given: dict[str, torch.Tensor], same: bool = False) -> list[str]:
    """What the tower draws, on every rank the same if it runs on all; what the text model draws, never; and the generators afterwards."""
    drawn: list[torch.Tensor] = []

    def draws(module: Any, args: Any) -> None:
        drawn.append(torch.rand(1))

    hooks = [
        module.register_forward_pre_hook(draws) for module in (model.model.visual, model.model.language_model.layers[0])
    ]
    torch.manual_seed(3)
    with torch.no_grad():
        model(**given)
    for hook in hooks:
        hook.remove()
    drawn.append(torch.rand(1))
    every = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.cat(drawn))
    tower, text, after = (len(set(one.tolist())) for one in torch.stack(every, 1))
    wrong = {"tower": same and tower != 1, "text model": text == 1, "afterwards": after != 1}
    return [f"draws of {name}: {every}" for name, one in wrong.items() if one]


def _agree(cp: Any, each: list[dict[str, torch.Tensor]], rank: int) -> list[tuple[str, str]]:
    """Refusals, on all ranks, and that a batch of texts and the next one with images are right all the same."""
    said, model, pack = list[tuple[str, str]](), cp.model, batch(each, False)

    def refuse(name: str, kind: type[Error], part: str, job: Callable[[], Any]) -> None:
        try:
            job()
            said.append((name, "not refused"))
        except Error as error:
            if not isinstance(error, kind) or part not in str(error):
                said.append((name, repr(error)))

    texts = {name: value for name, value in pack.items() if name not in ("pixel_values", "image_grid_thw")}
    where = "pixel_values is given on the ranks [0, 2] of this group, and not on [1]"
    refuse(
        "some ranks",
        Disagreement,
        where,
        lambda: model(**(texts | {"image_grid_thw": pack["image_grid_thw"]} if rank == 1 else pack)),
    )
    refuse(
        "other pixels",
        Disagreement,
        "same batch",
        lambda: model(**pack | {"pixel_values": pack["pixel_values"] + (rank == 2)}),
    )
    refuse(
        "other grids",
        Disagreement,
        "same batch",
        lambda: model(**pack | {"image_grid_thw": pack["image_grid_thw"].flip(0 if rank else 1)}),
    )
    refuse("other numbers", Disagreement, "same batch", lambda: model(**pack | {"second_per_grid_ts": [1.0 + rank]}))
    refuse(
        "videos on some",
        Disagreement,
        "pixel_values_videos is given on the ranks [1] of this group",
        lambda: model(**pack | ({"pixel_values_videos": pack["pixel_values"]} if rank == 1 else {})),
    )
    refuse(
        "patches",
        InvalidArgument,
        "has 72 patches, and pixel_values has 71",
        lambda: model(**pack | {"pixel_values": pack["pixel_values"][1:]}),
    )
    refuse(
        "ends inside",
        InvalidArgument,
        "no document ends inside of an image",
        lambda: model(**pack | {"cu_seqlens": images.ends(each) + torch.tensor([0, -18, 0, 0, 0])}),
    )
    refuse("both", InvalidArgument, "both given", lambda: model(**texts, inputs_embeds=torch.ones(1, 3, 36)))
    refuse(
        "2 rows",
        InvalidArgument,
        "position_ids has the shape (2, 1, 48)",
        lambda: model(**pack | {"position_ids": torch.zeros(2, 1, 48, dtype=torch.int64)}),
    )
    refuse(
        "classes",
        Unsupported,
        "vision is 'shard', and LlamaForCausalLM has no method",
        lambda: ContextParallel(models.build("llama"), vision="shard"),
    )
    refuse(
        "vision",
        InvalidArgument,
        "vision is 'some', 'all'",
        lambda: ContextParallel(models.build("llama"), vision="some"),
    )
    with torch.no_grad():
        words = model(**{name: value for name, value in each[1].items() if name in images.TOKENS}).loss
        with cp.off():
            far = abs(float(words - images.one_by_one(model, each[1:2])[0]))
    return said + [("texts", str(far))] * (far > 1e-5)


def _trained(model: Any, expected: torch.Tensor) -> list[str]:
    """A step and an evaluation of a Trainer, with the batches of rank 0 on all ranks."""
    from transformers import Trainer, TrainingArguments

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    model.zero_grad()
    each = images.documents("qwen3_vl")[:2]
    with tempfile.TemporaryDirectory() as folder:
        cp = ContextParallel(model)
        args = TrainingArguments(folder, seed=1, **TRAINING)
        trainer = cp.trainer(Trainer, send_batches=True)(
            model=model, args=args, train_dataset=each, eval_dataset=each, data_collator=images.padded
        )
        trainer.train()
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        found_logits = trainer.predict(each).predictions
        # Transformers 5.20 adds the model's rope_deltas.
        logits = torch.from_numpy(found_logits[0] if isinstance(found_logits, tuple) else found_logits)
        cp.close()
    with torch.no_grad():
        rows = images.padded(each)["attention_mask"].bool()
        far = models.apart(logits[rows], torch.cat(images.one_by_one(model, each)[1]))
    return [f"trainer: {models.apart(found, expected)}"] * (not models.apart(found, expected) < 1e-6) + [
        f"predictions: {far}"
    ] * (not far < 1e-5)


@dataclass
class Needed(ModelOutput):
    """As timm's towers have it: the first field has no default."""

    last_hidden_state: Any
    pooler_output: Any = None


class Parts(unittest.TestCase):
    def test_images_are_dealt_by_patches(self) -> None:
        self.assertEqual(images_of_ranks([4, 16, 6, 10], 2), [[0, 1], [2, 3]])
        self.assertEqual(images_of_ranks([1], 3), [[0], [], []])
        self.assertEqual(sorted(sum(images_of_ranks([5, 5, 5, 5, 1], 3), [])), [0, 1, 2, 3, 4])

    def test_rows_of_what_a_text_model_is_given(self) -> None:
        # Two rows of four, one token of padding; this rank has the tokens at the places 1, 4 and 6.
        pack = SimpleNamespace(shape=(2, 4), kept=torch.tensor([0, 1, 2, 3, 4, 5, 6]))
        marks = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]]).bool()
        rows = Rows(
            SimpleNamespace(pack=pack, tokens=torch.tensor([1, 4, 6])),
            {"attention_mask": torch.ones(2, 4).bool(), "visual_pos_masks": marks},
            "Some",
        )
        every = torch.arange(8).view(2, 4)
        self.assertEqual(rows.of("inputs_embeds", every[..., None]).tolist(), [[[1], [4], [6]]])
        self.assertEqual(
            rows.of("position_ids", torch.stack([every, every + 10])).tolist(), [[[1, 4, 6]], [[11, 14, 16]]]
        )
        self.assertEqual(rows.of("position_ids", every[:1]).tolist(), [[1, 0, 2]])
        self.assertEqual(rows.of("visual_pos_masks", marks).tolist(), [[True, False, True]])
        self.assertEqual(rows.of("deepstack", [torch.tensor([[10], [20], [30]])])[0].tolist(), [[10], [30]])
        self.assertEqual(rows.of("layers", {1: torch.tensor([[10], [20], [30]])})[1].tolist(), [[10], [30]])
        with self.assertRaisesRegex(
            Unsupported, r"Some gives its text model cross_attention_states of the shape \(5, 1\)"
        ):
            rows.of("cross_attention_states", torch.ones(5, 1))

    def test_features_of_a_class_whose_fields_are_needed(self) -> None:
        made = Features(Needed(torch.zeros(1, 3), torch.ones(2, 4)), 2).whole(
            [[torch.ones(4), torch.zeros(4), torch.ones(4)]]
        )
        self.assertEqual(
            (made.last_hidden_state, made.pooler_output.tolist()), (None, [[1.0] * 4, [0.0] * 4, [1.0] * 4])
        )

    def test_calls_for_each_document(self) -> None:
        # Three documents with 2, 0 and 1 images; the first ends with one, and the last begins with one.
        types = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
        grids = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 4, 2]])
        mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]])
        each = _alone({"mm_token_type_ids": types, "image_grid_thw": grids, "kwargs": {"more": 1}}, mask)
        self.assertEqual([one["image_grid_thw"].tolist() for one in each], [grids[:2].tolist(), [], grids[2:].tolist()])
        self.assertEqual([one["mm_token_type_ids"].tolist() for one in each], [[row] for row in types.tolist()])
        self.assertEqual([one["more"] for one in each], [1] * 3)

    def test_content_tells_tensors_apart(self) -> None:
        one = torch.arange(2_100_001, dtype=torch.float32)
        other = one.clone()
        other[[0, 2_000_000]] = other[[2_000_000, 0]]
        self.assertEqual(content({"a": [one]}), content({"a": [one.clone()]}))
        self.assertEqual(len({content(x) for x in (one, other, one[:-1], one.double(), one.bfloat16(), one[None])}), 6)


class Ranks(unittest.TestCase):
    def test_loss_logits_and_gradients_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save(references(), file)
            for wrong in processes.run(_right, 3, file, seconds=300):
                self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
