# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where a model's sequence is split and brought together again: the model's own `_cp_plan`, completed and checked for each class.

Diffusers' plans name modules, and inputs or outputs of theirs. A plan says nothing about an argument that must not be given, or that is to be
split and is not, as per-token timesteps of LTX; `MODELS` does. A tensor that neither names is refused: whether each rank needs
all of it, or its own part, is not to be guessed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers import FluxTransformer2DModel, ModelMixin, WanTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn

from cpattn.errors import InvalidArgument, Unsupported


@dataclass(frozen=True)
class Split:
    """Of a tensor with so many dims, the one that is split. With `broadcast` a size of 1 stays whole, and so does a tensor in a list each."""

    dims: Mapping[int, int]
    broadcast: bool = False


@dataclass(frozen=True)
class Place:
    """What happens at one module: inputs and outputs that are split, by name and by number, then outputs that are gathered, in `dim` each."""

    name: str
    module: nn.Module
    inputs: Mapping[str, Split] = field(default_factory=dict)
    outputs: Mapping[int, Split] = field(default_factory=dict)
    gathered: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Known:
    """What a class's plan does not say. `whole` are arguments of which each rank needs all; `plan` is that of a class without one, `more` completes it; `refused` are
    arguments, and `config` values of the configuration, that would be wrong, each with the reason; `local` are attention modules, by parts of
    their names, whose keys and values each rank has whole; `short` are
    what may have fewer rows than there are ranks. Others may not, since much code of models cannot do without a row."""

    whole: tuple[str, ...]
    plan: Mapping[str, Any] | None = None
    more: Mapping[str, Mapping[str | int, Split]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    short: tuple[str, ...] = ()


_ROWS = Split({3: 1})
_TIMES = Split({2: 1, 3: 1}, broadcast=True)
_ROPES: Mapping[str | int, Split] = {0: Split({3: 1, 4: 2}), 1: Split({3: 1, 4: 2})}
_WORDS = ("encoder_hidden_states", "txt_ids")
_KV = "its attention, to a cache of reference images, does not go over the ranks: leave it out"
_JOINT = FluxTransformer2DModel._cp_plan
_VIDEO = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image")

# The classes that python-hf/tests/sweep_diffusers.py compares with one process.
MODELS: dict[str, Known] = {
    "FluxTransformer2DModel": Known(
        whole=("pooled_projections", "timestep", "guidance", "joint_attention_kwargs"),
        more={"": {"controlnet_block_samples": _ROWS, "controlnet_single_block_samples": _ROWS}},
        short=_WORDS,
    ),
    "Flux2Transformer2DModel": Known(
        whole=("timestep", "guidance"),
        refused={"kv_cache": _KV, "kv_cache_mode": _KV, "num_ref_tokens": _KV},
        short=_WORDS,
    ),
    "QwenImageTransformer2DModel": Known(
        whole=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep", "guidance", "additional_t_cond"),
        more={"": {"controlnet_block_samples": _ROWS}},
    ),
    "WanTransformer3DModel": Known(whole=_VIDEO),
    "ChronoEditTransformer3DModel": Known(whole=_VIDEO, more={"": {"timestep": Split({2: 1})}}),
    "WanVACETransformer3DModel": Known(
        whole=(*_VIDEO, "control_hidden_states", "control_hidden_states_scale"),
        plan={name: WanTransformer3DModel._cp_plan[name] for name in ("rope", "blocks.0", "proj_out")},
        more={"vace_blocks.*": {"hidden_states": _ROWS}, "vace_blocks.0": {"control_hidden_states": _ROWS}},
    ),
    "OvisImageTransformer2DModel": Known(whole=("timestep",), plan=_JOINT, short=_WORDS),
    "LongCatImageTransformer2DModel": Known(whole=("timestep", "guidance"), plan=_JOINT, short=_WORDS),
    "LTXVideoTransformer3DModel": Known(whole=("timestep", "rope_interpolation_scale", "video_coords"), more={"": {"timestep": _TIMES}}),
    "LTX2VideoTransformer3DModel": Known(
        whole=(
            "audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask", "audio_timestep", "sigma", "audio_sigma",
            "video_coords", "audio_coords", "perturbation_mask",
        ),
        more={"": {"timestep": _TIMES, "video_keyframes_mask": _ROWS}, "rope": _ROPES, "cross_attn_rope": _ROPES},
        refused={"video_self_attention_mask": "it weighs pairs of tokens: leave it out"},
        local=(".audio_attn1", ".audio_attn2", ".audio_to_video_attn"),
    ),
    "HeliosTransformer3DModel": Known(
        whole=(
            "hidden_states", "timestep", "encoder_hidden_states", "indices_hidden_states", "indices_latents_history_short",
            "indices_latents_history_mid", "indices_latents_history_long", "latents_history_short", "latents_history_mid", "latents_history_long",
        ),
        config={"is_amplify_history": "attention finds the history by the number of its tokens, of which a rank has its part: set it to False"},
    ),
    "MiniMaxH3Transformer3DModel": Known(
        whole=(
            "hidden_states", "audio_hidden_states", "encoder_hidden_states", "timestep", "timestep_indices", "token_tags", "position_ids",
            "video_indices", "audio_indices", "text_indices",
        ),
        local=("token_refiner.",),
    ),
}  # fmt: skip


def class_of(model: Any) -> str:
    """The name of the model's class, without that which fully_shard makes of it."""
    return next(kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))


def plan_of(model: Any, plan: Mapping[str, Any] | None) -> tuple[list[Place], Known | None]:
    """The places of a model, and what is known of its class: nothing if the caller gives the plan."""
    name = class_of(model)
    if not isinstance(model, ModelMixin):
        raise InvalidArgument(
            f"model is {name}, a model of Diffusers is needed, such as pipe.transformer: wrap or compile it afterwards"
        )
    known = None
    if plan is None:
        known = MODELS.get(name)
        plan = model._cp_plan or (known.plan if known else None)
        if known is None or not plan:
            why = "has no _cp_plan" if not plan else "has a _cp_plan, but was not compared with one process"
            raise Unsupported(
                f"{name} {why}: {', '.join(MODELS)} were. Give plan, in the form of a _cp_plan, which says where the model's sequence is split and "
                "gathered, and compare the results with one process"
            )
        for value, reason in known.config.items():
            if getattr(model.config, value, None):
                raise Unsupported(
                    f"{name} has config.{value} = {getattr(model.config, value)!r}, which is not supported: {reason}"
                )
    elif not isinstance(plan, Mapping) or not plan:
        raise InvalidArgument(
            f"plan is {plan!r}, a mapping of modules' names is needed, in the form of a _cp_plan of Diffusers"
        )
    places = [place for key, entry in plan.items() for place in _places(model, key, entry)]
    for key, entry in () if known is None else known.more.items():
        places += _places(model, key, entry)
    return _merged(places), known


def _merged(places: Iterable[Place]) -> list[Place]:
    """One place for each module: later entries replace earlier ones for the same input or output."""
    found: dict[int, Place] = {}
    for place in places:
        known = found.get(id(place.module), Place(place.name, place.module))
        gathered = place.gathered or known.gathered
        found[id(place.module)] = Place(
            place.name, place.module, {**known.inputs, **place.inputs}, {**known.outputs, **place.outputs}, gathered
        )
    return list(found.values())


def _places(model: nn.Module, key: str, value: Any) -> Iterator[Place]:
    for name, module in modules_of(model, key):
        if isinstance(value, Mapping):
            every = {one: how if isinstance(how, Split) else _split(key, one, how) for one, how in value.items()}
            inputs = {one: how for one, how in every.items() if isinstance(one, str)}
            takes = inspect.signature(module.forward).parameters
            if missing := [one for one in inputs if one not in takes]:
                raise InvalidArgument(
                    f"plan[{key!r}] names {missing[0]}, which is no argument of {type(module).__name__}: {', '.join(takes)} are"
                )
            yield Place(name, module, inputs, {one: how for one, how in every.items() if isinstance(one, int)})
        else:
            outputs = value if isinstance(value, list | tuple) else [value]
            if not all(one is None or isinstance(one, ContextParallelOutput) for one in outputs):
                raise InvalidArgument(
                    f"plan[{key!r}] is {value!r}, inputs by their names or a ContextParallelOutput is needed"
                )
            yield Place(name, module, gathered=tuple(None if one is None else one.gather_dim for one in outputs))


def _split(key: str, one: str | int, how: Any) -> Split:
    if not isinstance(how, ContextParallelInput) or how.split_output != isinstance(one, int) or how.split_dim < 0:
        raise InvalidArgument(
            f"plan[{key!r}][{one!r}] is {how!r}, a ContextParallelInput is needed, with split_output for the number of an output and without it "
            "for the name of an input, and a split_dim of at least 0"
        )
    ranks = [how.expected_dims] if how.expected_dims is not None else range(how.split_dim + 1, 9)
    return Split({dims: how.split_dim for dims in ranks})


def modules_of(model: nn.Module, key: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a name of a plan, in which `*` is each of a list. A number beyond the end of a list names none, since plans of Diffusers
    count the layers of the largest model."""
    found: list[tuple[str, nn.Module]] = [("", model)]
    for atom in key.split(".") if key else ():
        inner: list[tuple[str, nn.Module]] = []
        for name, module in found:
            if isinstance(module, nn.ModuleList):
                chosen = [one for one in range(len(module)) if atom == "*" or atom == str(one)]
                if atom != "*" and not atom.isdigit():
                    raise InvalidArgument(
                        f"plan names {key}, and {name} is a list of modules: a number or * is needed after it"
                    )
                inner += [(f"{name}.{one}", module[one]) for one in chosen]
            elif isinstance(there := getattr(module, atom, None), nn.Module):
                inner.append((f"{name}.{atom}" if name else atom, there))
            else:
                raise InvalidArgument(f"plan names {key}, and {type(module).__name__} has no module {atom}")
        found = inner
    yield from found


def has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_tensors, value))
    return isinstance(value, Tensor)


def refuse(name: str, known: Known, split: Iterable[str], arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of a call of the model `name` that neither the plan nor the table knows."""
    for one, value in arguments.items():
        if one in known.refused and value is not None and (isinstance(value, Tensor) or value):
            raise Unsupported(f"{one} is given to {name}, which is not supported: {known.refused[one]}")
        if one not in known.whole and one not in split and has_tensors(value):
            raise Unsupported(
                f"{one} has tensors, and whether a rank of {name} needs all of them is not known: leave it out"
            )
