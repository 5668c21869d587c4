# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether a model is still what ContextParallel has tried: its attention, its adapters and its mixers.

A user may change a model afterwards, or a library does. A layer that then runs its own attention sees the tokens of this rank alone, and its result
is wrong without an error. So each pass compares the names of attention in the model's configs and the forwards that were replaced before it,
and how often attention has run after it. New modules around or in place of others (PEFT) are no change: what hooks need is looked up at use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from cpattn.errors import Unsupported
from .attention import NAME

if TYPE_CHECKING:
    from .parallel import ContextParallel

WAY_OUT = "each rank would attend to its own tokens alone. Change it before ContextParallel(model), or after close()"

# The function of accelerate.big_modeling that attaches them.
ACCELERATE = "_attach_context_parallel_hooks."


def replaced(module: nn.Module, name: str, function: Any) -> bool:
    """Whether a method of a module is a partial of this function, also inside of what accelerate puts around a forward."""
    methods = (vars(module).get(name), vars(module).get("_old_forward"))
    return any(isinstance(one, partial) and one.func is function for one in methods)


def configs_of(model: nn.Module, towers: Sequence[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    """The configs that say how a model's layers attend, each with the class of a module that has it, without those of its towers. A copy of a layer (modules_to_save of PEFT) has a copy."""
    tower_ids, text = {id(config) for config, _ in towers}, type(model.config.get_text_config())  # type: ignore[operator, union-attr]
    every = ((type(module).__name__, vars(module).get("config")) for module in model.modules())
    found: dict[int, tuple[str, Any]] = {}
    for name, config in every:
        if isinstance(config, text) and id(config) not in tower_ids:
            found.setdefault(id(config), (name, config))
    return list(found.values())


class Integrity:
    def __init__(self, cp: ContextParallel) -> None:
        self._cp, self._before = cp, 0
        # Configs that layers with adapters do not read.
        self._others = [config for _, config in self._configs() if config._attn_implementation != NAME]

    def _configs(self) -> list[tuple[str, Any]]:
        return configs_of(self._cp.model, self._cp._images.towers)

    def check(self) -> None:
        """Before a pass."""
        self._take_over()
        for name, config in self._configs():
            if (implementation := config._attn_implementation) != NAME and all(
                config is not one for one in self._others
            ):
                raise Unsupported(
                    f"the attention of {name} is {implementation!r} (set_attn_implementation, config._attn_implementation), and ContextParallel needs {NAME!r}: {WAY_OUT}"
                )
        for module, name, function in (*self._cp._mixers.replaced(), *self._cp._adapters.replaced()):
            if not replaced(module, name, function):
                raise Unsupported(
                    f"something has replaced {name} of {type(module).__name__}, which ContextParallel had replaced: {WAY_OUT}"
                )

    def _take_over(self) -> None:
        """Takes the hooks of accelerate's context parallelism away (cp_size of its ParallelismConfig), which drop the masks of layers."""
        for module in self._cp.model.modules():
            for number, hook in list(module._forward_pre_hooks.items()):
                if getattr(hook, "__qualname__", "").startswith(ACCELERATE):
                    del module._forward_pre_hooks[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)

    def begin(self) -> None:
        self._before = self._runs()

    def end(self) -> None:
        """After a pass."""
        model, found, needed = self._cp.model, self._runs() - self._before, self._cp._found.runs
        if found < needed:
            raise Unsupported(
                f"the layers of {type(model).__name__} ran attention {found} times in this pass and {needed} times when ContextParallel tried the model: "
                f"something has replaced it in a layer, and {WAY_OUT}"
            )

    def _runs(self) -> int:
        of_groups = 0 if self._cp.sizes is None else self._cp.sizes.runs()
        return of_groups + sum(context.runs for context in self._cp._contexts.values())
