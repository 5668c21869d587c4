# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ContextParallel`: a language model of Transformers whose forward pass the ranks of a group share.

A hook before `forward` selects this rank's tokens of the batch, a hook after it computes the loss. Both run inside DDP and FSDP, in an
evaluation, and under gradient checkpointing. Every rank calls the model with the same whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._check import attempt, flag, refused, whole
from ..errors import Error, InvalidArgument, Unsupported
from ..packing import over_all
from ..plan import CHOSEN, Plan, Side
from ..torch import Batch, Context, GlooTransport
from ..torch.gloo import Collectives, Members
from .adapters import Adapters
from .agree import Total, number, same, told
from .attention import NAME, Current, register
from .draws import Draws, refuse_layerdrop
from .gathered.forward import Gathers
from .hybrids.deal import Deal
from .inputs import checked, documents
from .masks import Parts, Window
from .mixers import Mixer, Mixers
from .owners import refuse_owners
from .pack import TAKEN, Pack
from .probe import probe
from .tiles import in_tiles, keeps_hidden, summed
from .views import Views


@dataclass(eq=False)
class Forward(Gathers):
    """One forward pass: its documents, and a batch for each dtype of q, k and v.

    `tokens` are the tokens of the batch that this rank's model gets. Models do not run without a token, so a rank without any gets the
    first one, without a label: it is left out of all that is exchanged, and of the results."""

    pack: Pack
    views: Views
    batch: Batch
    items: Any
    labels: Tensor | None
    weights: Tensor | None = None
    tile: Tensor | None = None
    hidden: Tensor | None = None
    outputs: Any = None
    draws: Draws | None = None
    group: Collectives | None = None
    deals: dict[int, Deal] = field(default_factory=dict)
    longest: int = field(init=False)
    tokens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.batch.tokens if len(self.batch.tokens) else self.batch.tokens.new_zeros(1)
        if self.labels is not None:
            self.labels = self.labels[self.tokens] if len(self.batch.tokens) else torch.full_like(self.labels[:1], -100)
            self.weights = None if self.weights is None else self.weights[self.tokens]
        self.longest = max(self.pack.longest, self.pack.reach)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: Window | Parts, **options: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(v.device.type) if torch.is_autocast_enabled(v.device.type) else v.dtype
        q, k, v = (self.held(x.to(dtype)) for x in (q, k, v))
        batch, (left, right) = self.views.of(dtype, window)
        return self.given(batch.attention(q, k, v, window_left=left, window_right=right, **options))

    def blocked(self, numbers: Tensor) -> bool:
        return self.views.blocked(numbers, self.tokens)

    def contrary(self, message: str) -> None:
        self.views.contrary(message)

    def held(self, x: Tensor) -> Tensor:
        """The rows of x that are tokens of this rank."""
        return x[: len(self.batch.tokens)]

    def given(self, x: Tensor) -> Tensor:
        """From rows for the tokens of this rank to rows for those that its model got."""
        return x if len(self.batch.tokens) else torch.cat([x, x.new_zeros(1, *x.shape[1:])])

    @property
    def places(self) -> Tensor:
        return self.pack.positions[self.tokens]

    @property
    def positions(self) -> Tensor:
        pack = self.pack
        return self.batch.positions if pack.slices is None else pack.positions[self.batch.tokens] - pack.first

    # For mixers.

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return self.batch.cu_seqlens

    def to_heads(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return self.views.batch(x.dtype).to_heads(self.held(x), side, **heads)

    def to_tokens(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return self.given(self.views.batch(x.dtype).to_tokens(x, side, **heads))

    def own_heads(self, side: str = "q", **heads: int) -> slice:
        return self.batch.own_heads(side, **heads)

    def deal(self, parts: int) -> Deal:
        """Who gets which heads of which documents, if a layer's heads can be cut into so many parts."""
        rank, world = self.batch.context.number, self.batch.context.world
        if (parts := min(parts, world)) not in self.deals:
            tokens = [torch.tensor(self.batch.plan.tokens(Side.Q, one), dtype=torch.int64) for one in range(world)]
            self.deals[parts] = Deal(self.cu_seqlens, tokens, rank, parts, self.group)
        return self.deals[parts]


class ContextParallel:
    """Makes `model` context-parallel, in place, over a process group (None: the default group; or a list of global ranks). All
    ranks make one, before DDP or FSDP wrap the model.

    Afterwards every rank calls `model(**batch)` with the same batch: rows with padding (`attention_mask`), or packs
    (`position_ids` that start again, or `cu_seqlens`). `loss` is the loss of the whole batch on every rank. `logits` are
    those of this rank's tokens; `gather` returns the logits of all tokens.

    `gradients` is how gradients of parameters are combined over the ranks: "mean" (DDP, FSDP) or "sum". `replicas` is the
    number of parts of the group, each with its own batches (data parallel); ranks of a replica are consecutive. `ulysses`, `ring`,
    `layout`, `layout_parameter`, `workers`, `timeout` are those of `cpattn.torch.Context`. With `tile`, logits exist for `tile` tokens
    at a time: the loss is the same, and no logits are returned. Layers of Transformers' hybrids that mix tokens outside of attention
    run on any mesh; `mixers` are functions for other classes of such layers, or instead (Ulysses over all ranks): see docs/training.md.

    Raises Unsupported for a model that would be wrong, with the reason.
    """

    def __init__(
        self,
        model: Any,
        *,
        group: Members = None,
        replicas: int = 1,
        gradients: str = "mean",
        tile: int = 0,
        timeout: float = 300.0,
        workers: int = 1,
        mixers: Mapping[type[torch.nn.Module], Mixer] | None = None,
        **options: Any,
    ) -> None:
        self.model: Any = None
        self._base: Any = None
        self._hooks: list[Any] = []
        self._contexts: dict[torch.dtype, Context] = {}
        self._collectives: Collectives | None = None
        self._options = {"timeout": timeout, "workers": workers, **options}
        transport = GlooTransport(group, timeout=timeout)
        members = transport.members
        try:
            with told(transport):
                self._try(model, len(members), replicas, gradients, tile, mixers or {})
            settings = {"replicas": replicas, "gradients": gradients, "tile": tile, "options": sorted(options.items())}
            settings["model"] = (type(model).__name__, self._found)
            for name, value in settings.items():
                need = f"{name} is {value!r} on this rank, all ranks need the same"
                same(transport, "arguments of ContextParallel", number(repr(value).encode()), need)
            self._number = transport.rank
            self.replica, self.rank = divmod(self._number, self.ranks)
            self._members = members[self.replica * self.ranks :][: self.ranks]
            self._collectives = Collectives(self._members, timeout)  # for `gather` and `loader`
            self.device = next(model.parameters()).device
            self._context(model.dtype)
        except BaseException as error:
            self._restore()
            self._leave()
            transport.release()
            if isinstance(error, ValueError | ImportError | NotImplementedError) and not isinstance(error, Error):
                raise Unsupported(f"{type(model).__name__}: {error}") from error
            raise
        transport.release()
        self._factor = float(self.ranks) if gradients == "mean" else 1.0
        self.last: Forward | None = None
        model._cpattn = self
        self._hook()

    def _try(
        self, model: Any, ranks: int, replicas: int, gradients: str, tile: int, mixers: Mapping[type[torch.nn.Module], Mixer]
    ) -> None:
        """The checks that need no other rank."""
        refuse_owners(model)
        if gradients not in ("mean", "sum"):
            raise refused("gradients", gradients, "'mean' (DDP, FSDP) or 'sum' is needed")
        self.tile, self.replicas = whole("tile", tile, 0, 2**31), whole("replicas", replicas, 1, ranks)
        if ranks % replicas:
            raise InvalidArgument(f"replicas is {replicas}, which does not divide the {ranks} ranks of the group")
        if getattr(model, "_cpattn", None) is not None:
            raise InvalidArgument("the model already has a ContextParallel: close it first")
        self.ranks, self.config = ranks // replicas, model.config.get_text_config()
        if getattr(self.config, "attention_dropout", 0):
            raise Unsupported(
                f"config.attention_dropout is {self.config.attention_dropout}, which is not supported: set it to 0 before the model is made"
            )
        refuse_layerdrop(self.config)
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._mixers, self._adapters = Mixers(model, mixers, self._options, self.ranks), Adapters(model)
        self._usual = model.config._attn_implementation
        register()
        self.model = model  # from here on `_restore` undoes the changes
        self._adapters.replace()
        model.set_attn_implementation(NAME)
        self._mixers.replace()
        self._found = probe(model, self._takes, self._mixers)
        self._base = getattr(model, model.base_model_prefix, None)
        if self.tile and (self._base is None or self._base is model):
            raise Unsupported(f"tile is {tile}: {type(model).__name__} has no base model separate from its head: leave tile out")
        # Invalid options of a plan are refused here, not with the first batch.
        how = {name: value for name, value in self._options.items() if name not in ("plans", "own_tokens", "timeout", "workers")}
        over_all(Plan([0, 1], world=self.ranks, **self._heads() | how))

    def _heads(self) -> dict[str, Any]:
        """Heads, dims and direction of the first layer, as defaults: each layer has its own."""
        kind = self._found.told[0][1]
        return {name: kind[name] for name in ("heads", "kv_heads", "head_dim", "window_right") if name in kind}

    @property
    def transport(self) -> GlooTransport:
        """That of the context for the model's dtype, over which the ranks agree."""
        return self._context(self.model.dtype).transport

    def _context(self, dtype: torch.dtype) -> Context:
        if dtype not in self._contexts:
            options = {**self._heads(), **self._options}
            if not any(options.get(name) for name in CHOSEN):
                options["layers"] = self._found.told
            self._contexts[dtype] = Context(self._members, dtype=dtype, device=self.device, **options)
            self._contexts[dtype]._collectives = self._collectives  # one group is enough
        return self._contexts[dtype]

    # Inputs

    def shard(self, inputs: Mapping[str, Any]) -> Forward:
        """This rank's part of a batch. The ranks compare their batches first. All ranks call it."""
        context = self._context(self.model.dtype)
        need = (
            "all ranks of a group need the same batch. Where each draws its own (random crops or words), cp.trainer(kind, send_batches=True), "
            "or cp.loader(batches) without a trainer, gives all of them that of rank 0"
        )
        with told(context.transport):
            found, items = checked(self.model, self.config, self._found, inputs), inputs.get("num_items_in_batch")
            if found.slices is not None and self._mixers:
                raise Unsupported("slices are given to a model with layers that mix whole documents, which know no slices: give each answer its own prompt")
            if items is not None and (items := attempt(float, given := items)) is None:
                raise refused("num_items_in_batch", given, "a number is needed")
        same(context.transport, "inputs", number(found.bytes() + repr(items).encode()), need)
        views = Views(found, lambda dtype: self._context(dtype).batch(found.cu_seqlens, slices=found.slices), self._found.blocks)
        return Forward(found, views, views.batch(self.model.dtype), items, found.labels, found.weights, group=self._talk())

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if Current.forward is not None:  # the head alone, for a tile
            return None
        if args:
            kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
        forward = self.last = Current.forward = self.shard(kwargs)
        mine = forward.tokens
        kept = {name: value for name, value in kwargs.items() if name not in TAKEN}
        kept |= {"input_ids": forward.pack.ids[mine][None], "position_ids": forward.pack.positions[mine][None]}
        if forward.pack.types is not None:
            kept[self._found.named] = forward.pack.types[mine][None]
        if "use_cache" in self._takes:
            kept["use_cache"] = False
        forward.draws = Draws(self._number, self.device)
        return (), kept | self._mixers.arguments(forward)

    # Outputs

    def _after(self, model: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if (forward := self._whole()) is None:
            return out
        logits = out.logits
        if not len(forward.batch.tokens):
            out["logits"] = logits[:, :0]
        if forward.labels is None:
            return out
        if forward.hidden is None:
            part = summed(logits[0], forward.labels, forward.weights)
        else:
            out["logits"], part = None, in_tiles(self, model, forward, kwargs)
        items = forward.items if forward.items is not None else forward.pack.count
        out["loss"] = Total.apply(part, forward.batch.context.transport, self._factor) / items  # type: ignore[no-untyped-call]
        return out

    def _ends(self, *_: Any) -> None:
        if (forward := self._whole()) is not None:
            forward.hidden = Current.forward = None
            if forward.draws is not None:
                forward.draws.end()

    @staticmethod
    def _whole() -> Forward | None:
        """The current forward pass, unless it is that of a tile."""
        forward = Current.forward
        return forward if isinstance(forward, Forward) and forward.tile is None else None

    def _hook(self) -> None:
        self._mixers.replace()
        # Not compiled: torch.compile breaks the graph at the hooks, and cannot trace them.
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._hooks = [
            self.model.register_forward_pre_hook(before, with_kwargs=True),
            self.model.register_forward_hook(after, with_kwargs=True),
            self.model.register_forward_hook(self._ends, always_call=True),
        ]
        if self.tile:
            self._base.forward = partial(keeps_hidden, self._base.forward)

    def _restore(self) -> None:
        if self.model is None:
            return  # refused before the model was changed
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._mixers.restore()
        self._adapters.restore()
        if self._base is not None and self.tile:
            vars(self._base).pop("forward", None)
        with suppress(ValueError):
            self.model.set_attn_implementation(self._usual)

    # What a user calls

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside of it, the model works as without ContextParallel, separately on each rank, for example for `generate`."""
        if not self._hooks:  # already off, or closed
            yield
            return
        self._restore()
        try:
            yield
        finally:
            if self.model._cpattn is self:
                self._adapters.replace()
                self.model.set_attn_implementation(NAME)
                self._hook()

    def gather(self, rows: Tensor, fill: float = 0) -> Tensor:
        """From rows of this rank's tokens of the last forward pass, `[1, tokens, ...]`, such as its logits, to `[rows, tokens, ...]` in
        the order of input_ids, on all ranks; `fill` at padding. Not differentiable. All ranks call it."""
        collectives = self._talk()
        if self.last is None:
            raise InvalidArgument("gather needs a forward pass, and there was none: call the model first")
        forward, rows = self.last, rows.detach()
        mine = len(forward.batch.tokens)
        if rows.ndim < 2 or rows.shape[:2] != (1, mine):
            raise InvalidArgument(f"rows has the shape {tuple(rows.shape)}, (1, {mine}, ...) is needed")
        # As bytes: each row comes from one rank, so the sum is exact in any dtype.
        every = torch.zeros((len(forward.pack.ids), *rows.shape[2:]), dtype=rows.dtype)
        every[forward.batch.tokens.cpu()] = rows[0].cpu()
        collectives.sum(every.view(-1).view(torch.uint8))
        if len(forward.pack.ids) < forward.pack.shape[0] * forward.pack.shape[1]:
            given, every = every, torch.full((forward.pack.shape[0] * forward.pack.shape[1], *rows.shape[2:]), fill, dtype=rows.dtype)
            every[forward.pack.kept.cpu()] = given
        return every.reshape(*forward.pack.shape, *rows.shape[2:]).to(rows.device)

    def _talk(self) -> Collectives:
        if self._collectives is None:
            raise InvalidArgument("this ContextParallel is closed: make another one")
        return self._collectives

    def count(self, batch: Mapping[str, Any]) -> float:
        """The number of tokens of a batch with a label; with loss_weights, the sum of their weights."""
        return documents(self.model, self._found, batch).count

    def loader(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of rank 0 of the group, on all ranks of the group. The model selects each rank's tokens."""
        iterator, collectives = iter(batches) if self.rank == 0 else None, self._talk()
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

    def trainer(self, kind: type[Any], *, send_batches: bool = False) -> type[Any]:
        """A subclass of Trainer or of TRL's SFTTrainer that gives all ranks of a group the same batches. With `send_batches`, rank 0
        of each group sends its batches to the others, for datasets and collators that draw differently on each rank."""
        from .trainer import trainer

        return trainer(self, kind, flag("send_batches", send_batches))

    def __reduce__(self) -> Any:
        raise Unsupported("a model with a ContextParallel cannot be copied or pickled: copy it before ContextParallel(model) or after close()")

    def close(self) -> None:
        """Leaves the group and restores the model's own attention."""
        if self.model._cpattn is not self:
            return
        self._restore()
        self.model._cpattn = None
        self._leave()

    def _leave(self) -> None:
        for context in self._contexts.values():
            context.close()
        if self._collectives is not None:
            self._collectives.close()
        self._collectives = None
