# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times what PyTorch brings along, on the cases of `cases.txt`.

Each line on the standard input is `PEER CASE`; each is answered with one JSON object: `peer_s`, the median of device
events, or `failed` and why. After a fault of a kernel the context is of no use for any later case: the answer then says
`ended`, and this program ends. Inputs are standard normal numbers, in several sets that together exceed the L2 cache, and
are kept while the same case comes again. `--peers` lists what is known, `--probe` says what machine this is.

    cudnn                 scaled_dot_product_attention, cuDNN alone
    flash                 scaled_dot_product_attention, FlashAttention-2 alone; a narrower v is padded to head_dim
    flash-deterministic   the same with a backward that gives the same bits each time
    varlen                FlashAttention-2 over packed documents, as PyTorch carries it
    varlen-deterministic  likewise
    cudnn-varlen          cuDNN over packed documents, forward, through ATen: no public call leads there
    fa3, fa3-varlen       FlashAttention-3 in the place of FlashAttention-2 (a process of its own: the choice is global)
    triton                the attention kernel of Triton's tutorials, forward
    copy                  a device copy of the bytes that are moved

Two of them are not part of PyTorch. CPATTN_FA3 names the library of FlashAttention-3 (flash_attn_3/_C.so of the xformers
wheel, which uses PyTorch's stable interface only) and CPATTN_FA3_CUDART the libcudart.so.12 that it wants;
CPATTN_TRITON_TUTORIAL names Triton's python/tutorials/06-fused-attention.py; `brought.py` says where else they are looked
for. Without them these peers refuse.
"""

import ctypes
import importlib.util
import json
import statistics
import sys
import types

from brought import located

PEERS = (
    "cudnn",
    "flash",
    "flash-deterministic",
    "varlen",
    "varlen-deterministic",
    "cudnn-varlen",
    "fa3",
    "fa3-varlen",
    "triton",
    "copy",
)


class Case:
    """A line of cases.txt; benches/cuda/case.rs explains the words."""

    def __init__(self, line):
        self.name, *words = line.split()
        value = dict(word.split("=", 1) for word in words)
        self.kind, self.dtype, self.mask = value["kind"], value["dtype"], value["mask"]
        self.causal = self.mask == "causal"
        self.heads, self.kv_heads = map(int, value["heads"].split("/"))
        self.head_dim, self.value_dim = map(int, value["dims"].split("/"))
        self.lengths = []
        for word in value["lengths"].split(","):
            length, _, times = word.partition("*")
            self.lengths += [int(length)] * int(times or 1)
        self.peers = value["peers"].split(",")

    @property
    def tokens(self):
        return sum(self.lengths)


def median_seconds(torch, call, sets, warmup, repeats):
    """Median of `repeats` calls, each between two events; the host waits only at the end."""
    for i in range(warmup):
        call(sets[i % len(sets)])
    events = []
    for i in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(sets[(warmup + i) % len(sets)])
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def set_count(torch, size):
    """Enough sets that one has left the cache when its turn comes again."""
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    return max(2, min(8, -(-2 * cache // max(size, 1))))


def copies(torch, case, dtype):
    n = case.tokens * case.heads * case.head_dim
    source = torch.randn(n, device="cuda", dtype=torch.float32).to(dtype)
    sets = [(source.clone(), torch.empty_like(source)) for _ in range(set_count(torch, 4 * n))]
    return sets, lambda s: s[1].copy_(s[0])


def attention(torch, case, dtype, peer):
    """Sets of inputs and the call to time. What only the backward needs is made outside the time."""
    backward = case.kind == "backward"
    packed = "varlen" in peer
    pad = (peer.startswith("flash") or peer == "varlen") and case.value_dim < case.head_dim
    shapes = [(case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim)]

    def random(heads, dim):
        return torch.randn(case.tokens, heads, dim, device="cuda", dtype=torch.float32).to(dtype)

    first = [random(*shape) for shape in shapes] + [random(case.heads, case.value_dim)]
    if pad:
        missing = case.head_dim - case.value_dim
        first[2:] = [torch.nn.functional.pad(x, (0, missing)) for x in first[2:]]
    if not packed:
        if len(set(case.lengths)) != 1:
            raise ValueError("scaled_dot_product_attention takes no documents of several lengths")
        # [batch, heads, tokens, dim] over memory of [batch, tokens, heads, dim].
        batch = (len(case.lengths), case.lengths[0])
        first = [x.view(*batch, *x.shape[1:]).transpose(1, 2) for x in first]
    size = sum(x.numel() * x.element_size() for x in first)

    forward = varlen(torch, case, peer) if packed else padded(torch, case, peer)
    sets = []
    for _ in range(set_count(torch, size)):
        # preserve_format keeps the strides of the views above.
        q, k, v, d_o = (x.detach().clone(memory_format=torch.preserve_format) for x in first)
        if backward:
            for x in (q, k, v):
                x.requires_grad_(True)
            out = forward(q, k, v)
            sets.append((q, k, v, d_o, out))
        else:
            sets.append((q, k, v))
    if backward:
        return sets, lambda s: torch.autograd.grad(s[4], s[:3], s[3], retain_graph=True)
    return sets, lambda s: forward(*s)


def padded(torch, case, peer):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if peer == "triton":
        return tutorial(case)
    backend = SDPBackend.CUDNN_ATTENTION if peer == "cudnn" else SDPBackend.FLASH_ATTENTION

    def forward(q, k, v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
            )

    return forward


def varlen(torch, case, peer):
    starts = [0]
    for length in case.lengths:
        starts.append(starts[-1] + length)
    cu_seqlens = torch.tensor(starts, device="cuda", dtype=torch.int32)
    longest = max(case.lengths)
    packs = (cu_seqlens, cu_seqlens, longest, longest)
    # The operators under varlen_attn, which itself takes no groups of heads in PyTorch 2.11.
    if peer == "cudnn-varlen":
        if case.kind == "backward":
            raise ValueError("only the forward is called here")
        operator = torch.ops.aten._cudnn_attention_forward
        return lambda q, k, v: operator(q, k, v, None, *packs, True, 0.0, case.causal, False)[0]
    operator = torch.ops.aten._flash_attention_forward
    return lambda q, k, v: operator(q, k, v, *packs, 0.0, case.causal, False)[0]


def named(variable, what):
    path = located(variable)
    if path is None:
        raise ValueError(f"{variable} does not name {what}")
    return str(path)


def tutorial(case):
    if case.kind == "backward" or case.heads != case.kv_heads or case.head_dim != case.value_dim:
        raise ValueError("the tutorial's forward has neither groups of heads nor two dims")
    path = named("CPATTN_TRITON_TUTORIAL", "Triton's 06-fused-attention.py")
    spec = importlib.util.spec_from_file_location("fused_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scale = case.head_dim**-0.5
    return lambda q, k, v: module.attention(q.contiguous(), k.contiguous(), v.contiguous(), case.causal, scale)


def activate_fa3(torch):
    """From here on this process has FlashAttention-3 wherever PyTorch would take FlashAttention-2."""
    library = named("CPATTN_FA3", "FlashAttention-3's library")
    runtime = located("CPATTN_FA3_CUDART")
    if runtime:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(library)
    # PyTorch asks for a package of this name, of which it needs only the operators that were just loaded.
    sys.modules.setdefault("flash_attn_interface", types.ModuleType("flash_attn_interface"))
    torch.nn.attention.activate_flash_attention_impl("FA3")


class Held:
    """The buffers of the last question, in case it comes again."""

    def __init__(self, torch):
        self.torch, self.line, self.sets, self.call = torch, None, None, None
        self.fa3 = self.asked = False

    def answer(self, line, warmup, repeats):
        torch = self.torch
        peer, _, rest = line.partition(" ")
        if line != self.line:
            self.line = self.sets = self.call = None
            torch.cuda.empty_cache()
            case = Case(rest)
            dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
            if peer not in PEERS:
                raise ValueError(f"{peer} is none of {', '.join(PEERS)}")
            if self.fa3 != peer.startswith("fa3"):
                if self.fa3 or self.asked:
                    raise ValueError("FlashAttention-2 and -3 take a process each")
                activate_fa3(torch)
                self.fa3 = True
            self.asked = True
            torch.manual_seed(1)
            self.sets, self.call = copies(torch, case, dtype) if peer == "copy" else attention(torch, case, dtype, peer)
            self.line = line
        # Deterministic mode would also fill new memory with NaN, which is no part of attention.
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(peer.endswith("-deterministic"))
        return median_seconds(torch, self.call, self.sets, warmup, repeats)


def context_is_lost(torch):
    """Whether the context takes no work any more, as after a fault of a kernel. A peer that refuses leaves it whole."""
    try:
        torch.cuda.synchronize()
        torch.zeros(256, device="cuda").sum().item()
    except Exception:  # a CUDA error is a RuntimeError of its own in each version
        return True
    return False


def serve(torch, warmup, repeats, lines=sys.stdin):
    """Answers every line; returns the program's status."""
    held = Held(torch)
    for line in lines:
        lost = False
        try:
            answer = {"peer_s": held.answer(line.strip(), warmup, repeats)}
        except Exception as error:  # a peer may refuse a case in any way it likes
            answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            held.line = held.sets = held.call = None
            lost = context_is_lost(torch)
            if lost:
                answer["ended"] = True
        print(json.dumps(answer), flush=True)
        if lost:
            return 1
    return 0


def usable_torch():
    """torch with a CUDA device, or a sentence that says what is missing."""
    try:
        import torch
    except ImportError:
        return None, "there is no PyTorch in this Python"
    if not torch.cuda.is_available():
        return None, f"PyTorch {torch.__version__} finds no CUDA device"
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
        return None, f"PyTorch {torch.__version__} is older than 2.11"
    return torch, None


def main(arguments):
    if "--peers" in arguments:
        print(" ".join(PEERS))
        return 0
    torch, missing = usable_torch()
    if missing:
        print(f"{missing}; nothing to compare with", file=sys.stderr)
        return 3
    if "--probe" in arguments:
        print(
            json.dumps(
                {
                    "device": torch.cuda.get_device_name(0),
                    "torch": torch.__version__,
                    "cuda": torch.version.cuda,
                    "cudnn": torch.backends.cudnn.version(),
                }
            )
        )
        return 0
    numbers = [int(x) for x in arguments if x.isdigit()]
    return serve(torch, *(numbers if len(numbers) == 2 else (5, 30)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
