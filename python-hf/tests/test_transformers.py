# SPDX-License-Identifier: MIT OR Apache-2.0
"""Language models of Transformers on several processes: the losses and gradients of one process."""

from __future__ import annotations

import copy
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Disagreement, InvalidArgument, Unsupported
from cpattn_hf.transformers import ContextParallel

transformers.utils.logging.set_verbosity_error()
PACK = [23, 1, 17, 9, 40]
MESHES = {1: [(1, 1)], 3: [(3, 1)], 4: [(1, 4), (2, 2)], 6: [(3, 2)]} | ({8: [(4, 2)]} if processes.LONG else {})


LAYOUTS = ("auto", "zigzag_pack", "zigzag")


def summed(model: Any, group: Any = None) -> torch.Tensor:
    total = models.gradients(model)
    dist.all_reduce(total, group=group)
    return total


def _right(rank: int, world: int, file: str) -> list[str]:
    """Every model on every mesh of this world. Returns the errors."""
    references, wrong = torch.load(file), []
    for ulysses, ring in MESHES[world]:
        for number, name in enumerate(models.MODELS):
            model = models.build(name)
            tile = 8 if number % 3 == 1 else 0
            cp = ContextParallel(
                model, gradients="sum", ulysses=ulysses, ring=ring, layout=LAYOUTS[number % 3], tile=tile
            )
            kind = number % 3
            if kind:
                models.checkpointing(model, kind == 2)
            if kind == 2:
                model.get_input_embeddings().register_forward_hook(
                    lambda *given: given[-1].requires_grad_() if given[-1].is_leaf else None
                )
            loss = model(**models.batch(PACK)).loss
            loss.backward()
            expected, gradients = references[name]
            error, distance = abs(loss.item() - expected) / expected, models.apart(summed(model), gradients)
            if not (error <= 1e-6 and distance <= 1e-5):
                wrong.append(f"{name} on {ulysses} x {ring}: loss {error:.1e}, gradients {distance:.1e}")
            cp.close()
    return wrong


class Models(unittest.TestCase):
    def test_losses_and_gradients_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save({name: models.alone(name, models.batch(PACK)) for name in models.MODELS}, file)
            for world in MESHES:
                with self.subTest(world=world):
                    for wrong in processes.run(_right, world, file, seconds=200):
                        self.assertEqual(wrong, [])


def _trainer(rank: int, world: int, replicas: int, sft: bool, losses: list[float] | None = None) -> list[float]:
    """Losses of six steps of two packs each, with checkpointing; of the parameters after them, the norm."""
    import trl
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    # As torchrun does.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}

    kind, config = (trl.SFTTrainer, trl.SFTConfig) if sft else (Trainer, TrainingArguments)
    model = models.build("gemma3")
    draw = torch.Generator().manual_seed(3)
    documents = [torch.randint(3, models.WORDS, (5 + n % 13,), generator=draw).tolist() for n in range(96)]
    if world > 1:
        kind = ContextParallel(model, replicas=replicas).trainer(kind)
    data = [{"input_ids": document} for document in documents]
    more: dict[str, Any] = {
        "data_collator": DataCollatorWithFlattening(),
        "train_dataset": data,
        "eval_dataset": data[: 10 if replicas == 1 else 8],
    }
    extra: dict[str, Any] = {}
    if sft:
        import datasets

        more = {"train_dataset": datasets.Dataset.from_list(data), "processing_class": models.tokenizer()}
        extra = {"packing": True, "max_length": 40, "loss_type": "nll"}
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            folder, use_cpu=True, max_steps=6, gradient_accumulation_steps=2 if world > 1 or replicas == 1 else 2 * replicas,
            per_device_train_batch_size=4 if not sft else 1,
            per_device_eval_batch_size=4 if world > 1 or replicas == 1 else 4 * replicas, gradient_checkpointing=True, logging_steps=1, logging_nan_inf_filter=False, report_to=[], disable_tqdm=True,
            save_strategy="no", seed=5, bf16=False, fp16=False, lr_scheduler_type="constant",
            # AdamW divides gradients by their size, and so does clipping: neither would see gradients that are too large on all ranks,
            # and AdamW makes a rounding error of a gradient near 0 into one of a whole step (2.6e-6 of the loss, learning rate 1e-2).
            optim="sgd", learning_rate=0.1, max_grad_norm=0.0, include_num_input_tokens_seen="all", **extra,
        )  # fmt: skip
        trainer = kind(model=model, args=args, **more)
        trainer.train()
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append(trainer.state.num_input_tokens_seen)
        if not sft:
            found.append(trainer.evaluate()["eval_loss"])
            trainer.data_collator = lambda rows: dict.fromkeys(
                ("input_ids", "labels"), torch.tensor([row["input_ids"][:5] for row in rows])
            )
            # Rows of several documents, in a last batch that is smaller: each document is counted once.
            predictions = trainer.predict(data[: 10 if replicas == 1 else 12])
            assert len(predictions.predictions) == len(predictions.label_ids) == (10 if replicas == 1 else 12)
            found += [predictions.metrics["test_loss"], *map(float, abs(predictions.predictions).sum((1, 2)))]
            trainer.data_collator = lambda rows: {"input_ids": torch.tensor([row["input_ids"][:5] for row in rows])}
            unlabelled = trainer.predict(data[: 10 if replicas == 1 else 12]).predictions
            assert unlabelled.shape == predictions.predictions.shape
            found += map(float, abs(unlabelled).sum((1, 2)))
    return found


class Trainers(unittest.TestCase):
    def check(self, world: int, replicas: int, sft: bool) -> None:
        one = processes.run(_trainer, 1, replicas, sft, seconds=200)[0]
        for several in processes.run(_trainer, world, replicas, sft, seconds=200):
            self.assertEqual(len(several), len(one))
            for a, b in zip(several, one, strict=True):
                self.assertLessEqual(abs(a - b) / b, 5e-7, (several, one))

    def test_trainer(self) -> None:
        self.check(3, 1, False)

    def test_trainer_with_replicas(self) -> None:
        self.check(4, 2, False)

    def test_sft_trainer_with_packing(self) -> None:
        self.check(3, 1, True)


def _wrapped(rank: int, world: int, file: str) -> dict[str, float]:
    """Relative distances of the gradients to those of one process, by case."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    packs, found = [models.batch(PACK), models.batch([5, 31, 2], seed=4)], {}
    references = torch.load(file)

    def compare(name: str, model: Any, expected: torch.Tensor) -> None:
        found[name] = models.apart(models.gradients(model), expected)

    model = models.build("gpt-oss")
    ContextParallel(model)
    wrapped = DistributedDataParallel(model)
    wrapped(**packs[0]).loss.backward()
    compare("DDP", model, references[0])

    def sharded(**options: Any) -> Any:
        """With a head that each tile calls for; ranks have 13 or 12 tokens of the second pack, which would be 4 or 3 tiles of 4."""
        model = models.build("gpt-oss")
        cp = ContextParallel(model, tile=4, **options)
        for part in (*model.model.layers, model.lm_head, model):
            fully_shard(part)
        return model, cp

    model, cp = sharded()
    if torch.torch_version.TorchVersion(torch.__version__) < "2.11":
        try:
            model(**packs[1])
        except Unsupported as error:
            assert "use PyTorch 2.11 or later" in str(error), error
        else:
            raise AssertionError("tiles with a head of FSDP2's were not refused")
    else:
        model(**packs[1]).loss.backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.full_tensor()
        found["FSDP2, tiles"] = models.apart(models.gradients(model), references[1])
        cp.close()
        # Replicas with other numbers of tiles.
        model, cp = sharded(replicas=world)
        model(**packs[cp.replica % 2]).loss.backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.full_tensor()
        found["FSDP2, tiles, replicas"] = models.apart(
            models.gradients(model), sum(references[one % 2] for one in range(world)) / world
        )
    cp.close()

    model = models.build("gpt-oss")
    cp = ContextParallel(model, gradients="sum", tile=6)
    models.checkpointing(model, False)
    with torch.autograd.graph.save_on_cpu():
        losses = [model(**pack).loss for pack in packs]
    (losses[0] + losses[1]).backward()
    found["two in flight, offloaded, tiles"] = models.apart(summed(model), references[0] + references[1])
    cp.close()

    model = models.build("gpt-oss")
    cp = ContextParallel(model, gradients="sum")
    usual = [pack for pack in cp.loader(packs if rank == 0 else [])]
    model(**usual[1]).loss.backward()
    found["loader"] = models.apart(summed(model), references[1])
    with torch.no_grad():
        logits = cp.gather(model(**packs[1]).logits)
        with cp.off():
            alone = torch.cat([model(input_ids=ids).logits[0] for ids, _ in models.documents(packs[1])])
            model.eval().generate(packs[1]["input_ids"][:, :5], max_new_tokens=3)
    found["logits"] = models.apart(logits[0], alone)
    compiled = torch.compile(model.train(), backend="eager")
    model.zero_grad()
    compiled(**packs[1]).loss.backward()
    found["compiled"] = models.apart(summed(model), references[1])
    cp.close()

    model = models.build("llama")
    cp = ContextParallel(model, gradients="sum")
    model(**models.rows(packs[1])).loss.backward()
    found["padding"] = models.apart(summed(model), models.alone("llama", packs[1])[1])
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**packs[1]).loss
    loss.backward()
    found["autocast, thousandths"] = abs(loss.item() / models.alone("llama", packs[1])[0] - 1) / 1000  # it is in bf16
    return found


def _masked(rank: int, world: int) -> dict[str, float]:
    """Relative errors of losses and gradients of models of masked words, by case."""
    found = {}
    for name in models.MASKED:
        # Packs, from 0 and from the model's own first position, and rows with padding, of a collator's random words.
        model, pack = models.build(name), models.batch(PACK)
        first = 2 if name == "roberta" else 0
        if first:
            pack["input_ids"][0, 30] = 1  # the id of the padding, of which RoBERTa counts no position
        expected = models.part(model, pack, True) / models.count(pack, True)
        expected.backward()
        gradients = models.gradients(model)
        ends = torch.cat([(pack["position_ids"][0] == 0).nonzero().flatten(), torch.tensor([90])])
        cases = {
            "rows": models.rows(pack, pad=first // 2),
            "ends": {"input_ids": pack["input_ids"], "labels": pack["labels"], "cu_seqlens": ends},
        }
        if not first:
            cases["pack"] = pack
        for tile, (case, inputs) in enumerate(cases.items()):
            model.zero_grad()
            cp = ContextParallel(model, gradients="sum", tile=8 * (tile % 2))
            loss = model(**inputs).loss
            loss.backward()
            found[f"{name}, {case}: loss"] = abs(loss.item() / expected.item() - 1)
            found[f"{name}, {case}: gradients"] = models.apart(summed(model), gradients)
            cp.close()
        if first:
            cp = ContextParallel(model)
            plain = models.batch(PACK)
            losses = [
                model(**{**plain, "position_ids": plain["position_ids"] + more}).loss.item() for more in (0, first)
            ]
            cp.close()
            expected = models.part(model, plain, True) / models.count(plain, True)
            found["roberta, both firsts"] = max(abs(loss / expected.item() - 1) for loss in losses)
    small = models.build("roberta")
    small.roberta.embeddings.position_embeddings.weight.data.mul_(1e-3)
    cp = ContextParallel(small.bfloat16())
    found["roberta, small positions in bf16"] = abs(cp._found.first - 2.0)
    cp.close()
    for size in (
        0,
        2,
        46,
        200,
    ):  # a token alone, its neighbours, more than half of a document of 40 tokens, more than a document
        model, pack = models.build("modernbert", local_attention=size), models.batch(PACK)
        expected = models.part(model, pack, True) / models.count(pack, True)
        cp = ContextParallel(model)
        found[f"modernbert, window {size}"] = abs(model(**pack).loss.item() / expected.item() - 1)
        cp.close()
    return found


def _said() -> tuple[dict[str, str], Any]:
    """Messages of errors by name, and the function that calls what should raise them."""
    said: dict[str, str] = {}

    def refuse(name: str, kind: type[Exception], call: Any) -> None:
        try:
            call()
            said[name] = "not refused"
        except kind as error:
            said[name] = str(error)

    return said, refuse


def _refused(rank: int, world: int) -> dict[str, str]:
    """What models of masked words and other encoders refuse, on all ranks."""
    from transformers import (
        AutoModelForSequenceClassification,
        BartConfig,
        BartForConditionalGeneration,
        BertForMaskedLM,
        BertModel,
        ElectraForPreTraining,
    )
    from transformers import ElectraConfig, ModernBertForMaskedLM
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.models.modernbert import modeling_modernbert

    said, refuse = _said()
    model = models.build("roberta", max_position_embeddings=80)
    cp = ContextParallel(model)
    pack, long = models.batch(PACK), models.batch([79, 11])
    for name, kind, given in (
        ("label", InvalidArgument, {**pack, "labels": torch.full_like(pack["labels"], 96)}),
        ("types", InvalidArgument, {**pack, "token_type_ids": torch.full_like(pack["labels"], 2)}),
        ("shifted", Unsupported, {**pack, "shift_labels": pack["labels"]}),
        ("first", InvalidArgument, {**pack, "position_ids": pack["position_ids"] + 1}),
        ("left", InvalidArgument, {**models.rows(pack, pad=1), "position_ids": torch.arange(max(PACK))[None]}),
        ("long", InvalidArgument, long),
    ):
        refuse(name, kind, lambda: model(**given))
    assert model(**models.batch([78, 12])).loss.isfinite()
    cp.close()
    pooling = AutoModelForSequenceClassification.from_config(models.build("modernbert").config)
    refuse("pooling", Unsupported, lambda: ContextParallel(pooling))
    small = {
        "vocab_size": models.WORDS,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    bert = BertForMaskedLM(transformers.BertConfig(**small, attention_probs_dropout_prob=0.0))
    cp = ContextParallel(bert)
    left = {"input_ids": torch.ones(1, 514, dtype=torch.int64), "attention_mask": (torch.arange(514) > 9).long()[None]}
    refuse("padding", InvalidArgument, lambda: bert(**left))
    refuse("negative", InvalidArgument, lambda: bert(**{**pack, "position_ids": pack["position_ids"] - 1}))
    cp.close()
    both = BartConfig(
        vocab_size=models.WORDS,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    )
    for name, model in (
        ("base", BertModel(bert.config)), ("replaced", ElectraForPreTraining(ElectraConfig(**small))), ("decoder", BartForConditionalGeneration(both)),
    ):  # fmt: skip
        refuse(name, Unsupported, lambda: ContextParallel(model))
    contrary = models.build("modernbert")
    contrary.model.layers[1].attn.is_causal = True
    refuse("causal", Unsupported, lambda: ContextParallel(contrary))

    def either(**given: Any) -> Any:
        return create_bidirectional_mask(**given, or_mask_function=lambda batch, head, q, k: q == k)

    modeling_modernbert.create_bidirectional_mask = either
    refuse("mask", Unsupported, lambda: ContextParallel(models.build("modernbert")))
    modeling_modernbert.create_bidirectional_mask = create_bidirectional_mask
    model = models.build("modernbert", sparse_prediction=True)
    assert isinstance(model, ModernBertForMaskedLM)
    cp = ContextParallel(model)
    refuse("sparse", Unsupported, lambda: model(**pack))
    cp.close()
    return said


def _refusals(rank: int, world: int) -> dict[str, str]:
    said, refuse = _said()
    pack, mine = models.batch(PACK), rank == 1
    model = models.build("llama")
    cp = ContextParallel(model)
    # Arguments that no rank takes, or that only rank 1 is given.
    many = torch.full_like(pack["input_ids"], 5000)
    for name, kind, more in (
        ("mask", Unsupported, {"attention_mask": torch.ones(1, 1, 90, 90)}),
        ("embeds", Unsupported, {"input_ids": None, "inputs_embeds": torch.ones(3, 36)}),
        ("dict", Unsupported, {"return_dict": False}),
        ("keep", Unsupported, {"logits_to_keep": 3}),
        ("attentions", Unsupported, {"output_attentions": True}),
        ("words", InvalidArgument, {"input_ids": many}),
        ("label", InvalidArgument, {"labels": many}),
        ("float", InvalidArgument, {"input_ids": many.float()}),
        ("positions", InvalidArgument, {"position_ids": [0, 1]}),
        ("shifted", InvalidArgument, {"labels": None, "shift_labels": many[:, 1:]}),
        ("fraction", InvalidArgument, {"cu_seqlens": [0, 22.5, 90]}),
        ("items", InvalidArgument, {"num_items_in_batch": "all"}),
        ("no weights", InvalidArgument, {"loss_weights": torch.zeros(1, 90)}),
        ("cache", Unsupported, {"cache": transformers.DynamicCache()}),
        ("keys", Unsupported, {"past_key_values": transformers.DynamicCache()}),
        ("inside", Unsupported, {"more": {"images": many}}),
    ):
        refuse(name, kind, lambda: model(**{**pack, **more}))
    for name, job in (
        ("logprobs", lambda: cp.logprobs(None)), ("count", lambda: cp.count(None)), ("trainer", lambda: cp.trainer(None)),
        ("rows", lambda: (model(**pack), cp.gather(None))),
    ):  # fmt: skip
        refuse(name, InvalidArgument, job)
    try:
        next(cp.loader(None))
    except (TypeError, InvalidArgument) as error:
        said["loader"] = str(error)
    for name, kind, more in (
        ("one", Unsupported, {"past_key_values": ()}),
        ("list", InvalidArgument, {"labels": pack["labels"].tolist()}),
    ):
        refuse(name, kind if mine else InvalidArgument, lambda: model(**pack | (more if mine else {})))
    refuse("other", Disagreement, lambda: model(**models.batch(PACK, seed=1 + (rank == 2))))
    refuse("divisor", Disagreement, lambda: model(**pack, num_items_in_batch=85 + (rank == 2)))
    refuse(
        "hole",
        Unsupported,
        lambda: model(input_ids=torch.ones(1, 3, dtype=torch.int64), attention_mask=torch.tensor([[1, 0, 1]])),
    )
    refuse("twice", InvalidArgument, lambda: ContextParallel(model))
    refuse("copy", Unsupported, lambda: copy.deepcopy(model))
    assert model(**pack).loss.isfinite()  # and it still works
    # One rank fails inside a forward pass and goes on with the next: the other ranks notice it, and none waits for long.
    fails = model.lm_head.register_forward_hook(lambda *_: 1 // 0) if mine else None
    refuse("failed", ZeroDivisionError if mine else Disagreement, lambda: model(**pack))
    if fails:
        fails.remove()
        refuse("begins", Disagreement, lambda: model(**pack))
    with cp.off(), cp.off():
        pass
    with torch.inference_mode():
        assert model(**{**pack, "labels": pack["labels"].int()}).loss.isfinite()
    model.loss_function, usual = (lambda **_: None), model.loss_function
    refuse("loss", Unsupported, lambda: model(**pack))
    model.loss_function = usual

    def train(model: Any, cp: ContextParallel = cp) -> None:
        from transformers import Trainer, TrainingArguments

        with tempfile.TemporaryDirectory() as folder:
            cp.trainer(Trainer)(model=model, args=TrainingArguments(folder, use_cpu=True), train_dataset=[])

    refuse("another model", InvalidArgument, lambda: train(models.build("llama")))
    cp.close()
    assert not model._forward_hooks and not model._forward_pre_hooks
    again = ContextParallel(model, gradients="sum")
    refuse("sum in a trainer", InvalidArgument, lambda: train(model, again))
    cp.close()  # once more, which leaves the other one alone
    assert model(**pack).loss.isfinite()
    again.close()
    # Of ContextParallel itself: no rank waits for one that refuses, or that was told otherwise.
    refuse("dropout", InvalidArgument, lambda: ContextParallel(models.build("llama"), dropout=0.1 if mine else "rank"))
    for name, value in (("tile", 5), ("gradients", "sum"), ("replicas", 3), ("ulysses", 3)):
        refuse(
            f"other {name}",
            Disagreement,
            lambda: ContextParallel(models.build("llama"), **({name: value} if mine else {})),
        )
    refuse("other model", Disagreement, lambda: ContextParallel(models.build("gemma3" if mine else "llama")))
    refuse("replicas", InvalidArgument, lambda: ContextParallel(models.build("llama"), replicas=2))
    refuse("gradients", InvalidArgument, lambda: ContextParallel(models.build("llama"), gradients="max"))
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    config = OpenAIGPTConfig(vocab_size=96, n_embd=32, n_layer=2, n_head=4)
    refuse("openai-gpt", Unsupported, lambda: ContextParallel(OpenAIGPTLMHeadModel(config)))
    return said


class Others(unittest.TestCase):
    def test_wrapped_models(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save(
                [models.alone("gpt-oss", p)[1] for p in (models.batch(PACK), models.batch([5, 31, 2], seed=4))], file
            )
            for found in processes.run(_wrapped, 3, file):
                self.assertLessEqual(max(found.values()), 1e-5, found)

    def test_refusals(self) -> None:
        for rank, said in enumerate(processes.run(_refusals, 3)):
            self.assertNotIn("not refused", said.values(), said)
            for name in ("other", "divisor"):
                self.assertIn("ranks [2]", said[name])
            for name, word in (
                ("one", "past_key_values"),
                ("list", "labels is a list"),
                ("dropout", "dropout is 0.1, 'rank'"),
            ):
                self.assertIn(word if rank == 1 else "ranks [1] of this group refused", said[name])
            for name, word in (
                ("mask", "attention_mask"), ("hole", "runs"), ("embeds", "inputs_embeds"), ("dict", "return_dict"),
                ("keep", "cp.off()"), ("attentions", "output_attentions"), ("words", "input_ids has numbers from 5000 to 5000, numbers from 0 to 95"),
                ("label", "labels has numbers"), ("float", "input_ids.dtype is torch.float32"), ("positions", "position_ids is a list"),
                ("shifted", "shift_labels has the shape (1, 89), (1, 90)"), ("fraction", "cu_seqlens is [0, 22.5, 90]"),
                ("items", "num_items_in_batch is 'all'"), ("cache", "cache is given, a cache, which is not supported, not even an empty one"),
                ("keys", "past_key_values is given, a cache"), ("no weights", "loss_weights of the tokens with a label sum up to 0"),
                ("logprobs", "inputs is None"), ("count", "batch is None"), ("trainer", "the trainer is None"), ("rows", "rows is None"), ("loader", "'NoneType' object is not iterable"), ("inside", "the model was given more, which is not supported"), ("other tile", "tile is"), ("other gradients", "gradients is"), ("other ulysses", "options is"),
            ):  # fmt: skip
                self.assertIn(word, said[name])

    def test_masked_words(self) -> None:
        for found in processes.run(_masked, 4):
            self.assertLessEqual(max(found.values()), 1e-5, found)

    def test_refusals_of_encoders(self) -> None:
        for said in processes.run(_refused, 2):
            for name, word in (
                ("label", "labels has numbers from 96 to 96, numbers from 0 to 95"), ("types", "token_type_ids has numbers from 2 to 2"),
                ("shifted", "give labels"), ("first", "position_ids of documents begin with [1], 0 in all documents or 2 in all"),
                ("left", "leave position_ids out"), ("padding", "or put padding at the right"), ("negative", "position_ids has numbers from -1 to 38, numbers from 0 to 511"),
                ("base", "Take the class with a head for words"), ("replaced", "(1, 7), (1, 7, ...) is needed"), ("decoder", "an encoder and a decoder"),
                ("long", "79 tokens, RobertaForMaskedLM has 78 positions"),
                ("pooling", "models that pool tokens"), ("causal", "set is_causal of the layers to False"), ("mask", "either.<locals>.<lambda>"),
                ("sparse", "sparse_prediction = False"),
            ):  # fmt: skip
                self.assertIn(word, said[name])

    def test_several_tables_of_embeddings(self) -> None:
        from cpattn_hf.transformers.probe import probe
        from transformers.models.musicgen.modeling_musicgen import MusicgenDecoderConfig, MusicgenForCausalLM

        config = MusicgenDecoderConfig(
            vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, num_codebooks=1
        )
        mixers: Any = None  # refused before they are used
        with self.assertRaisesRegex(Unsupported, "MusicgenForCausalLM embeds tokens with a ModuleList"):
            probe(MusicgenForCausalLM(config), frozenset(), mixers)


if __name__ == "__main__":
    unittest.main()
