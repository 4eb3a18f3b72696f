"""The fast path's arithmetic by Triton kernels: CUDA, bfloat16."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.drafters.block import BlockModel
from dloop.drafters.dspark import DSpark
from dloop.drafters.path import PathModel
from dloop.fast.rows import RowBatch
from dloop.kernels import attention, linear, markov, norm, pick, rope
from dloop.kernels.linear import Tiling
from dloop.kernels.shapes import Heads, HeadWeights, Store
from dloop.types import Vocabulary

MULTIPROCESSORS = 132  # of the chip the tilings are chosen for; part of the order of sums, so never asked of the device


class TritonOps:
    """Same functions as the plain twin. `columns` is the width of the attention tiles of this bucket."""

    def __init__(self, columns: int = 16, pdl: bool = False) -> None:
        self.columns = columns
        self.pdl = pdl

    def linear(self, x: Float[Tensor, "R K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "S R N"]:
        """x w^T in as many parts as the weight's shape asks for."""
        return linear.launch(x, w, tiling_of(len(x), w.shape[0], w.shape[1]), gated=False, pdl=self.pdl)

    def gated(self, x: Float[Tensor, "R K"], w: Float[Tensor, "I2 K"]) -> Float[Tensor, "R I"]:
        """silu(x w_gate^T) * (x w_up^T)."""
        return linear.launch(x, w, tiling_of(len(x), w.shape[0], w.shape[1], gated=True), gated=True, pdl=self.pdl)[0]

    def add_norm(
        self, residual: Float[Tensor, "R D"], parts: Float[Tensor, "S R D"] | None, gain: Tensor, eps: float
    ) -> Float[Tensor, "R D"]:
        """residual += sum of the parts, in place; returns the normed rows."""
        return norm.launch(residual, parts, gain, eps, self.pdl)

    def embed_norm(
        self, tokens: Int[Tensor, " R"], embedding: Float[Tensor, "V D"], gain: Tensor, eps: float
    ) -> tuple[Float[Tensor, "R D"], Float[Tensor, "R D"]]:
        """(embeddings of the tokens, the same normed): what a stack starts from."""
        return norm.launch_embed(tokens, embedding, gain, eps, self.pdl)

    def rope_store(
        self, parts: Float[Tensor, "S R W"], weights: HeadWeights, heads: Heads, batch: RowBatch, store: Store
    ) -> Float[Tensor, "R A"]:
        """Norm and rotate queries and keys; write keys and values; return the queries."""
        return rope.launch(parts, weights, heads, batch.place, store, self.pdl)

    def attend(self, q: Float[Tensor, "R A"], store: Store, heads: Heads, batch: RowBatch) -> Float[Tensor, "R A"]:
        """Softmax attention of each row over what it sees."""
        work = attention.Work(programs=2 * MULTIPROCESSORS, columns=self.columns, pdl=self.pdl)
        return attention.launch(q, store, heads, batch.place, batch.tiles, work)

    def head(self, x: Float[Tensor, "R D"], w: Float[Tensor, "V D"]) -> Float[Tensor, "R V"]:
        """Logits."""
        whole = tiling_of(len(x), w.shape[0], w.shape[1])._replace(split=1)
        return linear.launch(x, w, whole, gated=False, pdl=self.pdl)[0]

    def propose(
        self, hidden: Float[Tensor, "R D"], anchors: Int[Tensor, " S"], model: BlockModel, vocabulary: Vocabulary
    ) -> Float64[Tensor, "S 3 k"]:
        """The packed greedy proposals of S stages, whose rows stand one after the other."""
        logits, size, kept = self.head(hidden, vocabulary.head), model.config.block_size, vocabulary.kept
        head = model.markov_head if isinstance(model, DSpark) else None
        if head is not None and head.kind == "vanilla":
            return markov.launch(
                logits, anchors, (head.markov_w1.weight, head.markov_w2.weight), kept, block=size, pdl=self.pdl
            )
        if not isinstance(model, PathModel):  # no row depends on another's token
            found = pick.launch(logits, kept, self.pdl)[: len(anchors) * size]
            return model.predicting(found.unflatten(0, (-1, size))).mT.contiguous()
        rows, base = (
            model.predicting(x[: len(anchors) * size].unflatten(0, (-1, size))).unbind(1) for x in (hidden, logits)
        )
        found, previous, state = list[Tensor](), anchors, None
        for row in range(len(rows)):
            features, state = model.read(row, rows[row], previous, state, vocabulary)
            corrected = base[row] if features is None else base[row] + F.linear(features, model.output)
            found.append(pick.launch(corrected.contiguous(), kept, self.pdl))
            previous = found[-1][:, 0].long()
        return torch.stack(found, -1)

    def pair(
        self,
        tokens: Int[Tensor, " R"],
        embedding: Float[Tensor, "V D"],
        states: Float[Tensor, "R D"],
        gains: tuple[Tensor, Tensor],
        eps: float,
    ) -> Float[Tensor, "R E"]:
        """Embeddings of the tokens, then the states, side by side, each normed with its gain."""
        return norm.launch_pair(tokens, embedding, states, gains, eps, self.pdl)

    def pick(self, logits: Float[Tensor, "R W"], kept: Int[Tensor, " W"]) -> Float64[Tensor, "R 3"]:
        """Each row's most likely token, told as `kept` says, its log-probability and the top one: packed."""
        return pick.launch(logits, kept, self.pdl)


def split_of(out: int, depth: int) -> int:
    """Among how many programs a sum is shared: until half the chip is busy, while a part keeps enough to do.

    From the weight's shape alone, never from the number of rows: it decides the order of sums.
    """
    split = 1
    while -(-out // 64) * split < MULTIPROCESSORS // 2 and depth // (2 * split) >= 512:
        split *= 2
    return split


def tiling_of(rows: int, out: int, depth: int, gated: bool = False) -> Tiling:
    """What measured fastest on an H200 for this many rows (a bucket: a multiple of 16)."""
    step = min(256, rows & -rows)  # rows one program can take
    if gated:
        cut = (64, 64, step, 1, 8, 4) if step < 64 else (64, 64, 64, 1, 4, 4) if step == 64 else (128, 64, 128, 1, 6, 8)
    elif out >= 2**15:
        large = {64: (128, 128, 64, 1, 4, 4), 128: (256, 64, 128, 1, 4, 8), 256: (128, 64, 256, 1, 4, 8)}
        cut = large.get(step, (64, 128, step, 1, 8, 4))
    else:
        split = split_of(out, depth)
        cut = (64, 64, step, split, 8, 4) if step <= 128 else (128, 64, 128, split, 5, 4)
    return Tiling(*cut)
