"""The fast path's arithmetic in plain PyTorch: the kernels' twin, and what runs on a CPU or in float32."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.drafters.block import BlockModel
from dloop.drafters.proposal import measure, pack
from dloop.fast.rows import RowBatch, Run
from dloop.kernels.shapes import Heads, HeadWeights, Store
from dloop.sampling import Drawn
from dloop.types import Vocabulary


class PlainOps:
    """Each function states what its kernel must compute. Parts [S, R, N] are added by whoever reads them."""

    def linear(self, x: Float[Tensor, "R K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "1 R N"]:
        """x w^T, in one part."""
        return F.linear(x, w)[None]

    def gated(self, x: Float[Tensor, "R K"], w: Float[Tensor, "I2 K"]) -> Float[Tensor, "R I"]:
        """silu(x w_gate^T) * (x w_up^T)."""
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up

    def add_norm(
        self, residual: Float[Tensor, "R D"], parts: Float[Tensor, "S R D"] | None, gain: Tensor, eps: float
    ) -> Float[Tensor, "R D"]:
        """residual += sum of the parts, in place; returns residual / rms(residual) * gain."""
        if parts is not None:
            residual += total(parts, residual.dtype)
        return rms_norm(residual, gain, eps)

    def embed_norm(
        self, tokens: Int[Tensor, " R"], embedding: Float[Tensor, "V D"], gain: Tensor, eps: float
    ) -> tuple[Float[Tensor, "R D"], Float[Tensor, "R D"]]:
        """(embeddings of the tokens, the same normed): what a stack starts from."""
        residual = F.embedding(tokens, embedding)
        return residual, rms_norm(residual, gain, eps)

    def rope_store(
        self, parts: Float[Tensor, "S R W"], weights: HeadWeights, heads: Heads, batch: RowBatch, store: Store
    ) -> Float[Tensor, "R A"]:
        """Norm and rotate queries and keys; write keys and values; return the queries."""
        place = batch.place
        x = total(parts, store.k.dtype)
        if weights.bias is not None:
            x = x + weights.bias
        q, k, v = x.unflatten(-1, (-1, heads.dim)).split([heads.queries, heads.keys, heads.keys], 1)
        if weights.query_gain is not None and weights.key_gain is not None:
            q, k = rms_norm(q, weights.query_gain, heads.eps), rms_norm(k, weights.key_gain, heads.eps)
        angles = place.position[:, None].float() * heads.frequency
        turns = (angles.cos() * heads.scaling, angles.sin() * heads.scaling)
        cos, sin = (turn.to(x.dtype)[:, None].repeat(1, 1, 2) for turn in turns)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        for run in batch.runs:
            rows, here = slice(run.first, run.first + run.count), slice(run.base, run.base + run.count)
            store.k[run.slot, :, here] = k[rows].transpose(0, 1)
            store.v[run.slot, :, here] = v[rows].transpose(0, 1)
        return q.flatten(1)

    def attend(self, q: Float[Tensor, "R A"], store: Store, heads: Heads, batch: RowBatch) -> Float[Tensor, "R A"]:
        """Softmax attention of each row over what it sees."""
        return torch.cat([attend_run(q, store, heads, batch, run) for run in batch.runs])

    def head(self, x: Float[Tensor, "R D"], w: Float[Tensor, "V D"]) -> Float[Tensor, "R V"]:
        """Logits."""
        return F.linear(x, w)

    def propose(
        self, hidden: Float[Tensor, "R D"], anchors: Int[Tensor, " S"], model: BlockModel, vocabulary: Vocabulary
    ) -> Float64[Tensor, "S 3 k"]:
        """The packed greedy proposals of S stages, whose rows stand one after the other."""
        size = model.config.block_size
        return pack(model.propose(hidden[: len(anchors) * size].unflatten(0, (-1, size)), anchors, vocabulary))

    def pair(
        self,
        tokens: Int[Tensor, " R"],
        embedding: Float[Tensor, "V D"],
        states: Float[Tensor, "R D"],
        gains: tuple[Tensor, Tensor],
        eps: float,
    ) -> Float[Tensor, "R E"]:
        """Embeddings of the tokens, then the states, side by side, each normed with its gain."""
        embedded = F.embedding(tokens, embedding)
        return torch.cat([rms_norm(embedded, gains[0], eps), rms_norm(states, gains[1], eps)], -1)

    def pick(self, logits: Float[Tensor, "R W"], kept: Int[Tensor, " W"]) -> Float64[Tensor, "R 3"]:
        """Each row's most likely token, told as `kept` says, its log-probability and the top one: packed."""
        found = measure(logits, Drawn(logits.argmax(-1), None))
        return pack(found._replace(tokens=kept[found.tokens])).T


def attend_run(q: Float[Tensor, "R A"], store: Store, heads: Heads, batch: RowBatch, run: Run) -> Float[Tensor, "n A"]:
    """One run's rows: the group of query heads that share a key head is folded into the rows."""
    end, groups = run.base + run.count, heads.queries // heads.keys
    asked = q[run.first : run.first + run.count].view(run.count, heads.keys, groups, heads.dim)
    folded = asked.permute(1, 2, 0, 3).reshape(1, heads.keys, groups * run.count, heads.dim)
    keys, values = store.k[run.slot, None, :, :end], store.v[run.slot, None, :, :end]
    mask = seen_mask(batch, run)
    seen = None if mask is None else mask.repeat(groups, 1)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=seen, scale=heads.dim**-0.5)
    return mixed.view(heads.keys, groups, run.count, heads.dim).permute(2, 0, 1, 3).reshape(run.count, -1)


def seen_mask(batch: RowBatch, run: Run) -> Tensor | None:
    """True where a row of the run sees an entry of the store; None: everything."""
    end, rows = run.base + run.count, slice(run.first, run.first + run.count)
    visible, ancestors = batch.place.visible[rows], batch.tiles.ancestors
    if ancestors is None:
        if bool((visible == end).all()):
            return None
        return torch.arange(end, device=visible.device) < visible[:, None]
    mask = torch.zeros(run.count, end, dtype=torch.bool, device=visible.device)
    base = int(batch.tiles.base[run.first])
    mask[:, :base] = True
    for row, count in enumerate((visible - base).tolist()):
        mask[row, ancestors[run.first + row, :count].long()] = True
    return mask


def total(parts: Float[Tensor, "S R N"], dtype: torch.dtype) -> Float[Tensor, "R N"]:
    """Add the parts of a split product, in order."""
    return (parts[0] if parts.shape[0] == 1 else parts.sum(0)).to(dtype)


def rms_norm(x: Float[Tensor, "... D"], gain: Float[Tensor, " D"], eps: float) -> Float[Tensor, "... D"]:
    """Variance in float32, cast back, then the gain."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def rotate(x: Float[Tensor, "R H d"], cos: Float[Tensor, "R 1 d"], sin: Float[Tensor, "R 1 d"]) -> Tensor:
    """Rotate-half RoPE."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
