# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ContextParallel`: a language model of Transformers whose forward pass the ranks of a group share.

A hook before `forward` selects this rank's tokens of the batch, a hook after it computes the loss. Both run inside DDP and FSDP, in an
evaluation, and under gradient checkpointing. Every rank calls the model with the same whole batch.
"""

from __future__ import annotations

import hashlib
import inspect
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .._check import attempt, refused, whole
from .._header import UNLIMITED
from ..engine import EngineTransport
from ..errors import Disagreement, Error, InvalidArgument, Unsupported
from ..packing import over_all
from ..plan import CHOSEN, Plan, Side
from ..torch import Batch, Context, GlooTransport
from .adapters import Adapters
from .attention import NAME, Current, Window, _tensors, register
from .hybrids.deal import Deal, Talk
from .mixers import Mixer, Mixers
from .pack import TAKEN, Pack, pack, within
from .probe import probe

# The numbers that ranks exchange: REFUSED after refused arguments, odd numbers for arguments, other even numbers for parts of a loss.
# So ranks notice if one of them is at another place, because it has failed in between.
REFUSED = 2

_OWN = "each rank computes its own tokens only. For generate, use `with cp.off():`"
REFUSED_OPTIONS = {
    "output_router_logits": "the router's loss is not a sum over tokens. Set model.config.output_router_logits = False, and "
    "router_aux_loss_coef=0.0 in an SFTConfig",
    "sparse_prediction": "logits are those of all tokens. Set model.config.sparse_prediction = False; `tile` saves the same memory",
    **dict.fromkeys(("output_attentions", "output_hidden_states", "logits_to_keep"), _OWN),
}

# The losses of models, and whether the label of a token is the next one.
LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}


def _number(data: bytes) -> int:
    """An odd number that is equal for equal bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") | 1


def _same(transport: EngineTransport, what: str, mine: int, need: str) -> None:
    """Compares a number over the ranks, and raises unless it is equal on all of them."""
    said = transport.agree(0, transport.world, mine)
    if refusing := [rank for rank, number in enumerate(said) if number == REFUSED]:
        raise InvalidArgument(f"ranks {refusing} of this group refused their {what}: see the error of these ranks")
    if ending := [rank for rank, number in enumerate(said) if not number & 1]:
        raise Disagreement(f"ranks {ending} of this group end a forward pass while rank {transport.rank} begins one: did its previous one fail?", ending[0])
    if others := [rank for rank, number in enumerate(said) if number != said[0]]:
        raise Disagreement(
            f"the {what} of ranks {others} of this group differ from those of rank 0 (this is rank {transport.rank}): {need}", others[0]
        )


@contextmanager
def _told(transport: EngineTransport) -> Iterator[None]:
    """Tells the other ranks, which wait in `_same`, if this one raises."""
    try:
        yield
    except Exception:
        with suppress(Error):  # the first error is raised
            transport.agree(0, transport.world, REFUSED)
        raise


class _Total(torch.autograd.Function):
    """The sum over the ranks. Each rank gets the gradient of its own part, times a factor."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, transport: EngineTransport, factor: float) -> Tensor:
        ctx.factor = factor
        (bits,) = struct.unpack("Q", struct.pack("d", part.item()))
        said = transport.agree(0, transport.world, bits & ~1)
        if failed := [rank for rank, number in enumerate(said) if number & 1 or number == REFUSED]:
            raise Disagreement(f"ranks {failed} of this group begin a forward pass while rank {transport.rank} ends one: did their previous one fail?", failed[0])
        return torch.full_like(part, sum(struct.unpack(f"{len(said)}d", struct.pack(f"{len(said)}Q", *said))))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor, None, None


@dataclass(eq=False)
class Forward:
    """One forward pass: its documents, and a batch for each dtype of q, k and v."""

    pack: Pack
    batch_of: Callable[[torch.dtype], Batch]
    batch: Batch
    items: Any
    labels: Tensor | None
    tile: Tensor | None = None
    hidden: Tensor | None = None
    outputs: Any = None
    group: Any = None
    deals: dict[int, Deal] = field(default_factory=dict)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = self.pack.longest

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: Window, **options: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(v.device.type) if torch.is_autocast_enabled(v.device.type) else v.dtype
        return self.batch_of(dtype).attention(q.to(dtype), k.to(dtype), v.to(dtype), window_left=window[0], window_right=window[1], **options)

    @property
    def positions(self) -> Tensor:
        return self.batch.positions

    # For mixers.

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return self.batch.cu_seqlens

    def to_heads(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return self.batch_of(x.dtype).to_heads(x, side, **heads)

    def to_tokens(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return self.batch_of(x.dtype).to_tokens(x, side, **heads)

    def own_heads(self, side: str = "q", **heads: int) -> slice:
        return self.batch.own_heads(side, **heads)

    def deal(self, parts: int) -> Deal:
        """Who gets which heads of which documents, if a layer's heads can be cut into so many parts."""
        rank, world = self.batch.context.number, self.batch.context.world
        if (parts := min(parts, world)) not in self.deals:
            tokens = [torch.tensor(self.batch.plan.tokens(Side.Q, one), dtype=torch.int64) for one in range(world)]
            self.deals[parts] = Deal(self.cu_seqlens, tokens, rank, parts, Talk(self.group))
        return self.deals[parts]


class ContextParallel:
    """Makes `model` context-parallel, in place, over a process group (None: the default group). All ranks make one, before DDP
    or FSDP wrap the model.

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
        group: dist.ProcessGroup | None = None,
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
        self._options = {"timeout": timeout, "workers": workers, **options}
        transport = GlooTransport(group, timeout=timeout)
        members = dist.get_process_group_ranks(group)
        try:
            with _told(transport):
                self._try(model, len(members), replicas, gradients, tile, mixers or {})
            settings = {"replicas": replicas, "gradients": gradients, "tile": tile, "options": sorted(options.items())}
            settings["model"] = (type(model).__name__, self._found)
            for name, value in settings.items():
                need = f"{name} is {value!r} on this rank, all ranks need the same"
                _same(transport, "arguments of ContextParallel", _number(repr(value).encode()), need)
            self.replica, self.rank = divmod(transport.rank, self.ranks)
            ranks = members[self.replica * self.ranks :][: self.ranks]
            # For contexts, `gather` and `loader`. Only the members make it, so other ranks of the world may use other groups, or none.
            self.group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True)
            self.device = next(model.parameters()).device
            self._context(model.dtype)
        except BaseException as error:
            self._restore()
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
        return {name: self._found.layers[0][1][name] for name in ("heads", "kv_heads", "head_dim", "window_right")}

    def _context(self, dtype: torch.dtype) -> Context:
        if dtype not in self._contexts:
            options = {**self._heads(), **self._options}
            if not any(options.get(name) for name in CHOSEN):
                options["layers"] = self._found.layers
            self._contexts[dtype] = Context(self.group, dtype=dtype, device=self.device, **options)
        return self._contexts[dtype]

    # Inputs

    def _loss(self) -> str:
        """The name of the model's loss."""
        return str(getattr(getattr(self.model, "loss_function", None), "__name__", "ForCausalLMLoss"))

    def _documents(self, inputs: Mapping[str, Any]) -> Pack:
        return pack(inputs, self._found.first, LOSSES.get(self._loss(), True))

    def _pack(self, inputs: Mapping[str, Any]) -> Pack:
        for name, value in inputs.items():
            taken = name in TAKEN and (name != "token_type_ids" or self._found.types)
            if not taken and value is not None and _tensors(value):
                raise Unsupported(f"the model was given {name}, which is not supported: leave it out")
        if inputs.get("past_key_values") is not None:
            raise Unsupported("past_key_values is not supported: use `with cp.off():`")

        def asked(name: str) -> Any:
            return getattr(self.config, name, None) if inputs.get(name) is None else inputs[name]

        for name, reason in REFUSED_OPTIONS.items():
            if asked(name):
                raise Unsupported(f"{name} is set, which is not supported: {reason}")
        if asked("return_dict") is False:
            raise Unsupported("return_dict is False, True is needed")
        found, loss = self._documents(inputs), self._loss()
        if found.labels is not None and loss not in LOSSES:
            raise Unsupported(
                f"model.loss_function is {loss}, {' or '.join(LOSSES)} is needed: give no labels, and compute the loss of this rank's tokens "
                "from the logits"
            )
        words, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        within("input_ids", found.ids, getattr(words, "num_embeddings", None))
        if found.labels is not None:
            within("labels", found.labels[found.labels != -100], getattr(head, "out_features", None))
        if found.types is not None:
            within("token_type_ids", found.types, self._found.types)
        if found.longest > self._found.positions:
            padded = found.longest > max(b - a for a, b in pairwise(found.cu_seqlens))
            raise InvalidArgument(
                f"the longest document has {found.longest} tokens, {'counted from position 0, ' * padded}{type(self.model).__name__} has "
                f"{self._found.positions} positions: cut longer documents{', or put padding at the right' * padded}"
            )
        if self._found.positions < UNLIMITED:
            within("position_ids", found.positions, found.first + self._found.positions)
        rope = getattr(self.config, "rope_parameters", None) or {}
        usual: Any = getattr(self.config, "original_max_position_embeddings", None) or getattr(self.config, "max_position_embeddings", 0)
        for one in filter(lambda one: isinstance(one, dict), (rope, *rope.values())):
            kind, most = one.get("rope_type"), one.get("original_max_position_embeddings") or usual
            if kind in ("dynamic", "longrope") and found.longest > most:
                raise Unsupported(
                    f"rotary embeddings of the type {kind}: the longest document has {found.longest} tokens, at most {most} are supported: cut "
                    "longer documents"
                )
        return found

    def shard(self, inputs: Mapping[str, Any]) -> Forward:
        """This rank's part of a batch. The ranks compare their batches first. All ranks call it."""
        context = self._context(self.model.dtype)
        need = "all ranks of a group need the same batch, see ContextParallel.loader"
        with _told(context.transport):
            found, items = self._pack(inputs), inputs.get("num_items_in_batch")
            if items is not None and (items := attempt(float, given := items)) is None:
                raise refused("num_items_in_batch", given, "a number is needed")
        _same(context.transport, "inputs", _number(found.bytes() + repr(items).encode()), need)
        batch = context.batch(found.cu_seqlens)
        if without := [rank for rank in range(self.ranks) if not batch.plan.share(rank).q_tokens]:
            raise InvalidArgument(
                f"the batch has {len(found.ids)} tokens, and ranks {without} of this group hold none, at least 1 token on each rank is needed: "
                "give longer batches, use fewer ranks for each replica (replicas), or choose another layout"
            )
        labels = None if found.labels is None else found.labels[batch.tokens]
        return Forward(found, lambda dtype: self._context(dtype).batch(found.cu_seqlens), batch, items, labels, group=self.group)

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if Current.forward is not None:  # the head alone, for a tile
            return None
        if args:
            kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
        forward = self.last = Current.forward = self.shard(kwargs)
        mine = forward.batch.tokens
        kept = {name: value for name, value in kwargs.items() if name not in TAKEN}
        kept |= {"input_ids": forward.pack.ids[mine][None], "position_ids": forward.pack.positions[mine][None]}
        if forward.pack.types is not None:
            kept["token_type_ids"] = forward.pack.types[mine][None]
        if "use_cache" in self._takes:
            kept["use_cache"] = False
        return (), kept | self._mixers.arguments(forward)

    # Outputs

    def _after(self, model: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if (forward := self._whole()) is None or forward.labels is None:
            return out
        if forward.hidden is None:
            part = self._sum(out.logits[0], forward.labels)
        else:
            out["logits"], part = None, self._tiles(model, forward, kwargs)
        items = forward.items if forward.items is not None else forward.pack.count
        out["loss"] = _Total.apply(part, forward.batch.context.transport, self._factor) / items  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def _sum(logits: Tensor, labels: Tensor) -> Tensor:
        # In f32 as in Transformers.
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels.long(), ignore_index=-100, reduction="sum")

    def _tiles(self, model: Any, forward: Forward, kwargs: dict[str, Any]) -> Tensor:
        """The loss, with the logits of one tile in memory at a time, in both directions."""
        assert forward.hidden is not None and forward.labels is not None
        hidden: Any = forward.hidden

        def part(rows: Tensor, labels: Tensor) -> Tensor:
            outer, Current.forward = Current.forward, forward
            forward.tile = rows
            try:
                logits = model.forward(**kwargs).logits[0]
            finally:
                forward.tile, Current.forward = None, outer
            return self._sum(logits, labels)

        # The same number on all ranks: with FSDP, each tile gathers the head's parameters.
        tiles = -(-max(forward.batch.plan.share(rank).q_tokens for rank in range(self.ranks)) // self.tile)
        if self.replicas > 1 and isinstance(model.get_output_embeddings(), FSDPModule):
            raise Unsupported(
                f"tile is {self.tile} and replicas is {self.replicas}, and fully_shard wraps the head separately: replicas with batches of "
                "different lengths would gather the head's parameters a different number of times. Wrap the head with its parent"
            )
        parts = zip(hidden.tensor_split(tiles, dim=1), forward.labels.tensor_split(tiles), strict=True)
        total: Tensor = sum((checkpoint(part, *one, use_reentrant=False) for one in parts), hidden.new_zeros((), dtype=torch.float32))
        return total

    @staticmethod
    def _tiled(usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The base model's forward. Keeps the hidden states, so that the head computes no logits, or returns those of a tile."""
        forward = Current.forward
        if not isinstance(forward, Forward) or forward.labels is None:
            return usual(*args, **kwargs)
        if forward.tile is not None:
            return forward.outputs(last_hidden_state=forward.tile)
        out = usual(*args, **kwargs)
        forward.hidden, forward.outputs = out["last_hidden_state"], type(out)
        out["last_hidden_state"] = forward.hidden[:, :0]
        return out

    def _ends(self, *_: Any) -> None:
        if (forward := self._whole()) is not None:
            forward.hidden = Current.forward = None

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
            self._base.forward = partial(self._tiled, self._base.forward)

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
        if self.last is None:
            raise InvalidArgument("gather needs a forward pass, and there was none: call the model first")
        forward, rows = self.last, rows.detach()
        mine = len(forward.batch.tokens)
        if rows.ndim < 2 or rows.shape[:2] != (1, mine):
            raise InvalidArgument(f"rows has the shape {tuple(rows.shape)}, (1, {mine}, ...) is needed")
        whole_ = rows.new_zeros((len(forward.pack.ids), *rows.shape[2:]))
        whole_[forward.batch.tokens] = rows[0]
        host = whole_.cpu()
        dist.all_reduce(host, group=self.group)
        out = rows.new_full((forward.pack.shape[0] * forward.pack.shape[1], *rows.shape[2:]), fill)
        out[forward.pack.kept] = host.to(rows.device)
        return out.reshape(*forward.pack.shape, *rows.shape[2:])

    def count(self, batch: Mapping[str, Any]) -> int:
        """The number of tokens of a batch with a label."""
        return self._documents(batch).count

    def loader(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of rank 0 of the group, on all ranks of the group. The model selects each rank's tokens."""
        iterator = iter(batches) if self.rank == 0 else None
        root = dist.get_process_group_ranks(self.group)[0]
        while True:
            message: list[Any] = [None]
            if iterator is not None:
                try:
                    message = [("batch", next(iterator))]
                except StopIteration:
                    message = [("end", None)]
                except BaseException as error:
                    dist.broadcast_object_list([("failed", repr(error))], src=root, group=self.group)
                    raise
            dist.broadcast_object_list(message, src=root, group=self.group)
            kind, batch = message[0]
            if kind == "failed":
                raise InvalidArgument(f"the loader of rank 0 of this group failed: {batch}")
            if kind == "end":
                return
            yield batch

    def trainer(self, kind: type[Any]) -> type[Any]:
        """A subclass of Trainer or of TRL's SFTTrainer that gives all ranks of a group the same batches."""
        from .trainer import trainer

        return trainer(self, kind)

    def __reduce__(self) -> Any:
        raise Unsupported("a model with a ContextParallel cannot be copied or pickled: copy it before ContextParallel(model) or after close()")

    def close(self) -> None:
        """Leaves the group and restores the model's own attention."""
        if self.model._cpattn is not self:
            return
        self._restore()
        self.model._cpattn = None
        for context in self._contexts.values():
            context.close()
