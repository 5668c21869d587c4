# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ContextParallel`: a transformer of Diffusers whose forward pass the ranks of a group share.

Hooks before and after modules split the model's sequence and bring it together again, and the attention of its processors goes over the
ranks. Every rank calls the model with the same whole inputs, and gets the same whole output.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cpattn.arguments import flag, refused
from cpattn.arguments import keywords, misspelt, named
from cpattn.errors import Disagreement, InvalidArgument, InvalidHandle, Unsupported
from cpattn.packing import over_all
from cpattn.plan import Plan
from cpattn.torch import GlooTransport
from cpattn.torch.group import content, digests, digest, compare, compare_settings, refusing
from cpattn.torch.group import Collectives, Members
from cpattn.torch.group import same_weights
from .attention import Attention, Settings, backend
from .comparison import FACTOR, distance, moved, repeatable, reshard, tensors
from .counts import counts
from .plans import Place, Split, class_of, has_tensors, modules_of, plan_of, refuse
from .sequence import Divided, Whole, part

# Those of `Context` that do not change what is computed, nor where tokens are.
CONTEXT_OPTIONS = frozenset(
    "ulysses ring ranks_per_node gather passes circulate circulate_forward wire reproducible plans workers communicator kernels".split()
)
# Hooks of Diffusers that move weights, and change nothing of what is computed.
MOVES = frozenset(
    "group_offloading layer_execution_tracker lazy_prefetch_group_offloading layerwise_casting peft_autocast_disable".split()
)
_NEED = "every rank calls the model with the same inputs: give all ranks one seed (generator=torch.Generator().manual_seed(…)), or send them those of one rank"
_WEIGHTS = (
    "load the same weights on all ranks, or draw them with the same seed, those of LoRA too; give compare_weights=False where something makes them "
    "equal afterwards (DDP)"
)


@named("model, group=group, ulysses=2")
class ContextParallel:
    """Makes `model`, a transformer of Diffusers, context-parallel, in place, over a process group (None: the default group; or a list of
    global ranks). All ranks make one.

    Afterwards every rank calls the model, or the pipeline it belongs to, with the same inputs, and gets the whole output, as one
    process does. Lengths and heads need not divide anything.

    `gradients` is how gradients of parameters are combined over the ranks, if any are: "mean" (DDP, FSDP) or "sum". `plan` says where the
    sequence is split and gathered, in the form of the model's own `_cp_plan`, for a class that has none. `ulysses`, `ring`, `timeout`,
    `workers`, `communicator`, `kernels` and others are those of `cpattn.torch.Context` (`CONTEXT_OPTIONS`).

    The ranks compare hashes of their models' weights, of shards with those of ranks that hold the same shards; `compare_weights=False` leaves
    it out.

    Under such a plan, or with processors that are not of Diffusers, the first call with each kind of inputs is compared with the model alone
    (`check`), which takes three more passes and the memory of one device: to spare them, call `check` with shorter inputs before.

    Raises Unsupported for a model or an argument that would be wrong, with the reason.
    """

    def __init__(
        self,
        model: Any,
        *,
        group: Members = None,
        plan: Mapping[str, Any] | None = None,
        gradients: str = "mean",
        timeout: float = 300.0,
        compare_weights: bool = True,
        **options: Any,
    ) -> None:
        self.model: Any = model
        self.attention: Attention | None = None
        self._handles: list[Any] = []
        self._collectives: Collectives | None = None
        self._former: list[tuple[Any, Any, Any]] = []
        self._inside = False
        self._comparing = False
        self._compared: set[str] = set()
        self.transport = GlooTransport(group, timeout=timeout)
        self.rank, self.world = self.transport.rank, self.transport.world
        self._settings = Settings(self)
        try:
            with refusing(self.transport):
                if gradients not in ("mean", "sum"):
                    raise refused("gradients", gradients, "'mean' (DDP, FSDP) or 'sum' is needed")
                compare_weights = flag("compare_weights", compare_weights)
                if name := next((name for name in options if name.startswith("layout")), None):
                    raise InvalidArgument(
                        f"{name} is given, and each rank has consecutive tokens of each sequence: leave it out"
                    )
                if unknown := options.keys() - CONTEXT_OPTIONS:
                    raise misspelt("ContextParallel", unknown, CONTEXT_OPTIONS.union(keywords(ContextParallel)))
                # Invalid options are refused here, not with the first call.
                how = {
                    name: value
                    for name, value in options.items()
                    if name not in ("plans", "workers", "communicator", "kernels")
                }
                over_all(Plan([0, 1], world=self.world, heads=64 * self.world, head_dim=16, layout="contiguous", **how))
                self._places, self._known = plan_of(model, plan)
                self._refuse_other(model)
                self._processors = list(self._find(model))
                self._unknown = plan is not None or any(
                    not type(one).__module__.startswith("diffusers.") for one in self._processors
                )
            self._sum = gradients == "sum"
            settings = {
                "model": class_of(model),
                "gradients": gradients,
                "options": sorted(options.items()),
                "compare_weights": compare_weights,
            }
            settings["plan"] = [(p.name, p.inputs, p.outputs, p.gathered) for p in self._places]
            compare_settings(
                self.transport, settings | {"processors": [type(one).__qualname__ for one in self._processors]}
            )
            if compare_weights:
                same_weights(self.transport, model, _WEIGHTS)
            self._collectives = Collectives(self.transport.members, timeout)
            self._attend = Attention(group, self.transport, self._collectives, {"timeout": timeout, **options})
        except BaseException:
            self._leave()
            raise
        self._hook()
        # Looked up before the hooks, which are functions that nobody could pickle.
        model.__reduce_ex__ = self.__reduce_ex__
        self._on()

    def _refuse_other(self, model: Any) -> None:
        if getattr(model, "_cpattn", None) is not None:
            raise InvalidArgument("the model already has a ContextParallel: close it first")
        if getattr(model, "_parallel_config", None) is not None:
            raise Unsupported(
                "enable_parallelism was called on the model, which splits it already: load the model without it"
            )

    def _find(self, model: nn.Module) -> Iterator[Any]:
        """The processors whose attention goes over the ranks."""
        found = 0
        for name, module in model.named_modules():
            if (processor := getattr(module, "processor", None)) is None:
                continue
            if not hasattr(processor, "_parallel_config") or not hasattr(processor, "_attention_backend"):
                raise Unsupported(
                    f"{name} has the processor {type(processor).__name__}, which does not leave attention to Diffusers' dispatch (it has no "
                    "_parallel_config): set another processor"
                )
            local = self._known.local if self._known else ()
            if not any(one in f".{name}" or name.startswith(one) for one in local):
                found += 1
                yield processor
        if not found:
            raise Unsupported(f"{class_of(model)} has no attention processor, whose attention would go over the ranks")

    # The model, changed and as it was.

    def _on(self) -> None:
        self.attention = self._attend
        self.model._cpattn = self
        seen: set[int] = set()
        for processor in self._processors:
            if id(processor) not in seen:
                seen.add(id(processor))
                self._former.append((processor, processor._attention_backend, processor._parallel_config))
                processor._attention_backend, processor._parallel_config = (
                    backend(processor._attention_backend),
                    self._settings,
                )

    def _off(self) -> None:
        self.attention = None
        for processor, usual, settings in self._former:
            processor._attention_backend, processor._parallel_config = usual, settings
        self._former.clear()

    @contextmanager
    def off(self) -> Iterator[None]:
        """`with cp.off():` the model is as before, each rank for itself."""
        self._check_open()
        was_on = self.attention is not None
        self._off()
        try:
            yield
        finally:
            # An outer `off` lasts, and so does a close.
            if was_on and self._collectives is not None:
                self._on()

    def check(self, *args: Any, **kwargs: Any) -> float:
        """Calls the model over the ranks and alone, with the same inputs, and compares the results. All ranks call it, at any time. Returns
        the distance, in units of the results' root mean square; raises Unsupported, on all ranks, if rounding does not explain it.

        Each rank computes the whole sequence, without gradients and in evaluation: give inputs that one device has memory for. In
        float32 it notices what bfloat16 hides."""
        self._check_open()
        if self.attention is None:
            raise InvalidArgument(
                "check was called inside of off(), where the model is not over the ranks: call it outside"
            )
        return self._check(self._named(args, kwargs), inside=False)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(inspect.signature(self.model.forward).parameters, args, strict=False)), **kwargs}

    def _check(self, inputs: dict[str, Any], inside: bool) -> float:
        self._comparing = True
        try:
            with repeatable(self.model):
                found = tensors(self.model(**inputs))
                with refusing(self.transport), self.off():
                    alone = tensors(self.model(**inputs))
                    with moved(self.model):
                        bound = FACTOR * distance(tensors(self.model(**inputs)), alone)
            error = distance(found, alone)
        finally:
            self._comparing = False
            reshard(self.model, inside)
        wrong = not error <= bound
        place = digest(b"check") & ~2
        flags = digests(self.transport, "check", place | wrong << 1)
        if others := [rank for rank, one in enumerate(flags) if one & ~2 != place]:
            raise Disagreement(
                f"ranks {others} of this group are at another place of the model than rank {self.rank}, which compares it with the model alone",
                others[0],
            )
        if every := [rank for rank, one in enumerate(flags) if one & 2]:
            shapes = (
                ""
                if error < float("inf")
                else f" (results {[tuple(one.shape) for one in found]} for {[tuple(one.shape) for one in alone]})"
            )
            raise Unsupported(
                f"the results of {class_of(self.model)} over the ranks are {error:.1e} from those of the model alone, at most {bound:.1e} is due to "
                f"rounding{shapes}, on the ranks {every}: a sequence that the plan leaves whole on each rank, such as a text, counts once for each "
                "rank in attention over the ranks, and a processor that computes attention itself sees one rank's tokens. Split each sequence of "
                "joint attention in plan, gather all outputs, and give all ranks the same weights"
            )
        self._compared.add(_kind(inputs))
        return error

    def close(self) -> None:
        """Gives the model its own attention back, and leaves the group."""
        if self._collectives is not None:
            self._off()
            for handle in self._handles:
                handle.remove()
            del self.model.__reduce_ex__
            self.model._cpattn = None
            self._leave()

    def _leave(self) -> None:
        if self._collectives is not None:
            self._attend.close()
            self._collectives.close()
            self._collectives = None
        self.transport.release()

    def __reduce_ex__(self, _: Any) -> Any:
        raise Unsupported(
            "the model has a ContextParallel, which can be neither copied nor pickled: close it before you copy the model or save it whole "
            "(torch.save), and make one for each; state_dict and save_pretrained are as without it"
        )

    def _check_open(self) -> Collectives:
        if self._collectives is None:
            raise InvalidHandle("the ContextParallel is closed: make a new one, on all ranks of a group")
        return self._collectives

    # Hooks

    def _hook(self) -> None:
        out_of_graphs: Any = torch.compiler.disable
        self._handles.append(
            self.model.register_forward_pre_hook(out_of_graphs(self._before), with_kwargs=True, prepend=True)
        )
        self._handles.append(self.model.register_forward_hook(out_of_graphs(self._after), always_call=True))
        for place in self._places:
            if place.module is not self.model and place.inputs:
                self._handles.append(place.module.register_forward_pre_hook(self._splits(place), with_kwargs=True))
            if place.outputs or place.gathered:
                self._handles.append(place.module.register_forward_hook(self._results(place)))

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.attention is None:
            return None
        kwargs = self._named(args, kwargs)
        if self._unknown and not self._comparing and _kind(kwargs) not in self._compared:
            self._check(kwargs, inside=True)
        top = next((place for place in self._places if place.module is model), None)
        inputs = {} if top is None else top.inputs
        with refusing(self.transport):
            if getattr(model, "is_cache_enabled", False):
                raise Unsupported(
                    "enable_cache was called on the model, which then leaves out layers by what one rank sees: call model.disable_cache()"
                )
            self._check_modules()
            if self._known is not None:
                refuse(class_of(model), self._known, inputs, kwargs)
            shards = {
                name: self._split(name, kwargs[name], how)
                for name, how in inputs.items()
                if kwargs.get(name) is not None
            }
            mine = digest(content(kwargs).encode())
        compare(self.transport, "inputs", mine, _NEED)
        self._inside, self._attend.calls = True, 0
        return (), {**kwargs, **shards}

    def _after(self, model: nn.Module, _: Any, output: Any) -> Any:
        inside, self._inside = self._inside, False
        if not inside or self.attention is None or output is None:
            return None
        if not self._attend.calls:
            raise Unsupported(
                f"no attention of {class_of(model)} went over the ranks, so each has seen its own tokens only: its processors, or plan, are not supported"
            )
        return self._divided(output) if self._sum and torch.is_grad_enabled() else None

    def _divided(self, output: Any) -> Any:
        """The output, of which each rank's loss counts as one part."""
        if isinstance(output, Tensor):
            return Divided.apply(output, self.world) if output.requires_grad else output  # type: ignore[no-untyped-call]
        if isinstance(output, Mapping):
            return type(output)(**{name: self._divided(one) for name, one in output.items()})
        return type(output)(map(self._divided, output)) if isinstance(output, list | tuple) else output

    def _check_modules(self) -> None:
        """Processors that were set after this was made would compute the attention of one rank's tokens, other modules split nothing, and
        hooks of Diffusers compute something else by what one rank has."""
        found = list(self._find(self.model))
        if len(found) != len(self._processors) or any(
            a is not b or a._parallel_config is not self._settings for a, b in zip(found, self._processors, strict=True)
        ):
            raise Unsupported(
                "a processor was set after ContextParallel was made: close the ContextParallel, set the processor, and make it again"
            )
        for name, module in self.model.named_modules():
            for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}):
                if hook not in MOVES:
                    raise Unsupported(
                        f"{name or 'the model'} has the hook {hook} of Diffusers, which may leave out layers by what one rank sees, or attention that goes "
                        "over the ranks: remove it"
                    )
        for place in self._places:
            if dict(modules_of(self.model, place.name)).get(place.name) is not place.module:
                raise Unsupported(
                    f"{place.name} was replaced after ContextParallel was made, as add_adapter does: make the ContextParallel afterwards"
                )

    def _splits(self, place: Place) -> Any:
        names = list(inspect.signature(place.module.forward).parameters)

        @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.attention is None:
                return None
            positions, named_ = list(args), dict(kwargs)
            for name, how in place.inputs.items():
                at = names.index(name)
                if named_.get(name) is not None:
                    named_[name] = self._split(name, named_[name], how)
                elif at < len(positions) and positions[at] is not None:
                    positions[at] = self._split(name, positions[at], how)
            return tuple(positions), named_

        return before

    def _results(self, place: Place) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
        def after(_: nn.Module, __: Any, output: Any) -> Any:
            if self.attention is None:
                return None
            results: list[Any] = [output] if isinstance(output, Tensor) else list(output)
            for at, how in place.outputs.items():
                if at >= len(results):
                    raise InvalidArgument(
                        f"{place.name} has {len(results)} outputs, and plan splits the one with the number {at}"
                    )
                results[at] = self._split(f"output {at} of {place.name}", results[at], how)
            if place.gathered and len(results) != len(place.gathered):
                raise InvalidArgument(
                    f"{place.name} has {len(results)} outputs, and plan gathers {len(place.gathered)}"
                )
            results = (
                [
                    one if dim is None else self._gathered(one, dim)
                    for one, dim in zip(results, place.gathered, strict=True)
                ]
                if place.gathered
                else results
            )
            return results[0] if isinstance(output, Tensor) else tuple(results)

        return after

    def _split(self, name: str, x: Any, how: Split) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(self._split(name, one, how) for one in x)
        if not isinstance(x, Tensor):
            raise InvalidArgument(f"{name} is of the type {type(x).__name__}, a tensor is needed")
        if (dim := how.dims.get(x.ndim)) is None:
            if x.ndim <= min(how.dims.values()):  # it has no such dim, as timesteps of the whole batch
                return x
            raise Unsupported(
                f"{name} has the shape {tuple(x.shape)}, {' or '.join(map(str, how.dims))} dims are needed, of which the tokens' is split"
            )
        if how.broadcast and x.shape[dim] == 1:
            return x
        if x.shape[dim] < self.world and not (self._known and name in self._known.short):
            raise Unsupported(
                f"{name} has {x.shape[dim]} tokens, and each of the {self.world} ranks needs one: use fewer ranks, or lengthen it"
            )
        return part(x, dim, self.rank, self.world)

    def _gathered(self, x: Tensor, dim: int) -> Tensor:
        (each,) = counts(
            self.transport, "outputs", (dim, str(x.dtype), x.shape[:dim], x.shape[dim + 1 :]), x.shape[dim]
        )
        rows: Tensor = Whole.apply(x.transpose(0, dim), each, self.rank, self._check_open())  # type: ignore[no-untyped-call]
        return rows.transpose(0, dim)


def _kind(inputs: Mapping[str, Any]) -> str:
    """Which inputs have tensors, and of how many dims and which type: what decides which parts of a model run."""
    return repr(
        sorted(
            (name, [(one.ndim, one.dtype) for one in tensors(value)])
            for name, value in inputs.items()
            if has_tensors(value)
        )
    )
