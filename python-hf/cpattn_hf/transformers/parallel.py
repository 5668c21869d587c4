# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ContextParallel`: a language model of Transformers whose forward pass the ranks of a group share.

A hook before `forward` selects this rank's tokens of the batch, a hook after it computes the loss. Both run inside DDP and FSDP, in an
evaluation, and under gradient checkpointing. Every rank calls the model with the same whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cpattn.arguments import flag, refused, whole
from cpattn.arguments import keywords, misspelt, named
from cpattn.errors import Error, InvalidArgument, Unsupported
from cpattn.groups import RankGroup
from cpattn.packing import over_all
from cpattn.options import CHOSEN, RUNS, Layout, PlanOptions
from cpattn.plan import Plan
from cpattn.torch import Context, GlooTransport
from cpattn.torch.kernels import of_model
from cpattn.torch.group import content, digest, digests, compare, compare_names, compare_settings, refusing
from cpattn.torch.group import Collectives, Members
from cpattn.torch.group import same_weights
from .adapters import Adapters
from .attention import NAME, Current, register
from .calls import Calls
from .draws import Draws, refuse_layerdrop
from .dropout import ByPlace
from .forward import Forward
from .groups import GroupSizes, refuse_beside, sizes_of, tokens_of
from .images import Images
from .inputs import LOSSES, checked, items_of, loss_of, refuse_loss, shifts
from .integrity import Integrity, configs_of
from .mesh import group_of
from .mixers import Mixer, Mixers, striped
from .mtp import MultiToken
from .owners import refuse_owners, refuse_pickle
from .pack import TAKEN, Pack
from .pooled import Kept, pools, reader_of
from .probe import probe
from .results import results
from .router import keeps_router
from .scores import Reader
from .tensors import Peers
from .tiles import keeps_hidden
from .views import Views
from .zero import at_once, refuse_combining, refuse_parallel


@named("model, group=group, ulysses=2")
class ContextParallel(Calls):
    """Makes `model` context-parallel, in place, over a process group (None: the default group; or a list of global ranks). All
    ranks make one, before DDP or FSDP wrap the model.

    Afterwards every rank calls `model(**batch)` with the same batch: rows with padding (`attention_mask`), or packs
    (`position_ids` that start again, or `cu_seqlens`). `loss` is the loss of the whole batch on every rank. `logits` are
    those of this rank's tokens; `gather` returns the logits of all tokens.

    `gradients` is how gradients of parameters are combined over the ranks: "mean" (DDP, FSDP, DeepSpeed) or "sum". `replicas` is the
    number of parts of the group, each with its own batches (data parallel); ranks of a replica are consecutive. With `group_sizes`, as (1, 2, 4, 8),
    the ranks are divided anew for each batch: its documents are dealt over groups of these sizes by their cost. Then a rank has room for
    `group_tokens` tokens in a pass (0: for all), and `group_machine` is the text of the description of a machine that costs are predicted for. `mesh`, instead of
    both, is a DeviceMesh with the dimension "cp", whose other dimensions are replicas, but for "tp": the parts of the heads of a model that
    tensor parallelism has split. `ulysses`, `ring`, `layout`,
    `layout_parameter`, `workers`, `timeout`, `communicator`, `kernels` are those of `cpattn.torch.Context`. `kernels="model"` are
    those that the model has (`attn_implementation`). With `tile`, logits exist for `tile` tokens at a time: the loss is the same, and
    no logits are returned. Layers of Transformers' hybrids that mix tokens outside of attention run on any mesh; `mixers` are
    functions for other classes of such layers, or instead (Ulysses over all ranks): see docs/models.md. `recurrent` says what their recurrent
    layers do: "heads" (a rank gets whole documents for its share of the heads), "states" (it has its own tokens, and states pass between
    ranks), or "auto", what costs less for the batch's documents: `explain` says which.
    With `dropout="position"` each `torch.nn.Dropout` drops by the places of tokens in the batch, so that training does not depend on the
    number of ranks; otherwise each rank draws its own. (Attention drops by places always.)
    The ranks compare hashes of their models' weights first, and once more in the first pass, of shards with those of ranks that hold the same ones;
    `compare_weights=False` leaves it out, for weights that something makes equal afterwards (DDP, `deepspeed.initialize` and accelerate's FSDP
    with `cpu_ram_efficient_loading` send those of rank 0).

    Raises Unsupported for a model that would be wrong, with the reason.
    """

    def __init__(
        self,
        model: Any,
        *,
        group: Members = None,
        mesh: Any = None,
        replicas: int = 1,
        gradients: str = "mean",
        tile: int = 0,
        vision: str = "all",
        timeout: float = 300.0,
        workers: int = 1,
        mixers: Mapping[type[torch.nn.Module], Mixer] | None = None,
        recurrent: str = "auto",
        dropout: str = "rank",
        compare_weights: bool = True,
        group_sizes: Sequence[int] | None = None,
        group_tokens: int = 0,
        group_machine: str | None = None,
        **options: Any,
    ) -> None:
        self.model: Any = None
        self._base: Any = None
        self._hooks: list[Any] = []
        self._tiles = False
        self._kept: Kept | None = None
        self._dropouts: ByPlace | None = None
        self._asked: Reader | None = None
        self._ahead: MultiToken | None = None
        self._others: list[ContextParallel] = []
        self._contexts: dict[torch.dtype, Context] = {}
        self.sizes: GroupSizes | None = None
        self._collectives: Collectives | None = None
        self._everyone: Collectives | None = None
        group, replicas = group_of(mesh, group, replicas)
        self._options, self._group = {"timeout": timeout, "workers": workers, **options}, group
        settings: dict[str, Any] = {
            "replicas": replicas,
            "gradients": gradients,
            "tile": tile,
            "vision": vision,
            "recurrent": recurrent,
            "dropout": dropout,
            "compare_weights": compare_weights,
            "group_sizes": group_sizes,
            "group_tokens": group_tokens,
            "group_machine": group_machine,
        }
        self._alike = {"group": group, "mixers": mixers, **settings, **self._options}
        transport = GlooTransport(group, timeout=timeout)
        members = self._all = transport.members
        self._peers = Peers()
        try:
            with refusing(transport):
                refuse_owners(model, members)
                self._peers.find(model, members, timeout)
            with self._peers.refusing():
                with refusing(transport):
                    if dropout not in ("rank", "position"):
                        raise refused("dropout", dropout, "'rank' (each rank draws its own) or 'position' is needed")
                    self._dropouts = ByPlace(model) if dropout == "position" else None
                    self._look(model, len(members), replicas, gradients, tile, mixers or {}, vision, recurrent)
                    self._look_at_groups(model, group_sizes, group_tokens, group_machine, members, timeout)
                    self._compare = flag("compare_weights", compare_weights)
                able = "the list of layers that can pass states (recurrent='heads' leaves it empty)"
                settings |= {"options": sorted(options.items()), "model": type(model).__name__}
                settings[able] = self._mixers.able
                compare_settings(transport, settings)
                if self._compare:
                    same_weights(transport, model)
            self._peers.compare_settings(settings)  # before the trial, which runs with the peers
            with refusing(transport):
                self._try(model)
            compare_settings(transport, {"model": (type(model).__name__, self._found)})
            self._number = transport.rank
            self.replica, self.rank = divmod(self._number, self.ranks)
            self._members = members[self.replica * self.ranks :][: self.ranks]
            self._collectives = Collectives(self._members, timeout)  # for `gather` and `loader`
            self.device = next(model.parameters()).device
            if self.sizes is None:
                self._context(model.dtype)
            else:
                self.sizes.describe(model, self.config, self._found)
                self.sizes.open()
                with refusing(self.transport):
                    for size in self.sizes.sizes:
                        largest = self.sizes.at(size, model.dtype, self._made)
                    nodes = largest.batch((0, 1)).plan.describe().ranks_per_node
                # 0 in a group inside of one node.
                self.sizes.ranks_per_node = max(digests(self.transport, "arguments", 2 * nodes + 1)) // 2
                with refusing(self.transport):  # a machine that has no such kernels, for example
                    self.sizes.deal((1,))
        except BaseException as error:
            self._restore()
            self._leave()
            transport.release()
            if isinstance(error, ValueError | ImportError | NotImplementedError) and not isinstance(error, Error):
                raise Unsupported(f"{type(model).__name__}: {error}") from error
            raise
        transport.release()
        self.factor = float(self.ranks) if gradients == "mean" else 1.0
        self.last: Forward | None = None
        model._cpattn = self
        vars(model)["__reduce_ex__"] = refuse_pickle  # pickle would begin with the hooks, and say nothing of them
        self._hook()

    def _look(
        self,
        model: Any,
        ranks: int,
        replicas: int,
        gradients: str,
        tile: int,
        mixers: Mapping[type[torch.nn.Module], Mixer],
        vision: str,
        recurrent: str,
    ) -> None:
        """The checks that need no other rank, and change nothing."""
        names = {*keywords(ContextParallel), *CHOSEN, *RUNS, "plans", "own_tokens", "communicator", "kernels"}
        if unknown := self._options.keys() - names - PlanOptions.__annotations__.keys():
            raise misspelt("ContextParallel", unknown, names)
        if gradients not in ("mean", "sum"):
            raise refused("gradients", gradients, "'mean' (DDP, FSDP) or 'sum' is needed")
        self.tile, self.replicas = whole("tile", tile, 0, 2**31), whole("replicas", replicas, 1, ranks)
        self._tiles = self.tile > 0
        if ranks % replicas:
            raise InvalidArgument(f"replicas is {replicas}, which does not divide the {ranks} ranks of the group")
        if replicas > 1 and self._options.get("communicator") == "torch":
            raise Unsupported(
                f"communicator is 'torch' and replicas is {replicas}, 1 is needed: give each replica a group of dist.new_group, or leave it out"
            )
        if getattr(model, "_cpattn", None) is not None:
            raise InvalidArgument("the model already has a ContextParallel: close it first")
        self.ranks, self.config = ranks // replicas, model.config.get_text_config()
        refuse_layerdrop(self.config)
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._mixers, self._adapters = Mixers(model, mixers, self._options, self.ranks, recurrent), Adapters(model)
        self._images = Images(model, vision, self._mixers, self._takes)
        self._peers.refuse(
            type(model).__name__,
            {
                "layers that mix whole documents": self._mixers,
                "layers with an adapter": any(self._adapters.replaced()),
                "images": self._images,
            },
        )
        self._usual = model.config._attn_implementation

    def _look_at_groups(
        self, model: Any, sizes: Any, tokens: Any, machine: Any, members: Sequence[int], timeout: float
    ) -> None:
        """The checks of groups that change size."""
        ranks = sizes_of(sizes, len(members))
        if not ranks:
            for name, given in (("group_tokens", tokens), ("group_machine", machine)):
                if given not in (0, None):
                    raise InvalidArgument(
                        f"{name} is {given!r} without group_sizes, which it is for: give both, or leave it out"
                    )
            return
        if machine is not None and not isinstance(machine, str):
            raise refused("group_machine", machine, "the text of a machine's description is needed")
        parts = {
            "images": self._images,
            "a head that reads one token of each row": pools(model),
            "parts of its heads on other ranks (tensor parallelism)": self._peers.ranks,
            "dropout='position', whose masks would be those of places in the batch of one process": self._dropouts,
        }
        refuse_beside(ranks, self.replicas, self._options, parts)
        self.sizes = GroupSizes(ranks, tokens_of(tokens), machine, members, members.index(dist.get_rank()), timeout)

    def _try(self, model: Any) -> None:
        """The trial, for which parts of parameters may come from other ranks."""
        register()
        at_once(model, {*self._mixers.layers, *self._adapters.gathered})
        self.model = model  # from here on `_restore` undoes the changes
        self._adapters.replace()
        self._attend(NAME)
        self._mixers.replace()
        if pools(model):
            self._kept = Kept(model)
            self._kept.replace()
        ulysses = self._options.get("ulysses")  # which other layers than those with kernels do not limit
        heads = ulysses if isinstance(ulysses, int) and ulysses > 0 else 1
        self._found = probe(model, self._takes, self._mixers, self._kept, heads, LOSSES.get(loss_of(model)))
        if self._kept:
            self._kept.restore()
        self._integrity = Integrity(self)
        self._base = getattr(model, model.base_model_prefix, None)
        if self.tile and (self._base is None or self._base is model):
            raise Unsupported(
                f"tile is {self.tile}: {type(model).__name__} has no base model separate from its head: leave tile out"
            )
        # Invalid options of a plan are refused here, not with the first batch.
        how = {
            name: value
            for name, value in self._options.items()
            if name not in ("plans", "own_tokens", "timeout", "workers", "communicator", "kernels")
        }
        over_all(Plan([0, 1], world=self.ranks, **self._heads() | how))

    def _attend(self, kind: str) -> None:
        self.model.set_attn_implementation(kind)
        if self.model.config.get_text_config()._attn_implementation == kind:
            for _, config in configs_of(self.model, self._images.towers):
                config._attn_implementation_internal = kind
        self._images.keep_attention()

    def _heads(self) -> dict[str, Any]:
        """Heads, dims and direction of the first layer, as defaults: each layer has its own."""
        kind = self._found.told[0][1]
        return {name: kind[name] for name in ("heads", "kv_heads", "head_dim", "window_right") if name in kind}

    @property
    def transport(self) -> GlooTransport:
        """The one over which the ranks agree: that of the context for the model's dtype, or that of all groups."""
        if self.sizes is not None:
            assert self.sizes.transport is not None
            return self.sizes.transport
        return self._context(self.model.dtype).transport

    def _made(self, group: Members, dtype: torch.dtype) -> Context:
        options = {**self._heads(), **self._options}
        if not any(options.get(name) for name in CHOSEN):
            options["layers"] = self._found.told
        if options.get("kernels") == "model":
            options["kernels"] = of_model(self._usual, self.device)
        return Context(group, dtype=dtype, device=self.device, **options)

    def _context(self, dtype: torch.dtype) -> Context:
        if dtype not in self._contexts:
            group = self._group if self._options.get("communicator") == "torch" else self._members
            self._contexts[dtype] = self._made(group, dtype)
            if self._collectives is not None:
                self._contexts[dtype].use_collectives(self._collectives)
            if self._recorded:
                self._contexts[dtype].record(self._recorded)
        return self._contexts[dtype]

    # Inputs

    def shard(self, inputs: Mapping[str, Any]) -> Forward:
        """This rank's part of a batch. The ranks compare their batches first. All ranks call it."""
        transport = self.transport
        need = (
            "all ranks of a group need the same batch. Where each draws its own (random crops or words), cp.trainer(kind, send_batches=True), "
            "or cp.loader(batches) without a trainer, gives all of them that of rank 0"
        )
        with self._peers.refusing():
            if self._compare:  # with what was added to the model before its first pass, as adapters are
                same_weights(transport, self.model)
                self._compare = False
            with refusing(transport):
                refuse_parallel()
                self._integrity.check()
                if torch.is_grad_enabled():
                    refuse_combining(self.model, self._alike["gradients"])
                images = self._images.given(inputs)
                found = checked(self.model, self.config, self._found, inputs, images)
                if self._kept and (images or inputs.get("input_ids") is None):
                    raise Unsupported(
                        f"{', '.join(sorted(images)) or 'inputs_embeds'} is given to a head that reads one token of each row: it needs input_ids alone"
                    )
                if found.slices is not None and self._mixers:
                    raise Unsupported(
                        "slices are given to a model with layers that mix whole documents, which know no slices: give each answer its own prompt"
                    )
                items = items_of(found, inputs)
                reader = self._asked or reader_of(self, self._kept, inputs)
                if self._ahead:
                    self._ahead.check(
                        found.labels is not None,
                        reader is not None,
                        bool(images),
                        inputs.get("input_ids") is not None,
                        shifts(self.model),
                    )
                if reader is None:
                    refuse_loss(self.model, self._found, found, inputs)
                if reader and found.weights is not None:
                    raise Unsupported(
                        "loss_weights are given where the loss is not that of labels of tokens: leave them out, and weigh the results"
                    )
                if self._found.pooled and found.slices is not None:
                    raise Unsupported(
                        "slices are given to a head that reads one token of each row: give each answer its own row"
                    )
                groups = None if self.sizes is None else self.sizes.groups_of(found)
                more = (reader.bytes() if reader else b"") + repr(groups).encode()
                more += content(self._images.compared(inputs, images)).encode()
            if self._images:
                compare_names(transport, self._images.names, images, need)
            compare(transport, "inputs", digest(found.bytes() + repr(items).encode() + more), need)
        if self.sizes is not None and groups is not None:
            return self._of_group(self.sizes, self.sizes.own_of(groups), found, items, reader)
        views = Views(
            found, lambda dtype: self._context(dtype).batch(found.cu_seqlens, slices=found.slices), self._found.blocks
        )
        batch = views.batch(self.model.dtype)
        if self._mixers.recurrent == "states" and batch.plan.describe().layout == Layout.STRIPED:
            raise striped()
        self._peers.compare_pass(
            self.model, found.bytes() + repr((items, batch.plan.distribution)).encode() + more, transport
        )
        forward = Forward(
            found,
            views,
            batch,
            items,
            found.labels,
            found.weights,
            reader,
            group=self._talk(),
            part=self._peers.number,
            recurrent=self._mixers.recurrent,
            able=self._mixers.able,
        )
        forward.size = reader.tile if reader else self.tile if found.labels is not None else 0
        return forward

    def _of_group(self, sizes: GroupSizes, group: RankGroup, found: Pack, items: Any, reader: Reader | None) -> Forward:
        """This rank's part of the documents of its group."""
        with refusing(self.transport):
            pack, places = found.part(group.documents)
            views = Views(
                pack, lambda dtype: sizes.at(group.ranks, dtype, self._made).batch(pack.cu_seqlens), self._found.blocks
            )
            batch = views.batch(self.model.dtype)
            if self._mixers.recurrent == "states" and batch.plan.describe().layout == Layout.STRIPED:
                raise striped()
        digests(self.transport, "plan", 1)  # a group whose plan failed is not waited for in the model
        forward = Forward(
            pack,
            views,
            batch,
            items,
            pack.labels,
            pack.weights,
            reader,
            group=self._talk(),
            whole=found,
            own=places[batch.tokens] if group.documents else places[:0],
            local=sizes.collectives(group.ranks),
            first_rank=group.first_rank,
            recurrent=self._mixers.recurrent,
            able=self._mixers.able,
        )
        forward.size = reader.tile if reader else self.tile if found.labels is not None else 0
        return forward

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if Current.forward is not None:  # the head alone, for a tile
            return None
        if args:
            kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
        forward = self.last = Current.forward = self.shard(kwargs)
        self._integrity.begin()
        draws = partial(
            Draws,
            self._number,
            self.replica,
            self.device,
            self.transport,
            forward.tokens,
            forward.batch.plan.distribution,
        )
        if self._images.given(kwargs):
            kept = self._images.arguments(forward, kwargs, draws)
        else:
            kept = self._own(forward, kwargs) | self._mixers.arguments(forward)
            forward.draws = draws()
        if "use_cache" in self._takes:
            kept["use_cache"] = False
        if forward.reader is not None:
            kept |= forward.reader.arguments(forward)
        if self._dropouts:
            self._dropouts.replace()
        if self._kept:
            self._kept.replace()
        return (), kept

    def _own(self, forward: Forward, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments for this rank's tokens."""
        mine = forward.tokens
        kept = {name: value for name, value in kwargs.items() if name not in TAKEN}
        kept["position_ids"] = forward.pack.positions[mine][None]
        if (embeddings := kwargs.get("inputs_embeds")) is None:
            kept["input_ids"] = forward.pack.ids[mine][None]
        else:
            kept["inputs_embeds"] = embeddings.flatten(0, 1)[forward.pack.kept[mine]][None]
        if forward.pack.types is not None:
            kept[self._found.named] = forward.pack.types[mine][None]
        return kept

    def _after(self, model: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if (forward := self._whole()) is None:
            return out
        with refusing(self.transport):
            self._integrity.end()
        if self._dropouts and forward.draws is not None:
            self._dropouts.check(forward.draws)
        if forward.outer:
            raise Unsupported(
                f"{type(model).__name__} did not call its text model with the batch: images are not supported in it"
            )
        return results(self, model, forward, out, kwargs)

    def _ends(self, *_: Any) -> None:
        if (forward := self._whole()) is not None:
            forward.hidden = forward.router = forward.ahead = Current.forward = None
            if self._kept:
                self._kept.restore()
            if forward.draws is not None:
                forward.draws.end()

    @staticmethod
    def _whole() -> Forward | None:
        """The current forward pass, unless it is that of a tile."""
        forward = Current.forward
        return forward if isinstance(forward, Forward) and forward.tile is None else None

    def _hook(self) -> None:
        self._mixers.replace()
        self._images.replace()
        # Not compiled: torch.compile breaks the graph at the hooks, and cannot trace them.
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._hooks = [
            self.model.register_forward_pre_hook(before, with_kwargs=True),
            self.model.register_forward_hook(after, with_kwargs=True),
            self.model.register_forward_hook(self._ends, always_call=True),
        ]
        if self._base is not None and hasattr(self.config, "output_router_logits"):
            self._hooks.append(self._base.register_forward_hook(keeps_router))
        if self._ahead:
            run = partial(torch.compiler.disable(MultiToken.__call__), self._ahead)  # type: ignore[no-untyped-call, unused-ignore]
            self._hooks.append(self._ahead.base.register_forward_hook(run))
        if self._tiles:
            self._keep_hidden()

    def _keep_hidden(self) -> None:
        """For tiles, from here on: a backward pass computes them again."""
        self._tiles = True
        if self._base not in (None, self.model) and not isinstance(self._base.forward, partial):
            self._base.forward = partial(keeps_hidden, self._base.forward)

    def _restore(self) -> None:
        if self.model is None:
            return  # refused before the model was changed
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._mixers.restore()
        self._adapters.restore()
        if self._dropouts:
            self._dropouts.restore()
        if self._kept:
            self._kept.restore()
        if self._tiles and self._base not in (None, self.model):
            vars(self._base).pop("forward", None)
        self._images.restore()
        with suppress(ValueError):
            self._attend(self._usual)

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
                self._again()

    def _again(self) -> None:
        """The changes that `_restore` has undone."""
        self._adapters.replace()
        self._attend(NAME)
        self._hook()

    def __reduce__(self) -> Any:
        return refuse_pickle()

    def close(self) -> None:
        """Leaves the group and restores the model's own attention."""
        if self.model._cpattn is not self:
            return
        for other in self._others:
            other.close()
        self._restore()
        self.model._cpattn = None
        vars(self.model).pop("__reduce_ex__", None)
        self._leave()

    def _leave(self) -> None:
        for context in self._contexts.values():
            context.close()
        if self.sizes is not None:
            self.sizes.close()
        for group in (self._collectives, self._everyone):
            if group is not None:
                group.close()
        self._collectives = self._everyone = None
        self._peers.close()
