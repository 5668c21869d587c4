# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a user calls of a `ContextParallel` beside the model: results of all tokens, batches of one rank for all, trainers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpattn import Event
from cpattn.arguments import flag, instance, whole
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.options import PlanOptions
from cpattn.plan import Plan
from cpattn.torch.group import DTYPES, compare, digest, refusing
from cpattn.torch.group import Collectives
from .groups import PassNames, lengths_of
from .inputs import checked, documents, items_of, refuse_loss, shifts
from .loss_trial import PLACES
from .mtp import Heads, MultiToken
from .pack import TAKEN
from .scores import LogProbs, Reader, Scores, spread
from .timeline import line

if TYPE_CHECKING:
    from cpattn.torch import Context, GlooTransport
    from .forward import Forward
    from .groups import GroupSizes
    from .pooled import Kept
    from .probe import Found


BATCH = "a mapping is needed, with input_ids and labels"


class Calls:
    def __init__(self, model: Any, **_: Any) -> None: ...

    model: Any
    config: Any
    rank: int
    factor: float
    last: Forward | None
    _found: Found
    _kept: Kept | None
    _asked: Reader | None
    _others: list[Any]
    _alike: dict[str, Any]
    _all: tuple[int, ...]
    _everyone: Collectives | None
    _collectives: Collectives | None
    _number: int
    _ahead: MultiToken | None
    _hooks: list[Any]
    _options: dict[str, Any]
    _contexts: dict[torch.dtype, Context]
    sizes: GroupSizes | None
    _recorded = 0  # the capacity of `record`, 0 before it

    def _talk(self) -> Collectives:
        if self._collectives is None:
            raise InvalidArgument("this ContextParallel is closed: make another one")
        return self._collectives

    def _keep_hidden(self) -> None:
        raise NotImplementedError

    _restore = _again = _keep_hidden

    @property
    def transport(self) -> GlooTransport:
        raise NotImplementedError

    def _most(self, number: int) -> int:
        """The largest of the numbers of all ranks, of all replicas, which all call this."""
        if self._everyone is None:
            self._everyone = Collectives(self._all, float(self._alike["timeout"]))
        numbers = torch.zeros(len(self._all), dtype=torch.int64)
        numbers[self._number] = number
        self._everyone.sum(numbers)
        return int(numbers.max())

    def gather(self, rows: Tensor, fill: float = 0) -> Tensor:
        """From rows of this rank's tokens of the last forward pass, `[1, tokens, ...]`, such as its logits, to `[rows, tokens, ...]` in
        the order of input_ids, on all ranks; `fill` at padding. Not differentiable. All ranks call it."""
        collectives = self._talk()
        if self.last is None:
            raise InvalidArgument("gather needs a forward pass, and there was none: call the model first")
        forward, rows = self.last, instance("rows", rows, Tensor).detach()
        mine = len(forward.own)
        if rows.ndim < 2 or rows.shape[:2] != (1, mine):
            raise InvalidArgument(f"rows has the shape {tuple(rows.shape)}, (1, {mine}, ...) is needed")
        return spread(forward.whole, forward.own, rows[0], fill, collectives)

    def logprobs(
        self, inputs: Mapping[str, Any], *, model: Any = None, temperature: float = 1.0, entropy: bool = False
    ) -> Scores:
        """The log-probabilities of the labels of a batch (`inputs`, with `labels`), and the entropies, of all tokens on all ranks:
        `log_probs` and `entropy`, `[rows, tokens]` in the order of input_ids, each at the place of the token that predicts the label, 0
        where there is none. Logits are divided by the `temperature` and exist for `tile` tokens at a time (1024 if it is 0). `model` is
        what wraps the model, such as DDP. Differentiable: every rank computes the loss of the whole batch from them, as one process does,
        divided by nothing that has to do with ranks; each rank's gradients are then its part, as those of the model's own loss.
        All ranks call it."""
        self._talk()
        with refusing(self.transport):
            instance("inputs", inputs, Mapping, BATCH)
            reader = LogProbs(self, self.factor, temperature, flag("entropy", entropy), inputs)  # type: ignore[arg-type]
        self._keep_hidden()
        self._asked = reader
        try:
            return reader.scores_of((self.model if model is None else model)(**inputs))
        finally:
            self._asked = None

    def passes(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The batches of the passes of a step, where groups change size (`group_sizes`): the documents of a batch (`inputs`) that has more tokens than
        the ranks have room for at once, in passes of about as much work on all ranks. Call the model with each and add up the losses and gradients:
        they are those of the whole batch, divided by `num_items_in_batch`, which each batch has. Arguments that are not of tokens are in each batch
        as they are. One batch, if there is room for all, unless several cost less. Several with `output_router_logits` are refused: the router's
        loss is no sum over passes. All ranks call it with the same batch."""
        need = "all ranks of a group need the same batch"
        with refusing(self.transport):
            if (sizes := self.sizes) is None:
                raise InvalidArgument(
                    "passes needs groups that change size: make ContextParallel with group_sizes and group_tokens"
                )
            instance("inputs", inputs, Mapping, BATCH)
            if inputs.get("input_ids") is None:
                raise InvalidArgument("inputs has no input_ids, which are needed: passes are made of whole documents")
            found = checked(self.model, self.config, self._found, inputs)
            sizes.refuse(found)
            if self._found.loss == PLACES:  # each batch has shift_labels, which the model would accept
                refuse_loss(self.model, self._found, found, inputs)
            items = items_of(found, inputs)
        compare(self.transport, "inputs", digest(found.bytes() + repr(items).encode()), need)
        with refusing(self.transport):
            dealt = sizes.deal(lengths_of(found))
            routed = inputs.get("output_router_logits")
            routed = getattr(self.config, "output_router_logits", False) if routed is None else routed
            if routed and len(dealt.passes) > 1:
                raise Unsupported(
                    f"output_router_logits is set and the batch needs {len(dealt.passes)} passes, over which the router's loss is no sum: allow more "
                    f"group_tokens (now {sizes.tokens}), or set model.config.output_router_logits = False"
                )
        compare(self.transport, "passes", digest(repr(dealt.passes).encode()), need)
        others = {name: value for name, value in inputs.items() if name not in TAKEN}
        labels, count = "shift_labels" if shifts(self.model) else "labels", found.count if items is None else items
        given = inputs.get("position_ids") is not None
        return sizes.passes(found, dealt, PassNames(given, self._found.named, labels, count, others))

    def _one_size(self, what: str) -> None:
        if self.sizes is not None:
            raise Unsupported(
                f"{what} is not supported with group_sizes, which is {self.sizes.sizes}: leave group_sizes out for it"
            )

    def count(self, batch: Mapping[str, Any]) -> float:
        """The number of tokens of a batch with a label, with loss_weights the sum of their weights; of rows, if the model's head reads one token of a row."""
        if instance("batch", batch, Mapping, BATCH) and self._kept:
            return int((batch["labels"] != -100).sum())
        return documents(self.model, self._found, batch).count

    def loader(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of rank 0 of the group, on all ranks of the group. The model selects each rank's tokens."""
        collectives = self._talk()
        iterator = (
            chain.from_iterable((batches,)) if self.rank == 0 else None
        )  # which begins below, where an error is sent to all
        while True:
            message: Any = None
            if iterator is not None:
                try:
                    message = ("batch", next(iterator))
                except StopIteration:
                    message = ("end", None)
                except BaseException as error:
                    collectives.broadcast(("failed", repr(error)), 0)
                    raise
            kind, batch = collectives.broadcast(message, 0)
            if kind == "failed":
                raise InvalidArgument(f"the loader of rank 0 of this group failed: {batch}")
            if kind == "end":
                return
            yield batch

    def sent(self, batch: Any) -> Any:
        """The batch of rank 0 of the group, on all ranks of the group, which all call this with a batch of their own."""
        return self._talk().broadcast(batch if self.rank == 0 else None, 0)

    def like(self, model: Any) -> Any:
        """One for another model, such as a reference, with the arguments of this one. It is closed with this one."""
        self._talk()
        self._others.append(type(self)(model, **self._alike))
        return self._others[-1]

    def trainer(self, kind: type[Any], *, send_batches: bool = False, share_prompts: bool = False) -> type[Any]:
        """A subclass of Trainer or of one of TRL's (SFT, DPO, KTO, reward, GRPO, RLOO) that gives all ranks of a group the same batches. With `send_batches`, rank 0
        of each group sends its batches to the others, for datasets and collators that draw differently on each rank. With `share_prompts` (GRPO, RLOO), a prompt
        is computed once for all its completions in a batch of the model."""
        from .trainer import trainer

        return trainer(self, kind, flag("send_batches", send_batches), flag("share_prompts", share_prompts))  # type: ignore[arg-type]

    def explain(self) -> str:
        """The plan of the last forward pass, as `Batch.explain` has it, and for each class of recurrent layers whether they pass states or get
        whole documents, with what both would cost."""
        self._talk()
        if self.last is None:
            raise InvalidArgument("explain needs a forward pass, and there was none: call the model first")
        return self.last.explain()

    def record(self, capacity: int = 1 << 16) -> None:
        """Starts to record operations of attention, at most `capacity` of them for each dtype, for `timeline` and `trace`."""
        self._talk()
        self._one_size("record")
        capacity = whole("capacity", capacity, 1, 1 << 24)
        for context in self._contexts.values():
            context.record(capacity)
        self._recorded = capacity

    def trace(self) -> list[Event]:
        """The events that the ranks of a group recorded since the last call, on its rank 0, for `cpattn.timeline_svg` and `cpattn.chrome_trace`; on
        other ranks none. All ranks call it."""
        return list(chain.from_iterable(self._traces()))

    def _traces(self) -> list[list[Event]]:
        """By the dtype, each of which has a recorder on each rank."""
        self._talk()
        self._one_size("trace, timeline")
        return [context.trace() for context in self._contexts.values()]

    def timeline(self) -> str:
        """The events since the last call in a line, on all ranks of a group: how long attention computed and communicated, how much of that was
        hidden, bytes, and workspace. Of each the number of the rank with the most. Says so if a recorder was full. All ranks call it."""
        traces, workspace = self._traces(), 0
        if self.last is not None:
            options = {name: value for name, value in self._options.items() if name in PlanOptions.__annotations__}
            for _, kind in self._found.told:
                plan = Plan.with_tokens_of(
                    self.last.batch.plan, **{**options, "dtype": DTYPES[self.last.batch.context.dtype], **kind}
                )
                workspace = max(
                    workspace,
                    *(plan.workspace(rank, way) for rank in range(plan.world) for way in ("forward", "backward")),
                )
        return str(self.sent(line(traces, workspace, self._recorded) if self.rank == 0 else None))

    def mtp(self, heads: Heads | None) -> None:
        """Heads for tokens further on than the next one (multi-token prediction), modules of yours. In each pass of the model that trains,
        with labels, `heads(hidden, ahead)` runs after the base model: with this rank's hidden states [1, tokens, hidden size] and
        `TokensAhead`, which has ids, labels, rows and losses of tokens further on. It returns a loss of the whole batch, made of those of
        `ahead.loss`, which is added to `loss`; `mtp_loss` has it alone. Not in evaluation. None takes them out. On all ranks."""
        self._talk()
        self._one_size("mtp")
        found = None if heads is None else MultiToken(self, heads)  # type: ignore[arg-type]
        if self._hooks:  # else inside of `off`, which hooks them in at its end
            self._restore()
            self._ahead = found
            self._again()
        self._ahead = found
