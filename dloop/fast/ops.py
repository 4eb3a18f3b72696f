"""The arithmetic of a forward as a protocol, and which implementation a machine gets."""

import importlib.util
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dloop.drafters.block import BlockModel
from dloop.fast.rows import RowBatch
from dloop.kernels.shapes import Heads, HeadWeights, Store
from dloop.types import Vocabulary

MOST_COLUMNS = 64  # (row, query head) pairs of one attention tile
MOST_DIM = 128  # of a head: three pieces of keys and values must fit a multiprocessor's shared memory


@runtime_checkable
class Ops(Protocol):
    """The arithmetic of a forward: plain PyTorch or kernels. Parts [S, R, N] are the summands of a split product."""

    def linear(self, x: Float[Tensor, "R K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "S R N"]: ...

    def gated(self, x: Float[Tensor, "R K"], w: Float[Tensor, "I2 K"]) -> Float[Tensor, "R I"]: ...

    def add_norm(
        self, residual: Float[Tensor, "R D"], parts: Float[Tensor, "S R D"] | None, gain: Tensor, eps: float
    ) -> Float[Tensor, "R D"]: ...

    def embed_norm(
        self, tokens: Int[Tensor, " R"], embedding: Float[Tensor, "V D"], gain: Tensor, eps: float
    ) -> tuple[Float[Tensor, "R D"], Float[Tensor, "R D"]]: ...

    def rope_store(
        self, parts: Float[Tensor, "S R W"], weights: HeadWeights, heads: Heads, batch: RowBatch, store: Store
    ) -> Float[Tensor, "R A"]: ...

    def attend(self, q: Float[Tensor, "R A"], store: Store, heads: Heads, batch: RowBatch) -> Float[Tensor, "R A"]: ...

    def head(self, x: Float[Tensor, "R D"], w: Float[Tensor, "V D"]) -> Float[Tensor, "R V"]: ...

    def propose(
        self, hidden: Float[Tensor, "R D"], anchors: Int[Tensor, " S"], model: BlockModel, vocabulary: Vocabulary
    ) -> Float64[Tensor, "S 3 k"]: ...

    def pair(
        self,
        tokens: Int[Tensor, " R"],
        embedding: Float[Tensor, "V D"],
        states: Float[Tensor, "R D"],
        gains: tuple[Tensor, Tensor],
        eps: float,
    ) -> Float[Tensor, "R E"]: ...

    def pick(self, logits: Float[Tensor, "R W"], kept: Int[Tensor, " W"]) -> Float64[Tensor, "R 3"]: ...


def supports(dtype: torch.dtype, device: torch.device, heads: Heads) -> bool:
    """Whether the kernels can be used: bfloat16 on a Hopper GPU or newer, Triton installed, heads of a power of two up
    to 128, and a group of query heads that fits an attention tile.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or importlib.util.find_spec("triton") is None:
        return False
    if not 16 <= heads.dim <= MOST_DIM or heads.dim & (heads.dim - 1) or heads.queries > MOST_COLUMNS * heads.keys:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def kernel_ops(columns: int) -> Ops:
    """The kernels, with attention tiles of this many columns."""
    from dloop.fast.fused import TritonOps

    return TritonOps(columns, pdl=torch.cuda.is_available())
