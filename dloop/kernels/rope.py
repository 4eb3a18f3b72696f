"""From a fused query-key-value product to rotated queries, and keys and values in the store, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from dloop.kernels.pdl import launch_options, release, wait
from dloop.kernels.shapes import Heads, HeadWeights, Place, Store


@triton.jit
def rope_kernel(
    parts,  # [SPLIT, R, (QUERIES + 2 * KEYS) * 2 * HALF]
    bias,  # [(QUERIES + 2 * KEYS) * 2 * HALF]
    query_gain,  # [2 * HALF]
    key_gain,  # [2 * HALF]
    frequency,  # [HALF] float32
    slot,  # [R]
    index,  # [R]
    position,  # [R]
    q,  # [R, QUERIES, 2 * HALF]
    k,  # [slots, KEYS, capacity, 2 * HALF]
    v,  # [slots, KEYS, capacity, 2 * HALF]
    rows,
    capacity,
    slot_stride,
    scaling,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one row: add the parts, norm queries and keys, rotate them, store."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, HALF)
    ALL: tl.constexpr = QUERIES + 2 * KEYS
    offsets = head[:, None] * 2 * HALF + j[None, :]
    inside = (head < ALL)[:, None] & (j < HALF)[None, :]
    release(PDL)
    wait(PDL)
    kind = q.dtype.element_ty
    low = tl.zeros((HEADS, HALF), tl.float32)
    high = tl.zeros((HEADS, HALF), tl.float32)
    for part in tl.static_range(SPLIT):
        start = parts + (part * rows + row) * ALL * 2 * HALF
        low += tl.load(start + offsets, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(start + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        low += tl.load(bias + offsets, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    is_query, is_value = head < QUERIES, head >= QUERIES + KEYS
    if NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        scale = tl.where(is_value, 1.0, tl.rsqrt(mean + EPS))[:, None]
        gains = tl.where(is_query[:, None], tl.load(query_gain + j)[None, :], tl.load(key_gain + j)[None, :])
        low = tl.where(is_value[:, None], low, (low * scale).to(kind).to(tl.float32) * gains.to(tl.float32))
        gains = tl.where(
            is_query[:, None], tl.load(query_gain + HALF + j)[None, :], tl.load(key_gain + HALF + j)[None, :]
        )
        high = tl.where(is_value[:, None], high, (high * scale).to(kind).to(tl.float32) * gains.to(tl.float32))
        low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    angle = tl.load(position + row).to(tl.float32) * tl.load(frequency + j)
    cos = tl.where(is_value[:, None], 1.0, (tl.cos(angle) * scaling).to(kind).to(tl.float32)[None, :])
    sin = tl.where(is_value[:, None], 0.0, (tl.sin(angle) * scaling).to(kind).to(tl.float32)[None, :])
    first, second = (low * cos - high * sin).to(kind), (high * cos + low * sin).to(kind)
    queries = inside & is_query[:, None]
    at = q + (row * QUERIES + head)[:, None] * 2 * HALF + j[None, :]
    tl.store(at, first, mask=queries)
    tl.store(at + HALF, second, mask=queries)
    place = tl.load(index + row)
    written = inside & (place + head * 0 >= 0)[:, None]
    shared = tl.where(is_value, head - QUERIES - KEYS, head - QUERIES)
    at = tl.load(slot + row).to(tl.int64) * slot_stride + (shared.to(tl.int64) * capacity + place)[:, None] * 2 * HALF
    at += j[None, :]
    is_key = (head >= QUERIES) & (head < QUERIES + KEYS)
    tl.store(k + at, first, mask=written & is_key[:, None])
    tl.store(k + at + HALF, second, mask=written & is_key[:, None])
    tl.store(v + at, first, mask=written & is_value[:, None])
    tl.store(v + at + HALF, second, mask=written & is_value[:, None])


def launch(parts: Tensor, weights: HeadWeights, heads: Heads, place: Place, store: Store, pdl: bool) -> Tensor:
    """Parts [S, R, (Hq + 2 Hkv) d] -> queries [R, Hq d]; keys and values go to the store."""
    split, count, _ = parts.shape
    total = heads.queries + 2 * heads.keys
    q = store.k.new_empty(count, heads.queries * heads.dim)
    bias, query_gain, key_gain = (parts if weight is None else weight for weight in weights)
    rope_kernel[(count, triton.cdiv(total, 8))](
        parts, bias, query_gain, key_gain, heads.frequency, place.slot, place.index, place.position, q, store.k,
        store.v, count, store.k.shape[2], store.k.stride(0), heads.scaling, QUERIES=heads.queries, KEYS=heads.keys,
        HALF=heads.dim // 2, HEADS=8, SPLIT=split, BIAS=weights.bias is not None, NORM=weights.query_gain is not None,
        EPS=heads.eps, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return q
