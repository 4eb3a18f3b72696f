"""Compile every kernel for a Hopper GPU, which needs none; print what the machine code uses, as JSON.

A program of its own: the tests run the kernels in Triton's interpreter, and one process is either or.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dloop.fast import fused
from dloop.kernels import attention, fetch, linear, markov, norm, pick, rope
from dloop.kernels.shapes import GROUP, KEYS

HOPPER = GPUTarget("cuda", 90, 32)
SHAPE = dict(QUERIES=32, HEADS=8, D=128)  # attention of Qwen3-4B


def types(spec: str) -> dict[str, str]:
    """ "x,w:*bf16 rows:i32" to {argument: type}."""
    return {name: kind for part in spec.split() for names, kind in [part.split(":")] for name in names.split(",")}


def used(fn, spec: str, constants: dict, warps: int, stages: int) -> dict[str, int]:
    signature = types(spec) | dict.fromkeys(constants, "constexpr")
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(fn, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    ptx = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return {word: ptx.count(word) for word in ("wgmma.mma_async", "griddepcontrol", "cp.async.c", "prefetch")}


def main() -> None:
    found = {}
    for rows, out, depth, gated in ((16, 2560, 4096, False), (256, 6144, 2560, False), (64, 9728, 2560, True)):
        tiling = fused.tiling_of(rows, out, depth, gated)
        constants = dict(N=out, K=depth, STEPS=depth // tiling.depth // tiling.split, ROWS=tiling.rows, PDL=True)
        constants |= dict(WIDTH=tiling.width, DEPTH=tiling.depth, GATED=gated, EVEN=True, AHEAD=8)
        spec = f"x,w:*bf16 y:{'*fp32' if tiling.split > 1 else '*bf16'} rows:i32"
        name = f"linear {rows} {tiling.split} {gated}"
        found[name] = used(linear.linear_kernel, spec, constants, tiling.warps, tiling.stages)
    spec = "residual:*bf16 parts:*fp32 weight,normed:*bf16 rows:i32"
    constants = dict(D=2560, WIDTH=4096, SPLIT=4, EPS=1e-6, PDL=True)
    found["norm"] = used(norm.add_norm_kernel, spec, constants, 8, 1)
    spec = "tokens:*i32 embedding,weight,residual,normed:*bf16"
    found["embed"] = used(norm.embed_norm_kernel, spec, dict(D=2560, WIDTH=4096, EPS=1e-6, PDL=True), 8, 1)
    spec = "tokens:*i32 embedding,states,token_gain,state_gain,pairs:*bf16"
    found["pair"] = used(norm.pair_kernel, spec, dict(D=2560, WIDTH=4096, EPS=1e-6, PDL=True), 8, 1)
    spec = (
        "parts:*fp32 bias,query_gain,key_gain:*bf16 frequency:*fp32 slot,index,position:*i32 q,k,v:*bf16 "
        "rows,capacity,slot_stride:i32 scaling:fp32"
    )
    for queries in (32, 0):
        constants = dict(QUERIES=queries, KEYS=8, HALF=64, HEADS=8, SPLIT=2, BIAS=True, NORM=True, EPS=1e-6, PDL=True)
        found[f"rope {queries}"] = used(rope.rope_kernel, spec, constants, 4, 1)
    spec = "q,k,v:*bf16 visible,table,count:*i32 out,top,mass:*fp32 rows,capacity:i32 scale:fp32"
    for columns in (16, 64):
        constants = SHAPE | dict(WIDTH=4, COLUMNS=columns, KEYS=KEYS, PDL=True)
        found[f"attend {columns}"] = used(attention.attend_kernel, spec, constants, 4, 3)
    constants = dict(QUERIES=32, D=128, KEYS=KEYS, GROUP=GROUP, PDL=True)
    spec = "out,top,mass:*fp32 visible,count:*i32 y:*bf16 rows:i32"
    found["combine"] = used(attention.combine_kernel, spec, constants, 1, 1)
    constants = SHAPE | dict(COLUMNS=16, KEYS=KEYS, GROUP=GROUP, PDL=True)
    spec = (
        "q,k,v:*bf16 slot,visible,bases,ancestors,count:*i32 out,top,mass:*fp32 y:*bf16 "
        "rows,capacity,depth:i32 scale:fp32"
    )
    found["tree"] = used(attention.combine_tree_kernel, spec, constants, 4, 2)
    spec = "logits:*bf16 anchors:*i64 w1,w2:*bf16 kept:*i64 best:*fp32 where:*i32 mass:*fp32 row,sequences:i32"
    programs = dict(BLOCK=7, PROGRAMS=264, PADDED=512, MAPPED=True, PDL=True)
    cut = markov.TILING
    for joined in (1, 4, 32):
        constants = programs | dict(V=151936, RANK=256, JOINED=joined, COLUMNS=max(16, joined), DEPTH=256)
        found[f"markov row {joined}"] = used(
            markov.row_kernel, spec, constants | dict(WIDTH=cut.width), cut.warps, cut.stages
        )
    found["markov finish"] = used(
        markov.finish_kernel, "best:*fp32 where:*i32 mass:*fp32 kept:*i64 out:*fp64 sequences:i32", programs, 4, 1
    )
    shares = dict(V=32_000, SHARES=8, PDL=True)
    spec = "logits:*bf16 best:*fp32 where:*i32 mass:*fp32"
    found["pick share"] = used(pick.share_kernel, spec, shares | dict(SHARE=pick.SHARE), 8, 1)
    spec = "best:*fp32 where:*i32 mass:*fp32 kept:*i64 out:*fp64"
    found["pick join"] = used(pick.join_kernel, spec, shares | dict(PADDED=8, MAPPED=True), 1, 1)
    found["fetch"] = used(fetch.fetch_kernel, "host,block:*i32 n:i32", dict(SIZE=fetch.SIZE, PDL=True), 4, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
