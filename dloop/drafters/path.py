"""Block drafters whose heads read the tokens drafted before: one chain and one DARTree for all of them."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.drafters.block import BlockModel
from dloop.drafters.proposal import Proposal, Unbuilt, measure, named, pack, stacked
from dloop.sampling import GREEDY, Draw, Drawn
from dloop.trees.beam import Children, Frontier, beam, best_children, packed
from dloop.trees.shape import TreeShape
from dloop.trees.supertree import prune, supertree
from dloop.trees.tree import with_spine
from dloop.types import Stage, Vocabulary
from dloop.vocabulary import told


class PathModel(BlockModel):
    """A backbone and a head that corrects each row's logits, knowing the path above."""

    @property
    @abstractmethod
    def output(self) -> Float[Tensor, "W e"]:
        """The last matrix of the head."""

    @abstractmethod
    def read(
        self,
        row: int,
        hidden: Float[Tensor, "... D"],
        previous: Int[Tensor, "..."],
        state: Float[Tensor, "... s"] | None,
        vocabulary: Vocabulary,
    ) -> tuple[Float[Tensor, "... e"] | None, Float[Tensor, "... s"] | None]:
        """(what `output` turns into the row's correction, None: it has none; the state after the previous token)."""

    def propose(
        self, hidden: Float[Tensor, "... B D"], anchor: Int[Tensor, "..."], vocabulary: Vocabulary, draw: Draw = GREEDY
    ) -> Proposal:
        """Row by row: the tokens before correct each row's logits."""
        rows = self.predicting(hidden)
        return self._chain(rows, F.linear(rows, vocabulary.head), anchor, vocabulary, draw)

    def tree(
        self,
        hidden: Float[Tensor, "B D"],
        anchor: Int[Tensor, ""],
        vocabulary: Vocabulary,
        shape: TreeShape,
        nodes: int,
    ) -> Unbuilt:
        """A DARTree; its spine is the greedy chain, measured over all that the head knows.

        The tree ranks each position's candidates among themselves: those of the highest logits before the correction.
        """
        rows = self.predicting(hidden)
        base = F.linear(rows, vocabulary.head)
        candidates = base.topk(min(shape.candidates, base.shape[-1]), -1).indices
        most, state = min(shape.expansion, nodes), None

        def expand(depth: int, frontier: Frontier) -> Children:
            nonlocal state
            count, words = len(frontier.tokens), candidates[depth]
            above = None if state is None else state[frontier.parents]
            features, state = self.read(depth, rows[depth].expand(count, -1), frontier.tokens, above, vocabulary)
            if features is None:
                return best_children(base[depth].float().log_softmax(-1).expand(count, -1), vocabulary.kept, most)
            logits = base[depth, words] + F.linear(features, self.output[words])
            return best_children(logits.float().log_softmax(-1), told(words, vocabulary.kept), most)

        levels = beam(anchor, len(base), shape.width, expand)
        chain = pack(self._chain(rows, base, anchor, vocabulary, GREEDY))
        depths, sizes = len(base), [level.size for level in levels]  # what a captured graph keeps: no tensor

        def build(numbers: list[float]) -> Stage:
            tokens, logp, top_logp = (numbers[place * depths : (place + 1) * depths] for place in range(3))
            size = sum(level.children for level in sizes)
            parts = [numbers[start : start + size] for start in range(3 * depths, len(numbers), size)]
            tree = prune(supertree(sizes, parts), nodes, shape.beta)
            return with_spine(tree, [int(token) for token in tokens], logp, sum(top_logp))

        return Unbuilt(torch.cat([chain.flatten(), packed(levels).flatten()]), build)

    def _chain(
        self,
        rows: Float[Tensor, "... k D"],
        base: Float[Tensor, "... k W"],
        anchor: Int[Tensor, "..."],
        vocabulary: Vocabulary,
        draw: Draw,
    ) -> Proposal:
        logits, state, previous = list(base.unbind(-2)), None, anchor
        drawn: list[Drawn] = []
        for row in range(len(logits)):
            features, state = self.read(row, rows[..., row, :], previous, state, vocabulary)
            if features is not None:
                logits[row] = logits[row] + F.linear(features, self.output)
            drawn.append(draw(logits[row], row))
            previous = told(drawn[-1].token, vocabulary.kept)
        return named(measure(torch.stack(logits, -2), stacked(drawn)), vocabulary)
