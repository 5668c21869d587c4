#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiles the kernels of the corpus: Hopper PTX from a compiler that is not ours, for an emulator that is.

    python3 -m venv VENV && VENV/bin/pip install triton==3.6.0
    VENV/bin/python make.py ptx

Triton's layouts of descriptors, swizzles, tensor maps and barriers run on GPUs every day. An emulator that computes the
right numbers from this text understands them as the hardware does. Neither a GPU nor a driver is needed to compile, and
a second run writes the same bytes.

Beside NAME.ptx there is `list`, a line for each kernel:

    name | entry | dynamic shared bytes | tile m n k | element | map | map …

A map is `swizzle:box`, outermost dimension first; swizzle is 0 or the width in bytes. A tensor's parameters are its map
(128 bytes), its shape (u32) and its strides (u64, in elements); the scalars follow, then two pointers that are not used.
"""
import os
import pathlib
import sys
import tempfile

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import hopper


# Kernels that leave the layouts to the compiler.


@triton.jit
def attention(q, k, v, o, lse, keys, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr):
    """Heads lie one after another, `keys` rows each. `scale` has a factor of log2(e), and `lse` is in base 2."""
    tile = tl.program_id(0)
    head = tl.program_id(1) * keys
    query = q.load([head + tile * M, 0])
    row = tile * M + tl.arange(0, M)
    largest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, (tile + 1) * M)
    for first in range(0, last, N):
        score = scale * tl.dot(query, k.load([head + first, 0]).T)
        if CAUSAL:
            column = first + tl.arange(0, N)
            score = tl.where(column[None, :] <= row[:, None], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        weight = tl.math.exp2(score - new[:, None])
        shrink = tl.math.exp2(largest - new)
        total = shrink * total + tl.sum(weight, 1)
        out = tl.dot(weight.to(query.dtype), v.load([head + first, 0]), shrink[:, None] * out)
        largest = new
    tl.store(lse + head + row, tl.math.log2(total) + largest)
    o.store([head + tile * M, 0], (out / total[:, None]).to(query.dtype))


@triton.jit
def reduction(a, b, c, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c (f32) += the transpose of a times the transpose of b; the grid's third dimension cuts k into runs of `depth`."""
    m = tl.program_id(0) * M
    n = tl.program_id(1) * N
    first = tl.program_id(2) * depth
    sums = tl.zeros((M, N), tl.float32)
    for k in range(first, first + depth, K):
        sums = tl.dot(a.load([k, m]).T, b.load([n, k]).T, sums)
    c.atomic_add([m, n], sums)


@triton.jit
def ragged(x, o, first, rows, row):
    """Copies 64 rows of the part `first .. first + rows`, from its row `row` on, and nothing outside of the part.

    The maps have 2^30 rows, one dimension more by whose coordinate the part ends, and one that takes the 2^30 rows back.
    """
    many = 1 << 30
    at = [many, first + rows, many - rows + row, 0]
    o.store(at, x.load(at))


# Kernels that choose their layouts.


@gluon.jit
def product(a, b, c, depth, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr):
    """c = a b, one tile in flight; a and b lie transposed in memory where TA and TB say so."""
    a_tile = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    b_tile = gl.allocate_shared_memory(b.dtype, b.block_type.shape, b.layout)
    c_tile = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(ready, count=1)
    m = gl.program_id(0) * M
    n = gl.program_id(1) * N
    fragments: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[gl.num_warps(), 1],
                                                        instr_shape=[16, N, 16])
    sums = gl.zeros((M, N), gl.float32, fragments)
    parity = 0
    for k in range(0, depth, K):
        hopper.mbarrier.expect(ready, a.block_type.nbytes + b.block_type.nbytes)
        if TA:
            hopper.tma.async_copy_global_to_shared(a, [k, m], ready, a_tile)
        else:
            hopper.tma.async_copy_global_to_shared(a, [m, k], ready, a_tile)
        if TB:
            hopper.tma.async_copy_global_to_shared(b, [n, k], ready, b_tile)
        else:
            hopper.tma.async_copy_global_to_shared(b, [k, n], ready, b_tile)
        hopper.mbarrier.wait(ready, parity)
        parity ^= 1
        left = a_tile.permute((1, 0)) if TA else a_tile
        right = b_tile.permute((1, 0)) if TB else b_tile
        sums = hopper.warpgroup_mma(left, right, sums, is_async=True)
        sums = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    hopper.mbarrier.invalidate(ready)
    c_tile.store(sums.to(c.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(c, [m, n], c_tile)
    hopper.tma.store_wait(pendings=0)


@gluon.jit
def ring_loads(a, b, a_tiles, b_tiles, ready, free, m, n, depth, K: gl.constexpr, STAGES: gl.constexpr):
    step = 0
    for k in range(0, depth, K):
        stage = step % STAGES
        hopper.mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
        full = ready.index(stage)
        hopper.mbarrier.expect(full, a.block_type.nbytes + b.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(a, [m, k], full, a_tiles.index(stage))
        hopper.tma.async_copy_global_to_shared(b, [k, n], full, b_tiles.index(stage))
        step += 1


@gluon.jit
def ring_products(c, c_tile, a_tiles, b_tiles, ready, free, m, n, depth, M: gl.constexpr, N: gl.constexpr,
                  K: gl.constexpr, STAGES: gl.constexpr):
    fragments: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[gl.num_warps(), 1],
                                                        instr_shape=[16, N, 16])
    sums = gl.zeros((M, N), gl.float32, fragments)
    step = 0
    for k in range(0, depth, K):
        stage = step % STAGES
        hopper.mbarrier.wait(ready.index(stage), step // STAGES & 1)
        sums = hopper.warpgroup_mma(a_tiles.index(stage), b_tiles.index(stage), sums, is_async=True)
        sums = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        hopper.mbarrier.arrive(free.index(stage), count=1)
        step += 1
    c_tile.store(sums.to(c.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(c, [m, n], c_tile)
    hopper.tma.store_wait(pendings=0)


@gluon.jit
def ring(a, b, c, depth, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):
    """c = a b, one warp loads into a ring of tiles, the others multiply; registers move between them."""
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    c_tile = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(stage), count=1)
        hopper.mbarrier.init(free.index(stage), count=1)
    m = gl.program_id(0) * M
    n = gl.program_id(1) * N
    gl.warp_specialize([
        (ring_products, (c, c_tile, a_tiles, b_tiles, ready, free, m, n, depth, M, N, K, STAGES)),
        (ring_loads, (a, b, a_tiles, b_tiles, ready, free, m, n, depth, K, STAGES)),
    ], [1], [24])


ELEMENTS = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}


def tensor(element, box, swizzle=None):
    """The type of a tensor argument; Gluon's kernels say how the box is swizzled."""
    name = f"tensordesc<{ELEMENTS[element]}{list(box)}"
    if swizzle is None:
        return name + ">"
    bits = 32 if element == "f32" else 16
    return f"{name},{gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(box))!r}>"


def plain(kernel, types, constants):
    signature = types | {name: "constexpr" for name in constants}
    return ASTSource(kernel, signature, constants)


def laid_out(kernel, types, constants):
    signature = types | {name: "constexpr" for name in constants}
    at = {(list(signature).index(name),): value for name, value in constants.items()}
    return GluonASTSource(kernel, signature, at)


def corpus():
    """Name, source, tile, element, warps and stages of each kernel."""
    for name, element, d, m, n, causal, warps, stages in [
        ("attention_bf16_64_causal", "bf16", 64, 128, 64, True, 4, 3),
        ("attention_bf16_128", "bf16", 128, 128, 128, False, 8, 2),
        ("attention_f16_128_causal", "f16", 128, 128, 64, True, 8, 2),
    ]:
        rows, keys = tensor(element, (m, d)), tensor(element, (n, d))
        types = dict(q=rows, k=keys, v=keys, o=rows, lse="*fp32", keys="i32", scale="fp32")
        yield name, plain(attention, types, dict(M=m, N=n, D=d, CAUSAL=causal)), (m, n, d), element, warps, stages
    square = (64, 64)
    for swizzle in (128, 64, 32):
        for ta in (False, True):
            for tb in (False, True):
                types = {x: tensor("bf16", square, swizzle) for x in "abc"} | dict(depth="i32")
                constants = dict(M=64, N=64, K=64, TA=ta, TB=tb)
                name = f"product_{swizzle}" + "_at" * ta + "_bt" * tb
                yield name, laid_out(product, types, constants), (64, 64, 64), "bf16", 4, None
    for name, element, m, n, k, swizzle, warps in [
        ("product_bf16_n256", "bf16", 128, 256, 64, 128, 8), ("product_f16_n32", "f16", 64, 32, 64, 64, 4)
    ]:
        boxes = dict(a=(m, k), b=(k, n), c=(m, n))
        types = {x: tensor(element, box, swizzle) for x, box in boxes.items()} | dict(depth="i32")
        yield name, laid_out(product, types, dict(M=m, N=n, K=k, TA=False, TB=False)), (m, n, k), element, warps, None
    for swizzle, m, n, k, stages, warps in [(128, 128, 128, 64, 3, 4), (64, 64, 64, 32, 3, 4), (128, 256, 64, 64, 2, 8)]:
        boxes = dict(a=(m, k), b=(k, n), c=(m, n))
        types = {x: tensor("bf16", box, swizzle) for x, box in boxes.items()} | dict(depth="i32")
        source = laid_out(ring, types, dict(M=m, N=n, K=k, STAGES=stages))
        yield f"ring_{swizzle}_{m}x{n}", source, (m, n, k), "bf16", warps, None
    types = dict(a=tensor("bf16", (64, 128)), b=tensor("bf16", (64, 64)), c=tensor("f32", (128, 64)), depth="i32")
    yield "reduction", plain(reduction, types, dict(M=128, N=64, K=64)), (128, 64, 64), "bf16", 4, 2
    part = tensor("bf16", (1, 1, 64, 64))
    types = dict(x=part, o=part, first="i32", rows="i32", row="i32")
    yield "ragged", plain(ragged, types, {}), (64, 64, 1), "bf16", 4, None


def main(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, source, tile, element, warps, stages in corpus():
        options = dict(num_warps=warps) | ({} if stages is None else dict(num_stages=stages))
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        (folder / f"{name}.ptx").write_text(kernel.asm["ptx"])
        widths = [0, 32, 64, 128]
        maps = [f"{widths[m['swizzle']]}:{'x'.join(map(str, m['block_size']))}" for m in kernel.metadata.tensordesc_meta]
        sizes = " ".join(map(str, tile))
        lines.append(" | ".join([name, kernel.metadata.name, str(kernel.metadata.shared), sizes, element, *maps]))
    (folder / "list").write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} kernels in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
