# SPDX-License-Identifier: MIT OR Apache-2.0
"""Groups of ranks that change size from pass to pass (dynamic context parallelism).

All ranks have the same batch. The documents of a pass are dealt over groups of the allowed sizes by what they cost there
(`cpattn.plan_groups`): short ones are packed for small groups, which work apart, long ones for groups of many ranks. Each group runs the
model on its own documents, over a context of its own. There is one context for each size that this rank's groups may have, made once. The
loss is summed over all ranks, so a pass has the loss and the gradients of one process, and every rank runs as many passes as every
other. A rank whose group has no documents runs the model on one token without a label.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cpattn import UNLIMITED, plan_groups
from cpattn.arguments import attempt, refused, whole
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.groups import Groups, RankGroup
from cpattn.options import CHOSEN
from cpattn.torch import Context, GlooTransport
from cpattn.torch.group import DTYPES, Collectives
from .pack import Pack

if TYPE_CHECKING:
    from .probe import Found

# Dealings that are kept: those of the passes of a step, and of steps that are repeated.
KEPT = 64


def sizes_of(sizes: Any, ranks: int) -> tuple[int, ...]:
    """The sizes of groups: ascending, each a multiple of the one before, the last one a divisor of the number of ranks."""
    if sizes is None:
        return ()
    numbers = attempt(lambda: tuple(operator.index(one) for one in sizes))
    fits = numbers and numbers[0] > 0 and all(a < b and b % a == 0 for a, b in pairwise(numbers))
    if not numbers or not fits or any(isinstance(one, bool) for one in sizes):
        raise refused(
            "group_sizes",
            sizes,
            "numbers of ranks that ascend are needed, each a multiple of the one before, as in (1, 2, 4)",
        )
    if ranks % numbers[-1]:
        raise InvalidArgument(
            f"group_sizes is {numbers}, and its largest, {numbers[-1]}, does not divide the {ranks} ranks of the group"
        )
    return numbers


def refuse_beside(sizes: Sequence[int], replicas: int, options: Mapping[str, Any], parts: Mapping[str, object]) -> None:
    """Refuses what goes with groups of one size only. `parts`: what of a model is, and is not supported."""
    given = f"group_sizes is {tuple(sizes)}"
    if replicas != 1:
        raise Unsupported(
            f"replicas is {replicas} and {given}: leave replicas out, groups that work apart take the place of replicas"
        )
    for name in (*CHOSEN, "ranks_per_node", "own_tokens"):
        if name in options:
            raise Unsupported(
                f"{name} is {options[name]!r} and {given}, whose groups have plans of their own: leave {name} out"
            )
    if options.get("communicator") == "torch":
        raise Unsupported(
            f"communicator is 'torch' and {given}, and groups have no process groups of PyTorch: leave it out"
        )
    for what, there in parts.items():
        if there:
            raise Unsupported(
                f"the model has {what} and {given}, which is not supported together: leave group_sizes out"
            )


def token_flops(model: torch.nn.Module, config: Any, layers: int) -> int:
    """Operations of a token in the forward of a layer, outside of attention: twice the parameters that it meets."""
    words: Any = model.get_input_embeddings()  # type: ignore[operator]
    left = {id(one) for one in words.parameters()} if isinstance(words, torch.nn.Module) else set()
    chosen, experts = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), 1)
        for names in (
            ("num_experts_per_tok", "top_k", "moe_topk"),
            ("num_local_experts", "num_experts", "n_routed_experts"),
        )
    )
    total = 0
    for name, one in model.named_parameters():
        number = getattr(one, "ds_numel", one.numel())  # of ZeRO-3, which holds a part
        if id(one) not in left:
            total += number * min(chosen, experts) // experts if ".experts." in name else number
    return 2 * total // max(layers, 1)


class PassNames(NamedTuple):
    """What the batches of passes have of a batch: whether it has position_ids, the names of the arguments for token types and for the labels of tokens,
    by what the loss is divided, and its arguments that are not of tokens."""

    positions: bool
    types: str
    labels: str
    items: float
    others: Mapping[str, Any]


class GroupSizes:
    """The groups of each size that this rank is in, and how documents are dealt over them."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        tokens: int,
        machine: str | None,
        members: Sequence[int],
        number: int,
        timeout: float,
    ) -> None:
        self.sizes, self.tokens, self.machine = sizes, tokens, machine
        self._members, self._number, self._timeout = tuple(members), number, timeout
        self._contexts: dict[tuple[int, torch.dtype], Context] = {}
        self._collectives: dict[int, Collectives] = {}
        # By the lengths of the documents, the most passes, and whether the room is limited.
        self._dealt: dict[tuple[tuple[int, ...], int, bool], Groups] = {}
        self._kind: dict[str, Any] = {}
        self._chunk = 0  # tokens of a chunk, in a model with chunked attention
        self.ranks_per_node = 0
        self.transport: GlooTransport | None = None

    def describe(self, model: torch.nn.Module, config: Any, found: Found) -> None:
        """What the costs of documents depend on: the widest kind of layers, and the work of a token outside of attention."""
        kinds = [(count, kind) for count, kind in found.told]
        count, kind = max(kinds, key=lambda one: one[1].get("window_left", UNLIMITED))
        known = ("heads", "kv_heads", "head_dim", "value_dim", "window_left", "window_right")
        self._kind = {name: kind[name] for name in known if name in kind}
        self._kind |= {"token_flops": token_flops(model, config, count), "dtype": DTYPES[model.dtype]}  # type: ignore[index]
        chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ("chunked_attention",))
        self._chunk = chunks * (getattr(config, "attention_chunk_size", None) or 0)

    def open(self) -> None:
        """All ranks call it. The transport of all ranks; `at` opens the groups."""
        self.transport = GlooTransport(list(self._members), timeout=self._timeout)

    def members(self, size: int) -> tuple[int, ...]:
        first = self._number // size * size
        return self._members[first : first + size]

    def at(self, size: int, dtype: torch.dtype, make: Callable[[tuple[int, ...], torch.dtype], Context]) -> Context:
        """The context of this rank's group of a size."""
        if (size, dtype) not in self._contexts:
            context = self._contexts[size, dtype] = make(self.members(size), dtype)
            context.use_collectives(self.collectives(size))
        return self._contexts[size, dtype]

    def collectives(self, size: int) -> Collectives:
        if size not in self._collectives:
            self._collectives[size] = Collectives(self.members(size), self._timeout)
        return self._collectives[size]

    def _limited(self) -> bool:
        return self.tokens > 0 and torch.is_grad_enabled()

    def deal(self, lengths: tuple[int, ...], most_passes: int = 0) -> Groups:
        """The groups of each pass, of documents of these lengths. A pass without gradients has room for all."""
        key = (lengths, most_passes, self._limited())
        if key not in self._dealt:
            room = self.tokens if self._limited() else max(sum(lengths), 1)
            how: dict[str, Any] = {"machine": self.machine, "most_passes": most_passes, **self._kind}
            how["ranks_per_node"] = self.ranks_per_node
            ends = [0, *accumulate(lengths)]
            self._keep(key, plan_groups(ends, sizes=self.sizes, room=room, world=len(self._members), **how))
        return self._dealt[key]

    def _keep(self, key: tuple[tuple[int, ...], int, bool], groups: Groups) -> None:
        self._dealt.pop(key, None)  # the newest is the last one
        self._dealt[key] = groups
        while len(self._dealt) > KEPT:
            del self._dealt[next(iter(self._dealt))]

    def refuse(self, pack: Pack) -> None:
        """Refuses what the documents of one group cannot have, and what only some groups would refuse, while the others wait for them."""
        if pack.slices is not None:
            raise Unsupported(
                f"slices are given and group_sizes is {self.sizes}, which deals documents that attend to themselves alone: leave one of them out"
            )
        begins = pack.positions[[a for a, b in pairwise(pack.cu_seqlens) if a < b]] - pack.first
        if pack.by_positions and 0 < self._chunk < max(pack.longest, pack.reach) and bool(begins.any()):
            raise Unsupported(
                f"position_ids of documents begin with {sorted(set(begins.tolist()))[:5]}, and the model has chunked attention, whose chunks begin "
                "with the document: give position_ids that begin with 0, or leave them out"
            )

    def groups_of(self, pack: Pack) -> tuple[RankGroup, ...]:
        """The groups with documents, in a pass with all of these documents."""
        self.refuse(pack)
        if self._limited() and len(pack.ids) > self.tokens * len(self._members):
            raise InvalidArgument(
                f"the batch has {len(pack.ids)} tokens, and {len(self._members)} ranks of group_tokens={self.tokens} have room for "
                f"{self.tokens * len(self._members)} in a pass: call the model with each of cp.passes(batch), or allow more group_tokens"
            )
        passes = self.deal(lengths_of(pack), 1).passes
        assert len(passes) <= 1
        return passes[0] if passes else ()

    def own_of(self, groups: Sequence[RankGroup]) -> RankGroup:
        """This rank's group, which may be without documents."""
        for group in groups:
            if group.first_rank <= self._number < group.first_rank + group.ranks:
                return group
        least = self.sizes[0]
        return RankGroup(self._number // least * least, least, ())

    def passes(self, pack: Pack, dealt: Groups, names: PassNames) -> list[dict[str, Any]]:
        """The batches of the passes of a dealing. A pass is dealt again as it was dealt here."""
        lengths, batches = lengths_of(pack), []
        for groups in dealt.passes:
            documents = sorted(d for group in groups for d in group.documents)
            place = {d: at for at, d in enumerate(documents)}
            own = tuple(g._replace(documents=tuple(place[d] for d in g.documents)) for g in groups)
            self._keep((tuple(lengths[d] for d in documents), 1, self._limited()), Groups((own,), 0, 0))
            part, _ = pack.part(documents)
            batch: dict[str, Any] = {**names.others, "input_ids": part.ids[None]}
            batch["cu_seqlens"] = torch.tensor(part.cu_seqlens, dtype=torch.int32, device=part.ids.device)
            for name, of in (
                ("position_ids" if names.positions else "", part.positions),
                (names.types, part.types),
                (names.labels, part.labels),
                ("loss_weights", part.weights),
                # In several passes no router has a loss, and a pass may have the tokens that do not count in it.
                ("router_weights" if len(dealt.passes) == 1 else "", part.router_weights),
            ):
                if name and of is not None:
                    batch[name] = of[None]
            if part.labels is not None:
                batch["num_items_in_batch"] = torch.tensor(names.items, device=part.ids.device)
            batches.append(batch)
        return batches

    def runs(self) -> int:
        """How often attention has run, in all groups."""
        return sum(context.runs for context in self._contexts.values())

    def close(self) -> None:
        """Leaves all groups."""
        for context in self._contexts.values():
            context.close()
        for group in self._collectives.values():
            group.close()
        if self.transport is not None:
            self.transport.release()
        self._contexts, self._collectives, self.transport = {}, {}, None


def lengths_of(pack: Pack) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(pack.cu_seqlens))


def tokens_of(tokens: Any) -> int:
    return whole("group_tokens", tokens, 0, 2**40)
