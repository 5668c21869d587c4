# SPDX-License-Identifier: MIT OR Apache-2.0
"""`vision="shard"`: each image of a batch goes through the vision tower on one rank, and its features to all ranks.

Images are dealt by their patches, the largest first, each to the rank with the fewest patches. A rank without an image runs the smallest one
all the same and drops the result, so that all ranks use the tower's parameters (DDP and FSDP wait for each other in them). In a backward pass
the gradients of an image's features come from all ranks to the one that computed it, which adds them up in f32, in the order of ranks.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from cpattn.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from cpattn.torch.group import Collectives
    from .forward import Forward

GRIDS = "image_grid_thw"
PIXELS = "pixel_values"


def images_of_ranks(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """The images of each rank."""
    loads, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
    for image in sorted(range(len(patches)), key=lambda image: (-patches[image], image)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        shares[rank].append(image)
        loads[rank] += patches[image]
    return [sorted(images) for images in shares]


def patches_of(arguments: dict[str, Any]) -> list[int]:
    """The number of patches of each image; 1 for all, where the arguments do not say it."""
    pixels, grids, sizes = arguments.get(PIXELS), arguments.get(GRIDS), arguments.get("image_sizes")
    if not isinstance(pixels, Tensor) or not pixels.ndim:
        raise Unsupported(
            f"{PIXELS} is a {type(pixels).__name__}, a tensor is needed for vision='shard': leave vision out"
        )
    if isinstance(grids, Tensor):
        patches = grids.prod(-1).tolist()
        if sum(patches) != len(pixels):
            raise InvalidArgument(f"{GRIDS} has {sum(patches)} patches, and {PIXELS} has {len(pixels)}")
        return patches
    return sizes.prod(-1).tolist() if isinstance(sizes, Tensor) and len(sizes) == len(pixels) else [1] * len(pixels)


def some_images(arguments: dict[str, Any], patches: list[int], images: list[int]) -> dict[str, Any]:
    """The arguments for these images."""
    mine: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == PIXELS and arguments.get(GRIDS) is not None:
            value = torch.cat([part for at, part in enumerate(torch.split(value, patches)) if at in images])
        elif isinstance(value, Tensor) and value.ndim and len(value) == len(patches):
            value = value[images]
        elif isinstance(value, Tensor):
            raise Unsupported(
                f"{name} has the shape {tuple(value.shape)}, and there are {len(patches)} images: vision='shard' takes arguments with a row for each "
                "image. Leave vision out"
            )
        mine[name] = value
    return mine


class Features:
    """The features of images in a result of `get_image_features`: one leaf for each kind, a sequence or a tensor with an entry for each image."""

    def __init__(self, out: Any, images: int) -> None:
        self.out, self.leaves = out, list[Any]()
        if isinstance(out, ModelOutput):
            usual = out.get("pooler_output")
            self._name = "pooler_output" if usual is not None else "last_hidden_state"
            self._layers = out.get("deepstack_features")
            self.leaves = [out.get(self._name), *(self._layers or ())]
        else:
            self.leaves = [out]
        for leaf in self.leaves:
            if (
                not isinstance(leaf, Tensor | list | tuple)
                or len(leaf) != images
                or not all(isinstance(one, Tensor) for one in leaf)
            ):
                kind = (
                    f"the shape {tuple(leaf.shape)}"
                    if isinstance(leaf, Tensor)
                    else f"{len(leaf)} parts"
                    if isinstance(leaf, list | tuple)
                    else repr(leaf)
                )
                raise Unsupported(
                    f"the model's features of {images} images have {kind}, an entry for each image is needed for vision='shard': leave vision out"
                )

    def whole(self, leaves: list[list[Tensor]]) -> Any:
        """The result for all images. Other fields of it are those of this rank's images only, and are left out."""
        tensors = [
            torch.stack(new) if isinstance(old, Tensor) else type(old)(new)
            for old, new in zip(self.leaves, leaves, strict=True)
        ]
        if not isinstance(self.out, ModelOutput):
            return tensors[0]
        kind: Any = type(self.out)
        needed = [one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING]
        fields = (
            dict.fromkeys(needed)
            | {self._name: tensors[0]}
            | ({"deepstack_features": tensors[1:]} if self._layers else {})
        )
        return kind(**fields)


class Exchanged(torch.autograd.Function):
    """The rows of all ranks, one after the other, from those of this rank. Gradients of all ranks come back to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], rank: int, group: Collectives) -> Tensor:
        ctx.counts, ctx.rank, ctx.group = counts, rank, group
        mine, width = rows.detach().cpu().contiguous(), rows.shape[1]
        whole = mine.new_empty(sum(counts), width)
        size = width * mine.element_size()
        data = mine.view(-1).view(torch.uint8).repeat(len(counts))
        group.exchange(
            whole.view(-1).view(torch.uint8), data, [n * size for n in counts], [len(mine) * size] * len(counts)
        )
        return whole.to(rows.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        counts, sent = ctx.counts, gradient.cpu().contiguous()
        own, width = counts[ctx.rank], gradient.shape[1]
        arrived = sent.new_empty(len(counts) * own, width)
        size = width * sent.element_size()
        group: Collectives = ctx.group
        group.exchange(
            arrived.view(-1).view(torch.uint8),
            sent.view(-1).view(torch.uint8),
            [own * size] * len(counts),
            [n * size for n in counts],
        )
        wide = arrived if arrived.dtype == torch.float64 else arrived.float()
        return wide.view(len(counts), own, width).sum(0).to(gradient).view(own, width), None, None, None


def sharded(forward: Forward, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`get_image_features` of a model, with each image on one rank."""
    group, rank, ranks = forward.group, forward.batch.context.number, forward.batch.context.world
    assert group is not None
    bound = inspect.signature(usual).bind(*args, **kwargs)
    known = bound.arguments
    more = next((one.name for one in inspect.signature(usual).parameters.values() if one.kind == one.VAR_KEYWORD), "")
    arguments = {name: value for name, value in known.items() if name != more}
    patches = patches_of(arguments)
    if not patches:
        raise InvalidArgument("the batch has pixel values and no image: leave them out of a batch without images")
    shares = images_of_ranks(patches, ranks)
    mine, failed, found = shares[rank], None, None
    images = mine or [min(range(len(patches)), key=patches.__getitem__)]
    try:
        found = Features(usual(**some_images(arguments, patches, images), **(known.get(more) or {})), len(images))
    except Exception as error:  # noqa: BLE001 (the other ranks are told first)
        failed = error
    failures = torch.zeros(ranks, dtype=torch.int64)
    failures[rank] = failed is not None
    group.sum(failures)
    if failed is not None:
        raise failed
    if others := failures.nonzero().flatten().tolist():
        raise InvalidArgument(
            f"ranks {others} of this group failed at the images that they compute: see the error of these ranks"
        )
    assert found is not None
    whole = [_all(forward, list(leaf), shares, rank, group) for leaf in found.leaves]
    return found.whole(whole)


def _all(
    forward: Forward, features: list[Tensor], shares: list[list[int]], rank: int, group: Collectives
) -> list[Tensor]:
    """The features of all images, from those of this rank's images."""
    mine = shares[rank]
    rows = torch.cat([one.reshape(-1, one.shape[-1]) for one in features])[: None if mine else 0]
    lengths = torch.zeros(sum(map(len, shares)), dtype=torch.int64)
    lengths[mine] = torch.tensor([one[..., 0].numel() for one in features[: len(mine)]], dtype=torch.int64)
    group.sum(lengths)
    counts = [int(lengths[images].sum()) for images in shares]
    every: Tensor = Exchanged.apply(rows, counts, rank, group)  # type: ignore[no-untyped-call]
    order = [image for images in shares for image in images]
    parts = dict(zip(order, torch.split(every, [int(lengths[image]) for image in order]), strict=True))
    return [parts[image].view(_shape(features[0], int(lengths[image]))) for image in sorted(parts)]


def _shape(like: Tensor, rows: int) -> tuple[int, ...]:
    """Of an image's features with so many rows: as those of another image, whose first dimension may be another."""
    inner = like.shape[1:-1].numel()
    return rows // inner, *like.shape[1:]
