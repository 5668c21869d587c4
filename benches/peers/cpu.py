# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times this crate and PyTorch on one CPU, call by call in one process, on the same tensors.

Each line on the standard input is a JSON object: `case` (a line of cpu_cases.txt), `threads`, `rounds` and `seconds`.
Each is answered with one JSON object: the seconds of every call by direction and side, and by how much the results of
both sides differ; or `failed` and why. `cpu_measure.py` asks.

    torch         scaled_dot_product_attention and its gradient; a narrower v is padded to head_dim, outside of the time
    torch-loop    the same for each document by itself, each with leaves of its own
    torch-masked  the same over the whole pack, with a mask made outside of the time
    ours-dense    this crate on 4,096 tokens without a mask, scaled to as many pairs

Ours goes through the C library on the memory of PyTorch's tensors, and its backward is all that a user calls: row sums,
gradients and their rounding to the type of q.
"""

import json
import math
import pathlib
import sys
import time

import peers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))

PEERS = ("torch", "torch-loop", "torch-masked", "ours-dense")
DENSE = 4096
# RMS of the difference of both sides over the RMS of PyTorch's result. Each side rounds what it writes once, and PyTorch
# the probabilities and their gradients too; ten times what was seen.
BOUNDS = {"f32": 1e-5, "f16": 5e-3, "bf16": 3e-2}
MOST_ROUNDS = 101


class Case(peers.Case):
    """A line of cpu_cases.txt."""

    def __init__(self, line, quick=False):
        words = line.split()
        value = dict(word.split("=", 1) for word in words[1:])
        if quick and "quick" in value:
            words = [f"lengths={value['quick']}" if word.startswith("lengths=") else word for word in words]
        super().__init__(" ".join([words[0], "kind=both", *words[1:]]))
        self.line = " ".join(words)
        self.layout, self.isa = value["layout"], value.get("isa")
        self.window = int(value["window"]) if "window" in value else None

    @property
    def pairs(self):
        """(q, k) pairs of one head that the mask leaves."""
        if not self.causal:
            return sum(n * n for n in self.lengths)
        w = self.window or max(self.lengths)
        return sum(n * (n + 1) // 2 if n <= w else w * (w + 1) // 2 + (n - w) * w for n in self.lengths)

    def flops(self, direction):
        """Of the matrix products alone: two forward, five backward."""
        d, dv = self.head_dim, self.value_dim
        return 2 * self.pairs * self.heads * (d + dv if direction == "forward" else 3 * d + 2 * dv)


def rows(torch, layout, tokens, heads, dim, dtype, random=True):
    """[tokens, heads, dim] over memory of the layout."""
    shape = (heads, tokens, dim) if layout == "bhsd" else (tokens, heads, dim)
    x = torch.randn(shape).to(dtype) if random else torch.full(shape, math.nan, dtype=dtype)
    return x.transpose(0, 1) if layout == "bhsd" else x


class Ours:
    """One rank of the C library with its tensors; `forward` and `backward` are ready to be called."""

    def __init__(self, torch, case, inputs, threads):
        import cpattn

        q, k, v, d_o = inputs
        starts = [0]
        for n in case.lengths:
            starts.append(starts[-1] + n)
        unlimited = cpattn.UNLIMITED
        self.plan = cpattn.Plan(
            starts,
            case.heads,
            case.head_dim,
            kv_heads=case.kv_heads,
            value_dim=case.value_dim,
            dtype=cpattn.Dtype[case.dtype.upper()],
            window_left=unlimited if case.window is None else case.window - 1,
            window_right=0 if case.causal else unlimited,
        )
        [self.rank] = cpattn.local_group(1, workers=threads)
        empty = lambda like: torch.full_like(like, math.nan)
        self.o, self.dq, self.dk, self.dv = empty(d_o), empty(q), empty(k), empty(v)
        self.lse = torch.full((case.heads, case.tokens), math.nan)
        self.forward = self.bound("forward", "ForwardArgs", dict(q=q, k=k, v=v, o=self.o, lse=self.lse))
        self.backward = self.bound(
            "backward",
            "BackwardArgs",
            dict(q=q, k=k, v=v, o=self.o, lse=self.lse, d_o=d_o, dq=self.dq, dk=self.dk, dv=self.dv),
        )

    def bound(self, name, kind, tensors):
        """The call alone, with its structs made before."""
        import ctypes

        from cpattn import _header, _library
        from cpattn.tensors import all_given

        given = all_given({"o", "lse", "dq", "dk", "dv"}, **tensors)
        args = getattr(_header, kind)(**{name: tensor.pointer for name, tensor in given.items()})
        function, pointer = getattr(_library._library, "cpattn_" + name), ctypes.byref(args)
        rank, plan = self.rank._handle, self.plan.handle

        def call(given=given):
            if function(rank, plan, pointer):
                raise RuntimeError(_library._library.cpattn_last_error().decode())

        return call

    def results(self):
        return {"o": self.o, "dq": self.dq, "dk": self.dk, "dv": self.dv}


class Torch:
    """PyTorch over documents (`spans`), with one leaf of q, k and v for each."""

    def __init__(self, torch, case, inputs, spans, mask=None):
        self.torch, self.case = torch, case
        q, k, v, d_o = inputs
        self.pad = case.head_dim - case.value_dim
        if self.pad:
            # The same memory order as v has.
            def wide(x):
                out = rows(torch, case.layout, x.shape[0], x.shape[1], case.head_dim, x.dtype, random=False).zero_()
                out[:, :, : case.value_dim] = x
                return out

            v, d_o = wide(v), wide(d_o)
        self.mask, self.causal = mask, case.causal and mask is None
        self.gqa = case.heads != case.kv_heads
        views = [[x[a:b].transpose(0, 1)[None] for x in (q, k, v, d_o)] for a, b in spans]
        self.d_o = [view[3] for view in views]
        self.inputs = [view[:3] for view in views]
        self.leaves = [[x.detach().requires_grad_(True) for x in view] for view in self.inputs]
        self.outputs = [self.attention(*leaves) for leaves in self.leaves]
        self.flat = [x for leaves in self.leaves for x in leaves]

    def attention(self, q, k, v):
        return self.torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.causal, enable_gqa=self.gqa
        )

    def forward(self):
        with self.torch.no_grad():
            return [self.attention(*x) for x in self.inputs]

    def backward(self):
        return self.torch.autograd.grad(self.outputs, self.flat, self.d_o, retain_graph=True)

    def results(self):
        """As ours: [tokens, heads, dim] of the whole pack."""
        whole = lambda parts: self.torch.cat([x[0].transpose(0, 1) for x in parts])
        gradients = self.backward()
        dim = self.case.value_dim
        return {
            "o": whole([x.detach() for x in self.outputs])[..., :dim],
            "dq": whole(gradients[0::3]),
            "dk": whole(gradients[1::3]),
            "dv": whole(gradients[2::3])[..., :dim],
        }


def document_mask(torch, case):
    """[tokens, tokens], true where a pair counts."""
    document = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    mask = document[:, None] == document[None, :]
    return mask.tril_() if case.causal else mask


def sides(torch, case, threads):
    """What takes turns, by name, and the results of PyTorch with the rows of each that are comparable."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[case.dtype]
    shapes = [
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, case.value_dim),
        (case.heads, case.value_dim),
    ]
    inputs = [rows(torch, case.layout, case.tokens, *shape, dtype) for shape in shapes]
    ours = Ours(torch, case, inputs, threads)
    calls, expected = {"ours": ours}, None
    for peer in case.peers:
        if peer == "torch":
            calls[peer] = Torch(torch, case, inputs, [(0, case.tokens)])
        elif peer == "torch-loop":
            starts = [sum(case.lengths[:i]) for i in range(len(case.lengths))]
            calls[peer] = Torch(torch, case, inputs, [(a, a + n) for a, n in zip(starts, case.lengths)])
        elif peer == "torch-masked":
            calls[peer] = Torch(torch, case, inputs, [(0, case.tokens)], document_mask(torch, case))
        elif peer == "ours-dense":
            dense = Case(
                case.line.replace("mask=causal", "mask=full")
                .replace(f"window={case.window}", "")
                .replace(f"lengths={case.tokens}", f"lengths={min(DENSE, case.tokens)}")
            )
            some = [rows(torch, case.layout, dense.tokens, *shape, dtype) for shape in shapes]
            calls[peer] = Ours(torch, dense, some, threads)
            calls[peer].scale = case.pairs / dense.pairs
        else:
            raise ValueError(f"{peer} is none of {', '.join(PEERS)}")
    ours.forward()
    ours.backward()
    found = ours.results()
    if case.window is None:
        expected = calls[case.peers[0]].results()
    else:
        # The first tokens by themselves: their queries see nothing else, and most of their keys are seen by no others.
        n = min(case.tokens, 4 * case.window)
        mask = document_mask(torch, case_of(case, n)).triu_(-(case.window - 1))
        expected = Torch(torch, case, [x[:n] for x in inputs], [(0, n)], mask).results()
        seen = {"o": n, "dq": n, "dk": n - case.window + 1, "dv": n - case.window + 1}
        found, expected = ({name: x[name][:m] for name, m in seen.items()} for x in (found, expected))
        calls["ours-dense"].forward()
    return calls, difference(torch, found, expected)


def case_of(case, tokens):
    return Case(case.line.replace(f"lengths={case.tokens}", f"lengths={tokens}"))


def difference(torch, found, expected):
    out = {}
    for name in found:
        a, b = found[name].double(), expected[name].double()
        out[name] = float(((a - b).square().mean() / b.square().mean()).sqrt())
    return out


def measure(torch, question):
    case, threads = Case(question["case"]), question["threads"]
    torch.manual_seed(1)
    calls, apart = sides(torch, case, threads)
    bound = BOUNDS[case.dtype]
    # Also a NaN is no match.
    wrong = [f"{name} differs by {x:.2e} of its RMS" for name, x in apart.items() if not x <= bound]
    if wrong:
        return {"failed": f"{', '.join(wrong)}; the bound is {bound:.0e}"}
    times = {direction: {name: [] for name in calls} for direction in ("forward", "backward")}
    began = time.monotonic()
    for turn in range(MOST_ROUNDS):
        if turn >= question["rounds"] and time.monotonic() - began > question["seconds"]:
            break
        for direction, lists in times.items():
            # Who is second finds the cache as the first left it: they take turns at that too.
            for name in sorted(lists, reverse=turn % 2 == 1):
                best = min(
                    (t for peer, other in lists.items() if peer not in ("ours", name) for t in other), default=None
                )
                if best and lists[name] and name != "ours" and min(lists[name]) > 2 * best:
                    continue  # another form of the same peer is that much faster
                if threads > 1:
                    time.sleep(0.002)  # idle workers of the other side spin for a moment
                call = getattr(calls[name], direction)
                start = time.perf_counter()
                call()
                lists[name].append((time.perf_counter() - start) * getattr(calls[name], "scale", 1))
    return {"times": times, "difference": apart, "bound": bound}


def main():
    import torch

    held = torch.backends.cpu.get_cpu_capability()
    for line in sys.stdin:
        question = json.loads(line)
        if "threads" in question:
            torch.set_num_threads(question["threads"])
        try:
            if question.get("about"):
                import cpattn

                answer = {
                    "torch": torch.__version__,
                    "torch_capability": held,
                    "cpattn": cpattn.library_version(),
                    "python": sys.version.split()[0],
                }
            else:
                answer = measure(torch, question)
        except Exception as error:  # one case that fails is one row less, with its reason
            answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
