# SPDX-License-Identifier: MIT OR Apache-2.0
"""Completions from a vLLM server, for GRPO and RLOO: one request for all groups, and one push of weights for all processes.

TRL's process 0 alone has a connection to the server. It gathers the prompts of all processes, sends one request, and gives each process its
share of the completions. Ranks of a group have the same prompts, so here each group gives its prompts once, and all its ranks get the group's
share. All processes take part in gathering weights that are in shards (FSDP, ZeRO), and process 0 sends them.

What fails at process 0, such as a server that does not answer, is raised by all processes: the others would wait for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cpattn.errors import Error, Unsupported

if TYPE_CHECKING:
    from .parallel import ContextParallel

# Options of GRPOConfig and RLOOConfig for other ways to generate.
CONTINUOUS = "use_transformers_continuous_batching"


def refuse_generators(arguments: Any, more: dict[str, Any]) -> None:
    """Refuses ways to generate in which ranks of a group would get other completions, from a trainer's config and its other arguments."""
    if getattr(arguments, CONTINUOUS, False):
        raise Unsupported(
            f"{CONTINUOUS} is True, which is not supported: leave it out (the model generates), or set use_vllm=True and vllm_mode='server'"
        )
    if not getattr(arguments, "use_vllm", False):
        return
    if (mode := arguments.vllm_mode) != "server":
        raise Unsupported(
            f"use_vllm is True and vllm_mode is {mode!r}, 'server' is needed: an engine inside of each process would generate completions of its own on each "
            "rank of a group. Start `vllm serve` on other devices, and give vllm_server_base_url"
        )
    for name in ("tools", "environment_factory"):
        if more.get(name):
            raise Unsupported(
                f"use_vllm is True and {name} is given, which is not supported together: how often the server is asked depends on what tools answer, which each "
                "process calls by itself. Leave use_vllm out (the model generates), or give rollout_func"
            )


@contextmanager
def served(cp: ContextParallel, module: str) -> Iterator[None]:
    """Inside of it, trainers of a module of TRL's are made with the class below in place of TRL's VLLMGeneration."""
    trl = sys.modules[module]
    usual = trl.VLLMGeneration
    trl.VLLMGeneration = generation(cp, usual)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trl.VLLMGeneration = usual  # type: ignore[attr-defined]


def generation(cp: ContextParallel, kind: type[Any]) -> type[Any]:
    from accelerate.utils import broadcast_object_list, gather_object  # type: ignore[import-untyped, unused-ignore]

    def agree(action: str, number: int, error: Exception | None) -> None:
        """Raises on all processes what one of them has raised. All call it."""
        failures = gather_object(
            [] if error is None else [f"process {number} failed {action}: {type(error).__name__}: {error}"]
        )
        if error is not None:
            raise error
        if failures:
            raise Error(failures[0])

    class Generation(kind):  # type: ignore[misc]
        _walk: Any = None

        def _init_vllm(self) -> None:
            accelerator, error = self.accelerator, None
            accelerator.wait_for_everyone = lambda: (
                None
            )  # `agree` waits too, and a process that failed takes part in it
            try:
                super()._init_vllm()
                if accelerator.is_main_process:  # TRL asks once more, outside of `agree`, what the server is
                    info = self.vllm_client.get_server_info()
                    self.vllm_client.get_server_info = lambda: info
            except Exception as caught:  # noqa: BLE001 (raised below)
                error = caught
            finally:
                del accelerator.wait_for_everyone
            agree("at connecting to the vLLM server", accelerator.process_index, error)

        def _iter_named_params(self) -> Iterator[Any]:
            self._walk = super()._iter_named_params()
            return self._walk  # type: ignore[no-any-return]

        def sync_weights(self) -> None:
            error = None
            try:
                super().sync_weights()
            except Exception as caught:  # noqa: BLE001 (raised below)
                error = caught
                for _ in self._walk or ():  # the other processes gather the rest
                    pass
            finally:
                self._walk = None
            agree("at sending weights to the vLLM server", cp._number, error)

        def generate(
            self, prompts: list[Any], images: list[Any] | None, num_generations: int, profiler: Any = None
        ) -> tuple[Any, ...]:
            mine = cp.rank == 0
            every = gather_object([(prompts, images if images is not None else [None] * len(prompts))] if mine else [])
            result: Any = None
            if self.accelerator.is_main_process:
                try:
                    result = (
                        "completions",
                        self._ask(
                            [one for part, _ in every for one in part],
                            [one for _, part in every for one in part],
                            num_generations,
                            profiler,
                        ),
                    )
                except Exception as caught:
                    broadcast_object_list(
                        [
                            (
                                "failure",
                                f"process 0 failed at a request to the vLLM server: {type(caught).__name__}: {caught}",
                            )
                        ]
                    )
                    raise
            result = broadcast_object_list([result])[0]
            if result[0] == "failure":
                raise Error(result[1])
            before = sum(len(part) for part, _ in every[: cp.replica])
            return tuple(None if column is None else column[before : before + len(prompts)] for column in result[1])

        def _ask(self, prompts: list[Any], images: list[Any], num_generations: int, profiler: Any) -> tuple[Any, ...]:
            """TRL's request, as of a job of one process."""
            module: Any = sys.modules[kind.generate.__module__]
            usual = module.gather_object, module.broadcast_object_list
            module.gather_object, module.broadcast_object_list = (
                (lambda whole: whole),
                (lambda whole, from_process=0: whole),
            )
            try:
                found: tuple[Any, ...] = super().generate(prompts, images, num_generations, profiler)
            finally:
                module.gather_object, module.broadcast_object_list = usual
            if len(found[1]) != len(prompts):
                raise Error(f"the server gave {len(found[1])} completions, {len(prompts)} are needed")
            return found

    Generation.__name__, Generation.__module__ = kind.__name__, kind.__module__
    return Generation
