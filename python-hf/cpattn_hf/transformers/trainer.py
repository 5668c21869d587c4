# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trainer and TRL's trainers: all ranks of a group get the same batches, and the loss is counted once for each replica."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from cpattn.errors import InvalidArgument, Unsupported
from .evaluate import Preprocess, gathered
from .trl import MODULES, SFT, fused, refuse_sharing, trl_trainer

if TYPE_CHECKING:
    from .parallel import ContextParallel


# Options of TrainingArguments, with the values that give the results of one process.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "neftune_noise_alpha": (None, 0),  # the size of the noise depends on the number of tokens of the model
    "eval_use_gather_object": (None, False),  # each rank of a replica would contribute an object
}


def _reentrant(model: torch.nn.Module, args: Any) -> bool:
    """Whether layers are computed again by reentrant checkpointing, as the arguments of a trainer say or the model itself."""
    for name in (
        "activation_checkpointing",
        "gradient_checkpointing",
    ):  # the same, under its newer name and its older one
        if vars(args).get(name):
            # Without the argument, Trainer's checkpointing is not reentrant.
            return bool((vars(args).get(f"{name}_kwargs") or {}).get("use_reentrant"))
    functions = (
        getattr(module, "_gradient_checkpointing_func", None)
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
    )
    return any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions)


def _changes(loss: torch.Tensor) -> int | None:
    """How often a loss was changed in place. PyTorch does not count it for inference tensors."""
    return None if loss.is_inference() else loss._version


# The modules whose trainers are known.
KNOWN = ("transformers.trainer", *MODULES)


def trainer(cp: ContextParallel, kind: type[Any], send_batches: bool = False, share_prompts: bool = False) -> type[Any]:
    if not isinstance(kind, type) or not issubclass(kind, Trainer):
        raise InvalidArgument(f"the trainer is {kind!r}, a subclass of transformers.Trainer is needed")
    mine = kind.compute_loss.__module__
    # A subclass of Trainer with a compute_loss around Trainer's, which is looked at in each step.
    around = mine not in KNOWN and [
        one.__module__ for one in kind.__mro__ if "compute_loss" in vars(one) and one.__module__ in KNOWN
    ] == ["transformers.trainer"]
    if mine not in KNOWN and not around:
        raise Unsupported(
            f"{kind.__name__} computes its loss in {mine}, the loss of Trainer, with or without a compute_loss around it, or of TRL's SFT, DPO, KTO, reward, GRPO or RLOO "
            "trainer is needed"
        )
    # SFTTrainer without a fused head computes its metrics from all logits: then the loss is the model's.
    own = mine in MODULES and (mine != SFT or fused())
    options = OPTIONS if own else {**OPTIONS, "loss_type": (None, "nll", "chunked_nll")}
    usual_kind = kind
    if share_prompts:
        refuse_sharing(cp, kind)
    if own:
        kind = trl_trainer(cp, kind, share_prompts)

    # A prediction step that a subclass has written gets the logits of all tokens from compute_loss.
    usual_step = kind.prediction_step.__module__ in KNOWN

    def of_trainer(self: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> tuple[Any, Any]:
        loss, out = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
        if (
            self.args.average_tokens_across_devices
            and self.model_accepts_loss_kwargs
            and num_items_in_batch is not None
        ):
            loss = loss / cp.ranks  # Trainer multiplied by the number of processes, not of replicas
        return loss, out

    class Inner(Trainer):
        """Trainer's loss, where super().compute_loss of a subclass finds it: after it and before Trainer."""

        computed: list[tuple[Any, int | None]]

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, out = of_trainer(self, model, inputs, num_items_in_batch)
            self.computed.append((loss, _changes(loss)))
            return (loss, out) if return_outputs else loss

    bases = (kind, Inner) if around else (kind,)

    class ContextParallelTrainer(*bases):  # type: ignore[misc]
        computed: list[tuple[Any, int | None]]  # the losses of Inner in a call, and their versions

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if cp._peers.ranks:
                raise Unsupported(
                    f"the model is split over the ranks {list(cp._peers.ranks)} by tensor parallelism, and cp.trainer has one part of the batch for each process or "
                    "replica: write the loop yourself (loss.backward(), optimizer.step()), which docs/parallelism.md shows"
                )
            super().__init__(*args, **kwargs)
            self._refuse_parallelism()
            if callable(self.compute_loss_func) or self.label_smoother is not None:
                raise Unsupported(
                    "compute_loss_func and label smoothing are not supported: the loss is the model's own"
                )
            for option, supported in options.items():
                if (given := getattr(self.args, option, None)) not in supported:
                    needed = " or ".join(map(repr, supported))
                    raise Unsupported(f"{option} is {given!r}, which is not supported: {needed} is needed")
            if cp.model not in self.model.modules() or cp.model._cpattn is not cp:
                raise InvalidArgument(
                    f"the trainer's model, a {type(self.model).__name__}, is not the model of this ContextParallel, or ContextParallel is "
                    "closed: give the trainer the model of an open one, without model_init"
                )
            if self.args.world_size != cp.ranks * cp.replicas:
                raise InvalidArgument(
                    f"the trainer has {self.args.world_size} processes, {cp.replicas * cp.ranks} are needed: ContextParallel has {cp.replicas} "
                    f"replicas of {cp.ranks} ranks"
                )
            self._refuse_sums()

        def _refuse_sums(self) -> None:
            if (given := cp._alike["gradients"]) != "mean":
                raise InvalidArgument(
                    f"gradients is {given!r}, and a trainer takes the mean over all processes (DDP, FSDP, DeepSpeed): 'mean' is needed"
                )
            plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
            if plugin is not None and (given := plugin.deepspeed_config.get("gradient_allreduce_op", "mean")) != "mean":
                raise Unsupported(
                    f"gradient_allreduce_op of DeepSpeed's config is {given!r}, which is not supported in a trainer: leave it out"
                )

        def _refuse_parallelism(self) -> None:
            """Trainer itself would split batches over the same ranks, and multiply the loss. Its context parallelism is this one (`accelerated`)."""
            config = getattr(self.accelerator, "parallelism_config", None)
            for name in ("sp_size", "tp_size"):
                if (size := getattr(config, name, None) or 1) > 1:
                    raise Unsupported(
                        f"{name} of accelerate's ParallelismConfig is {size}, which is not supported together with ContextParallel: leave it out"
                    )
            if (size := getattr(config, "cp_size", None) or 1) > 1 and size != cp.ranks:
                raise InvalidArgument(
                    f"cp_size of accelerate's ParallelismConfig is {size}, and ContextParallel has {cp.replicas} groups of {cp.ranks} ranks: give it "
                    "mesh=config.get_device_mesh(device type), or leave cp_size out"
                )

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self._same_batches()
            self._count_once()
            self.accelerator._prepare_cp = lambda *args: args

        def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
            """With cp_size, Trainer would cut batches here, for accelerate's own context parallelism."""
            return nullcontext, inputs

        def _build_accelerator_args(self, **more: Any) -> Any:
            """DDP marks a parameter ready twice with find_unused_parameters and reentrant checkpointing. Trainer chooses both together for
            a model of PEFT, not for its own models."""
            if _reentrant(cp.model, self.args):
                if self.args.ddp_find_unused_parameters:
                    raise Unsupported(
                        "ddp_find_unused_parameters is True and checkpointing is reentrant, which DDP does not support together: set it to False, or "
                        "use_reentrant to False"
                    )
                self.args.ddp_find_unused_parameters = False
            return super()._build_accelerator_args(**more)

        def _same_batches(self) -> None:
            """Makes accelerate distribute batches to replicas, not to processes."""
            from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped, unused-ignore]

            accelerator = self.accelerator

            def prepare(loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
                if getattr(loader, "_is_accelerate_prepared", False):
                    return loader
                prepared = prepare_data_loader(
                    loader,
                    accelerator.device,
                    num_processes=cp.replicas,
                    process_index=cp.replica,
                    split_batches=accelerator.split_batches,
                    put_on_device=True,
                    rng_types=list(accelerator.rng_types or []),
                    dispatch_batches=False,
                    even_batches=accelerator.even_batches,
                    use_seedable_sampler=accelerator.use_seedable_sampler,
                    data_seed=accelerator.dataloader_config.data_seed,
                )
                accelerator._dataloaders.append(prepared)
                return prepared

            accelerator.prepare_data_loader = prepare

        def _count_once(self) -> None:
            """Makes accelerate gather one value per replica, not per process: ranks of a replica have the same value."""
            from accelerate.utils import recursively_apply  # type: ignore[import-untyped, unused-ignore]

            usual = self.accelerator.gather

            def once(whole: torch.Tensor) -> torch.Tensor:
                return torch.cat(whole.chunk(cp.replicas * cp.ranks)[:: cp.ranks])

            self.accelerator.gather = lambda given: recursively_apply(once, usual(given))

        def get_cp_size(self) -> int:
            """Trainer divides the number of processes by it to count samples."""
            return cp.ranks

        def floating_point_ops(self, inputs: Any) -> Any:
            """Trainer adds it up over the processes."""
            return super().floating_point_ops(inputs) / cp.ranks

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            """Where groups change size and have no room for all documents of a batch at once: one pass after another, of which the last one
            synchronizes gradients."""
            usual = super().training_step
            if cp.sizes is None or not cp.sizes.tokens or own:
                return usual(model, inputs, num_items_in_batch)
            if len(passes := cp.passes(inputs)) < 2:
                return usual(model, inputs, num_items_in_batch)
            state, total = self.accelerator.gradient_state, 0.0
            synchronizes = state.sync_gradients
            for at, one in enumerate(passes):
                last = at == len(passes) - 1
                state._set_sync_gradients(synchronizes and last)
                with nullcontext() if last or not synchronizes else self.accelerator.no_sync(model=model):
                    total = total + usual(model, one, num_items_in_batch)
            return total

        def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
            if not self.model_accepts_loss_kwargs or not all(
                "labels" in batch or "shift_labels" in batch for batch in batch_samples
            ):
                return None
            count = torch.tensor(sum(cp.count(batch) for batch in batch_samples), device=device)
            if self.args.average_tokens_across_devices and cp.replicas > 1:
                count = self.accelerator.gather(count).sum()
            return count

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if own or around:
                self.computed = []
                found: Any = super().compute_loss(
                    model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
                )
                loss, out = found if return_outputs else (found, {})
                computed, self.computed = self.computed, []  # which would keep the graph of the loss
                if around and not (len(computed) == 1 and loss is computed[0][0] and _changes(loss) == computed[0][1]):
                    changed = len(computed) == 1 and loss is computed[0][0]
                    did = (
                        "changed its loss in place"
                        if changed
                        else "returned another loss"
                        if computed
                        else "returned its own loss"
                    )
                    raise Unsupported(
                        f"{usual_kind.__name__}.compute_loss of {mine} called super().compute_loss {len(computed)} times and {did}; one call is needed, whose loss it "
                        "returns as it is: what a rank computes beside it is of its own tokens. For log-probabilities of all tokens: cp.logprobs"
                    )
            else:
                loss, out = of_trainer(self, model, inputs, num_items_in_batch)
            if not return_outputs:
                return loss
            if out.get("logits") is not None and not self._own_logits:
                out["logits"] = gathered(cp, out["logits"])
            return loss, out

        # Batches of rank 0 of each group, on all its ranks.

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            samples, count = super().get_batch_samples(*args, **kwargs)
            return (self._sent(samples), self._sent(count)) if send_batches else (samples, count)

        def _sent(self, given: Any) -> Any:
            from accelerate.utils import send_to_device  # type: ignore[import-untyped, unused-ignore]

            return send_to_device(cp.sent(send_to_device(given, "cpu")), self.args.device)

        # Evaluation: logits are gathered only where they are read, if possible after preprocess_logits_for_metrics.

        _own_logits = False  # whether compute_loss gives the logits of this rank's tokens
        _preprocess: Preprocess | None = None
        preprocess_logits_for_metrics: Any

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            usual = self.preprocess_logits_for_metrics
            if usual_step and usual is not None:
                self._preprocess, self.preprocess_logits_for_metrics = Preprocess(cp, usual), None
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                self._preprocess, self.preprocess_logits_for_metrics = None, usual

        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
        ) -> tuple[Any, Any, Any]:
            if send_batches:
                inputs = self._sent(inputs)
            self._own_logits = usual_step
            try:
                loss, logits, labels = super().prediction_step(
                    model, inputs, prediction_loss_only, ignore_keys=ignore_keys
                )
            finally:
                self._own_logits = False
            # Without labels Trainer calls the model itself, not compute_loss.
            if logits is not None and (usual_step or loss is None):
                logits = self._preprocess(logits, labels) if self._preprocess else gathered(cp, logits)
            return loss, logits, labels

    ContextParallelTrainer.__name__ = f"ContextParallel{usual_kind.__name__}"
    return ContextParallelTrainer
