# SPDX-License-Identifier: MIT OR Apache-2.0
"""A server that speaks what TRL's client of `vllm serve` speaks, over HTTP on the loopback, and what stands for vLLM in a trainer's process.

Completions follow from the prompt, their number and how often weights were sent, so that any job gets the same ones. Log-probabilities are
those of a small model with the weights that were sent, moved by up to SHIFT, as another engine's are; now and then one is NaN, as vLLM's.
Tensors come by HTTP instead of NCCL. As in vLLM, the request that announces them is answered once they have arrived.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import models
import torch

SHIFT = 0.15
EOS = 2


class Double:
    """The state of a server: `requests` has the prompts and their number of completions of each request, `pushes` the names of tensors and the sums
    of each push. `fails` is a path that is answered by an error from the request number `after` on."""

    def __init__(self, name: str, fails: str | None = None, after: int = 0) -> None:
        self.model = models.build(name).eval()
        self.fails, self.after = fails, after
        self.requests: list[tuple[list[list[int]], int]] = []
        self.pushes: list[dict[str, float]] = []
        self.calls: list[str] = []
        self.errors: list[str] = []
        self.arrived = threading.Event()
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.updating = self.fresh = False

    def answer(self, path: str, body: bytes) -> Any:
        self.calls.append(path)
        if path == self.fails and self.calls.count(path) > self.after:
            raise ValueError("as the test wants it")
        if path == "/tensors":
            self.tensors = torch.load(io.BytesIO(body))
            self.arrived.set()
            return {}
        given = json.loads(body or b"{}")
        if path == "/v1/models":
            return {"data": [{"id": "small"}]}
        if path == "/server_info":
            return {
                "vllm_config": {
                    "weight_transfer_config": {"backend": "nccl"},
                    "model_config": {"logprobs_mode": "processed_logprobs"},
                }
            }
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            assert given["init_info"]["world_size"] == 2, given
        elif path == "/start_weight_update":
            assert not self.updating, "a push began within a push"
            self.updating = True
        elif path == "/update_weights":
            self._update(given["update_info"])
        elif path == "/finish_weight_update":
            assert self.updating, "a push ended that had not begun"
            self.updating, self.fresh = False, True
        elif path == "/reset_prefix_cache":
            self.fresh = False
        elif path == "/v1/completions":
            return self._complete(given)
        elif path != "/health":
            raise ValueError(f"{path} is no path of the server")
        return {"success": True}

    def _update(self, info: dict[str, Any]) -> None:
        assert self.updating, "tensors outside of a push"
        assert self.arrived.wait(60), "no tensors came"
        self.arrived.clear()
        found = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in self.tensors]
        assert found == list(zip(info["names"], info["dtype_names"], map(list, info["shapes"]), strict=True)), (
            "other tensors than announced"
        )
        tied = ["lm_head.weight"] * bool(self.model.config.tie_word_embeddings)  # sent once
        loaded = self.model.load_state_dict(dict(self.tensors), strict=False)
        assert loaded.unexpected_keys == [] and loaded.missing_keys == tied, loaded
        self.pushes.append({name: float(tensor.double().sum()) for name, tensor in self.tensors})

    def _complete(self, given: dict[str, Any]) -> dict[str, Any]:
        assert not self.updating and not self.fresh, "the prefix cache has rows of older weights"
        self.requests.append((given["prompt"], given["n"]))
        choices = []
        for prompt in given["prompt"]:
            for number in range(given["n"]):
                draw = torch.Generator().manual_seed(hash((*prompt, number, len(self.pushes))) % 2**31)
                length = int(torch.randint(1, given["max_tokens"] + 3, (1,), generator=draw))
                tokens = torch.randint(3, models.WORDS, (min(length, given["max_tokens"]),), generator=draw)
                if length <= given["max_tokens"]:
                    tokens[-1] = EOS
                with torch.no_grad():
                    logits = (
                        self.model(input_ids=torch.tensor([[*prompt, *tokens.tolist()]])).logits[
                            0, len(prompt) - 1 : -1
                        ]
                        / given["temperature"]
                    )
                scores = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0] + SHIFT * (
                    2 * torch.rand(len(tokens), generator=draw) - 1
                )
                scores[torch.rand(len(tokens), generator=draw) < 0.05] = torch.nan
                names = [f"token_id:{token}" for token in tokens.tolist()]
                logprobs = {
                    "tokens": names,
                    "token_logprobs": scores.tolist(),
                    "top_logprobs": [{n: s} for n, s in zip(names, scores.tolist(), strict=True)],
                }
                choices.append({"prompt_token_ids": prompt, "token_ids": tokens.tolist(), "logprobs": logprobs})
        return {"choices": choices}


@contextmanager
def serving(name: str, **more: Any) -> Iterator[tuple[Double, str]]:
    """A double with the model of this name, in a thread, and its address."""
    double, lock = Double(name, **more), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            try:
                if path in ("/tensors", "/update_weights"):  # the second waits for the first
                    status, found = 200, double.answer(path, body)
                else:
                    with lock:
                        status, found = 200, double.answer(path, body)
            except Exception as error:  # noqa: BLE001 (sent)
                double.errors.append(f"{path}: {error!r}")
                status, found = 400, {"error": repr(error)}
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _do

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield double, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Engine:
    """Stands for vLLM's NCCLWeightTransferEngine (vLLM 0.22 to 0.27), at the trainer's side."""

    address = ""

    @staticmethod
    def trainer_init(init_info: dict[str, Any]) -> Any:
        return "a group"

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        import requests

        assert trainer_args == {"group": "a group", "packed": True}
        data = io.BytesIO()
        torch.save([(name, tensor.detach().clone()) for name, tensor in iterator], data)
        requests.post(f"{_Engine.address}/tensors", data=data.getvalue(), timeout=60).raise_for_status()


def install(address: str) -> None:
    """Makes TRL of this process, which is a rank's own, find a vLLM. Weights of a CPU are sent too."""
    from trl.generation import vllm_client, vllm_generation

    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    client: Any = vllm_client
    usual = client.VLLMClient

    def init_communicator(self: Any, device: Any = 0) -> None:
        assert self.get_server_info()["weight_transfer_config"] is not None
        info = {
            "master_address": "127.0.0.1",
            "master_port": self.group_port,
            "rank_offset": 1,
            "world_size": self.get_world_size() + 1,
        }
        with ThreadPoolExecutor(max_workers=1) as executor:
            future = executor.submit(
                self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info}
            )
            self.communicator = client.NCCLWeightTransferEngine.trainer_init(info)
            future.result()

    _Engine.address = address
    client.is_vllm_available = vllm_generation.is_vllm_available = lambda min_version=None: True  # type: ignore[attr-defined]
    client.NCCLWeightTransferEngine, client.NCCLTrainerSendWeightsArgs = _Engine, dict
    usual.init_communicator = init_communicator


def free_address() -> str:
    """An address at which nobody listens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.server_close()
    return f"http://127.0.0.1:{server.server_port}"
