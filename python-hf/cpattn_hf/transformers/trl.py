# SPDX-License-Identifier: MIT OR Apache-2.0
"""TRL's trainers, with losses of their own: SFT, DPO, KTO, rewards, and GRPO and RLOO, which generate.

They call the model with `fused_lm_head=True` and compute their losses from numbers of all tokens (scores.py), or from the scores of rows
(pooled.py), which every rank has. So every rank computes the same loss, as one process does. What remains are the numbers that a trainer
gathers over processes, the reference model, and what ranks could draw differently: completions and rewards.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import set_seed

from cpattn.errors import InvalidArgument, Unsupported
from .attention import NAME
from .prompts import log_probabilities
from .rollouts import refuse_generators, served

if TYPE_CHECKING:
    from .parallel import ContextParallel

SFT = "trl.trainer.sft_trainer"
REWARD = "trl.trainer.reward_trainer"
GENERATING = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
MODULES = (SFT, REWARD, "trl.trainer.dpo_trainer", "trl.trainer.kto_trainer", *GENERATING)
# The method of these that computes log-probabilities in all passes.
SCORES = "_get_per_token_logps_and_entropies"


def fused() -> bool:
    """Whether this TRL computes its losses from the outputs of a fused head."""
    from trl.trainer import utils  # type: ignore[import-not-found, unused-ignore]

    return hasattr(utils, "add_fused_lm_head")


def refuse_sharing(cp: ContextParallel, kind: type[Any]) -> None:
    """Refuses `share_prompts` where prompts cannot be computed once."""
    name = type(cp.model).__name__
    if kind.compute_loss.__module__ not in GENERATING:
        raise Unsupported(
            f"share_prompts is True and the trainer is {kind.__name__}, TRL's GRPOTrainer or RLOOTrainer is needed: for other losses make packs with SharedPrefixCollator"
        )
    if (module := getattr(getattr(kind, SCORES, None), "__module__", None)) not in GENERATING:
        raise Unsupported(
            f"share_prompts is True, and {kind.__name__} has {SCORES} in {module}, that of TRL 1.16's trainer is needed, in whose place it is: leave share_prompts out"
        )
    if cp._mixers:
        raise Unsupported(
            f"share_prompts is True, and {name} has layers that mix whole documents, which would go from one completion into the next: leave share_prompts out"
        )
    if cp._images:
        raise Unsupported(
            f"share_prompts is True, and {name} has a part around its text model, which knows no shared prompts: leave share_prompts out"
        )


def trl_trainer(cp: ContextParallel, kind: type[Any], share_prompts: bool = False) -> type[Any]:
    """A subclass of one of TRL's trainers. The rest, for batches and evaluation, is in trainer.py."""
    module = kind.compute_loss.__module__
    if module not in (SFT, REWARD) and not fused():
        raise Unsupported(
            f"{kind.__name__} of this version of TRL computes log-probabilities from all logits: use TRL 1.16, which has add_fused_lm_head"
        )

    class Own(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            uses_vllm = False
            if module in GENERATING:
                args, kwargs, uses_vllm = _batches(cp, kind, args, kwargs)
            with served(cp, module) if uses_vllm else nullcontext():
                super().__init__(*args, **kwargs)
            self._share_reference()
            if module in GENERATING:
                # TRL gives each process another seed. Ranks of a replica need the same, that of the process which a replica stands for.
                set_seed(self.args.seed + cp.replica)

        def _share_reference(self) -> None:
            """The reference model gets a ContextParallel too, with the arguments of the other."""
            if getattr(self, "ref_model", None) is None:
                return
            model = self.accelerator.unwrap_model(self.ref_model)
            if getattr(model, "_cpattn", None) is None:
                if model.config._attn_implementation == NAME:  # made with the option of the trained model
                    model.set_attn_implementation(cp._usual)
                cp.like(model)

        def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
            self._share_reference()  # called by __init__
            _refuse_in_memory(inspect.signature(super()._precompute_ref_logps).bind(*args, **kwargs).arguments)
            return super()._precompute_ref_logps(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            usual = model
            if module == REWARD:  # gives the model all it gets

                def model(**arguments: Any) -> Any:
                    return usual(**{name: value for name, value in arguments.items() if name != "margin"})

            with self._replicas():
                return super().compute_loss(model, inputs, *args, **kwargs)

        @contextmanager
        def _replicas(self) -> Iterator[None]:
            """Inside of it, accelerate has as many processes as there are replicas."""
            usual = type(self.accelerator)
            if hasattr(usual, "_cpattn_replicas"):
                yield
                return

            class Replicas(usual):  # type: ignore[misc, valid-type]
                _cpattn_replicas = True
                num_processes = property(lambda self: cp.replicas)
                process_index = property(lambda self: cp.replica)

            self.accelerator.__class__ = Replicas
            try:
                yield
            finally:
                self.accelerator.__class__ = usual

        if module in GENERATING:

            def _generate(self, prompts: list[Any]) -> Any:
                """All ranks generate, each with the whole model, or get completions of a server; and take what rank 0 of the group has got."""
                with cp.off():
                    return cp.sent(super()._generate(prompts))

            def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
                # TRL gathers rewards and logs with functions of accelerate: of each replica those of its rank 0, since functions for rewards may
                # draw, or ask a server.
                trl: Any = sys.modules[module]
                usual, objects = trl.gather, trl.gather_object
                trl.gather, trl.gather_object = (
                    self.accelerator.gather,
                    lambda rows: objects(rows if cp.rank == 0 else []),
                )
                try:
                    with self._replicas():
                        return super()._generate_and_score_completions(*args, **kwargs)
                finally:
                    trl.gather, trl.gather_object = usual, objects

        if share_prompts:

            def _get_per_token_logps_and_entropies(
                self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: int | None = None, compute_entropy: bool = False,
                compute_aux_loss: bool = False, **more: Any,
            ) -> tuple[Any, Any, Any]:  # fmt: skip
                if present := sorted(name for name, value in more.items() if value is not None):
                    raise Unsupported(
                        f"share_prompts is True, and the batch has {', '.join(present)}, which is not supported together: leave share_prompts out"
                    )
                parts = []
                for ids, mask in zip(
                    input_ids.split(batch_size or len(input_ids)),
                    attention_mask.split(batch_size or len(input_ids)),
                    strict=True,
                ):
                    with self.accelerator.autocast():
                        parts.append(
                            log_probabilities(model, ids, mask, logits_to_keep, compute_entropy, compute_aux_loss)
                        )
                logps, entropies, losses = zip(*parts, strict=True)
                return (
                    torch.cat(logps),
                    torch.cat(entropies) if compute_entropy else None,
                    torch.stack(losses).mean() if compute_aux_loss else None,
                )

    Own.__name__, Own.__module__ = kind.__name__, kind.__module__
    return Own


def _refuse_in_memory(arguments: dict[str, Any]) -> None:
    """One process writes the log-probabilities of a reference into a file beside those of the data set, where the others look for them."""
    from datasets import is_caching_enabled  # type: ignore[import-not-found, import-untyped, unused-ignore]

    dataset: Any = arguments.get("dataset")
    if hasattr(dataset, "cache_files") and not (is_caching_enabled() and dataset.cache_files):
        raise Unsupported(
            f"precompute_ref_log_probs is True, and the data set {arguments.get('name')!r} is in memory: each process would look for the results in a folder of its "
            "own. Use dataset.save_to_disk(folder) and datasets.load_from_disk(folder), in a folder that all processes see"
        )


def _batches(
    cp: ContextParallel, kind: type[Any], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments of a trainer that generates, with batches for replicas instead of processes; and whether a server generates."""
    bound = inspect.signature(kind.__init__).bind(None, *args, **kwargs)
    if (config := bound.arguments.get("args")) is None:
        raise InvalidArgument(f"args is needed: the {kind.__name__.replace('Trainer', 'Config')} of the trainer")
    refuse_generators(config, bound.arguments)
    config = copy.copy(config)
    config.generation_batch_size //= cp.ranks
    for batch, number in (
        ("generation_batch_size", "num_generations"),
        ("per_device_eval_batch_size", "num_generations_eval"),
    ):
        size, parts = getattr(config, batch), getattr(config, number, None) or config.num_generations
        size *= cp.replicas if batch != "generation_batch_size" else 1
        if size % parts and (batch == "generation_batch_size" or config.eval_strategy != "no"):
            raise InvalidArgument(
                f"a batch of {cp.replicas} replicas has {size} prompts ({batch}; ranks of a replica have the same ones), which {parts} ({number}) does not divide"
            )
    bound.arguments["args"] = config
    return bound.args[1:], bound.kwargs, bool(getattr(config, "use_vllm", False))
