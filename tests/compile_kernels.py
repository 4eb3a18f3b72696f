"""Compile every kernel for a Hopper GPU, which needs none; print what the machine code uses, as JSON.

A program of its own: the tests run the kernels in Triton's interpreter, and one process is either or.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dloop.kernels import attention, linear, markov, norm, rope
from dloop.kernels.shapes import SPLIT

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
    for rows, split, gated in ((16, 4, False), (128, 1, False), (64, 1, True)):
        constants = dict(
            N=2560, K=4096, STEPS=32 // split, ROWS=rows, WIDTH=64, DEPTH=128, GATED=gated, AHEAD=8, PDL=True
        )
        spec = f"x,w:*bf16 y:{'*fp32' if split > 1 else '*bf16'} rows:i32"
        found[f"linear {rows} {split} {gated}"] = used(linear.linear_kernel, spec, constants, 4, 3)
    spec = "residual:*bf16 parts:*fp32 weight,normed:*bf16 rows:i32"
    constants = dict(D=2560, WIDTH=4096, SPLIT=4, EPS=1e-6, PDL=True)
    found["norm"] = used(norm.add_norm_kernel, spec, constants, 8, 1)
    spec = (
        "parts:*fp32 bias,query_gain,key_gain:*bf16 frequency:*fp32 slot,index,position:*i32 q,k,v:*bf16 "
        "rows,capacity,slot_stride:i32 scaling:fp32"
    )
    for queries in (32, 0):
        constants = dict(QUERIES=queries, KEYS=8, HALF=64, HEADS=8, SPLIT=2, BIAS=True, NORM=True, EPS=1e-6, PDL=True)
        found[f"rope {queries}"] = used(rope.rope_kernel, spec, constants, 4, 1)
    spec = "q,k,v:*bf16 visible,table,count,ancestors:*i32 out,top,mass:*fp32 rows,capacity,depth:i32 scale:fp32"
    for columns, tree in ((16, False), (64, True)):
        constants = SHAPE | dict(GROUP=4, COLUMNS=columns, SPLIT=SPLIT, KEYS=attention.KEYS, TREE=tree, PDL=True)
        found[f"attend {columns} {tree}"] = used(attention.attend_kernel, spec, constants, 4, 2)
    constants = dict(QUERIES=32, D=128, HEADS=4, SPLIT=SPLIT, PDL=True)
    spec = "out,top,mass:*fp32 visible:*i32 y:*bf16 rows:i32"
    found["combine"] = used(attention.combine_kernel, spec, constants, 4, 1)
    spec = "logits,w1,w2:*bf16 tokens:*i64 best:*fp32 where:*i64 mass:*fp32 row,sequences:i32"
    constants = dict(V=151936, RANK=256, BLOCK=7, COLUMNS=16, DEPTH=256, WIDTH=markov.WIDTH, PDL=True)
    found["markov tile"] = used(markov.tile_kernel, spec, constants, 4, 2)
    spec = "best:*fp32 where:*i64 mass:*fp32 tokens:*i64 logp:*fp32 row:i32"
    constants = dict(BLOCK=7, TILES=1187, PADDED=2048, PDL=True)
    found["markov pick"] = used(markov.pick_kernel, spec, constants, 4, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
