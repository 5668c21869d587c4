# SPDX-License-Identifier: MIT OR Apache-2.0
"""Forward and backward over four ranks on one CUDA device, compared with one rank on the CPU.

    capi/build --cuda && PYTHONPATH=python python3 examples/python/cuda_ranks.py

With a PyTorch that has CUDA, tensors and streams are PyTorch's. Otherwise memory comes from the driver itself, which is
how this runs on the stand-in driver. cpattn gets DLTensors and a stream in both cases.
"""

import argparse
import ctypes
import random
import struct

import cpattn

DEVICE, WORLD = 0, 4
DOCUMENTS, HEADS, KV_HEADS, DIM = [0, 37, 37, 58, 90], 4, 2, 32
TOKENS = DOCUMENTS[-1]


class Torch:
    """PyTorch's tensors, on its current stream."""

    def __init__(self):
        import torch

        if not torch.cuda.is_available():
            raise ImportError("PyTorch without CUDA")
        self.torch = torch

    def enter(self):
        """Called once on each thread: makes its stream."""
        self.torch.cuda.set_device(DEVICE)
        self.torch.cuda.set_stream(self.torch.cuda.Stream())

    def stream(self):
        return self.torch.cuda.current_stream().cuda_stream

    def array(self, shape, bits, data=None):
        kind = {16: self.torch.float16, 32: self.torch.float32}[bits]
        if data is None:
            return self.torch.empty(shape, dtype=kind, device="cuda")
        return self.torch.frombuffer(bytearray(data), dtype=kind).reshape(shape).cuda()

    def read(self, tensor):
        """Waits for the current stream."""
        return bytes(tensor.cpu().flatten().view(self.torch.uint8).tolist())


class Driver:
    """Memory and streams of the CUDA driver."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), DEVICE)
        self.streams = {}

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise OSError(f"{name} failed with {code}")

    def enter(self):
        import threading

        self.call("cuCtxSetCurrent", self.context)
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        self.streams[threading.get_ident()] = stream

    def stream(self):
        import threading

        return self.streams[threading.get_ident()]

    def array(self, shape, bits, data=None):
        count = 1
        for n in shape:
            count *= n
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count * bits // 8 + 1))
        memory = cpattn.Memory(address.value, shape, bits, device=(2, DEVICE))
        memory.bytes = count * bits // 8
        if data is not None:
            self.call("cuMemcpyHtoDAsync_v2", address, data, ctypes.c_size_t(memory.bytes), self.stream())
        return memory

    def read(self, memory):
        data = ctypes.create_string_buffer(memory.bytes + 1)
        self.call(
            "cuMemcpyDtoHAsync_v2",
            data,
            ctypes.c_uint64(memory.tensor.data),
            ctypes.c_size_t(memory.bytes),
            self.stream(),
        )
        self.call("cuStreamSynchronize", self.stream())
        return data.raw[: memory.bytes]


def on_cpu(inputs):
    """One rank, the whole batch; results as bytes."""
    plan = cpattn.Plan(DOCUMENTS, HEADS, DIM, kv_heads=KV_HEADS, dtype=cpattn.Dtype.F16)
    (rank,) = cpattn.local_group(1)
    kept = {}

    def array(shape, bits, data=None):
        count = shape[0] * shape[1] * (shape[2] if len(shape) == 3 else 1)
        buffer = ctypes.create_string_buffer(data or b"\xff" * (count * bits // 8), count * bits // 8)
        memory = cpattn.Memory(ctypes.addressof(buffer), shape, bits)
        kept[id(memory)] = buffer
        return memory

    tensors = job_tensors(array, inputs, TOKENS, TOKENS)
    run(rank, plan, tensors, None)
    return {name: kept[id(memory)].raw for name, memory in tensors.items()}


def job_tensors(array, inputs, nq, nk):
    """The tensors of a rank with these numbers of q and k tokens."""
    tensors = {
        name: array((n, h, DIM), 16, inputs[name])
        for name, n, h in (("q", nq, HEADS), ("k", nk, KV_HEADS), ("v", nk, KV_HEADS), ("d_o", nq, HEADS))
    }
    tensors["lse"] = array((HEADS, nq), 32)
    for name, n, h in (("o", nq, HEADS), ("dq", nq, HEADS), ("dk", nk, KV_HEADS), ("dv", nk, KV_HEADS)):
        tensors[name] = array((n, h, DIM), 16)
    return tensors


def run(rank, plan, tensors, stream):
    forward = {name: tensors[name] for name in ("q", "k", "v", "o", "lse")}
    rank.forward(plan, stream, **forward)
    rank.backward(plan, stream, **tensors)


def rows(data, heads, tokens):
    """Rows of a [tokens, heads, DIM] tensor of f16, given and returned as bytes."""
    row = heads * DIM * 2
    return b"".join(data[t * row : (t + 1) * row] for t in tokens)


def batch():
    """Inputs of the whole batch."""
    draw = random.Random(5)
    return {
        name: struct.pack(f"<{TOKENS * h * DIM}e", *(draw.gauss(0, 1) for _ in range(TOKENS * h * DIM)))
        for name, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS), ("d_o", HEADS))
    }


def part(device, plan, whole, want, number, rank):
    """The job of one rank. Returns the relative errors against the results of the CPU."""
    device.enter()
    tq, tk = plan.tokens(cpattn.Side.Q, number), plan.tokens(cpattn.Side.K, number)
    mine = {
        name: rows(data, KV_HEADS if name in "kv" else HEADS, tk if name in "kv" else tq)
        for name, data in whole.items()
    }
    for direction in (cpattn.Direction.FORWARD, cpattn.Direction.BACKWARD):
        rank.prepare(plan, direction)
    tensors = job_tensors(device.array, mine, len(tq), len(tk))
    run(rank, plan, tensors, device.stream())  # enqueued after the uploads; no wait so far
    worst = {}
    for name in ("o", "dq", "dk", "dv"):
        heads, tokens = (KV_HEADS, tk) if name in ("dk", "dv") else (HEADS, tq)
        exact = rows(want[name], heads, tokens)
        got, exact = (struct.unpack(f"<{len(data) // 2}e", data) for data in (device.read(tensors[name]), exact))
        error, size = sum((g - e) ** 2 for g, e in zip(got, exact)), sum(e * e for e in exact)
        worst[name] = (error / size) ** 0.5
    rank.poll()
    return worst


def report(number, errors):
    print(f"rank {number}:", ", ".join(f"{name} {e:.1e}" for name, e in errors.items()))
    assert all(e <= 2e-3 for e in errors.values()), "each side rounds to f16: about 4e-4"


def main(device):
    whole = batch()
    want = on_cpu(whole)
    plan = cpattn.Plan(DOCUMENTS, HEADS, DIM, kv_heads=KV_HEADS, dtype=cpattn.Dtype.F16, world=WORLD, ulysses=2, ring=2)

    def job(number, rank):
        return part(device, plan, whole, want, number, rank)

    for number, errors in enumerate(cpattn.on_all(cpattn.peer_group([DEVICE] * WORLD), job)):
        report(number, errors)
    print("ok")


def memory():
    """Memory of PyTorch with CUDA, otherwise of the driver. Ends the program without a driver."""
    try:
        return Torch()
    except ImportError:
        try:
            return Driver()
        except OSError as e:
            print(f"not run: {e}")
            raise SystemExit(0) from e


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    chosen = memory()
    print("memory of", type(chosen).__name__)
    main(chosen)
