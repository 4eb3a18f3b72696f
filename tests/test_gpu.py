"""What only a GPU can show: kernels and graphs give a row the same bits whatever stands beside it."""

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dloop
from dloop.batch import generate_many
from dloop.fast.target import FastTarget
from dloop.judge import PLAIN
from dloop.sampling import DRAFT_STREAM, draw, sample_seed
from dloop.sampling import law as law_of
from dloop.settings import Settings
from dloop.targets.hf import HFTarget
from dloop.types import Draft, Rows, Sampling, Stage

pytestmark = pytest.mark.gpu
BASE, COUNT = 900, 320  # context, and rows after it: a group of pieces of the keys ends among them


@pytest.fixture(scope="module")
def target() -> FastTarget:
    """Four layers of the Qwen3-4B shape with random bfloat16 weights."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else noise * weight.shape[-1] ** -0.5)
    return FastTarget.of(HFTarget(name="4b", model=model.eval().requires_grad_(False), stop_ids=frozenset()))


@pytest.fixture(scope="module")
def texts() -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 151936, (count,), generator=generator).tolist() for count in (BASE, COUNT))


def rows_at(tokens: list[int], start: int, slot: int = 0) -> Rows:
    count = len(tokens)
    return Rows(
        token=tokens,
        slot=[slot] * count,
        position=list(range(start, start + count)),
        parent=list(range(-1, count - 1)),
    )


@pytest.fixture(scope="module")
def session(target, texts):
    session = target.open((), slots=3)
    for slot in range(3):
        session.prefill(slot, texts[0])
    return session


@pytest.fixture(scope="module")
def expected(session, texts) -> torch.Tensor:
    """The logits of all rows, verified at once."""
    return session.verify(rows_at(texts[1], BASE)).logits.clone()


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256, 257])
def test_any_number_of_rows_gives_the_same_bits(session, expected, texts, count):
    found = session.verify(rows_at(texts[1][:count], BASE)).logits
    assert torch.equal(found, expected[:count])


def test_one_row_at_a_time_with_commits_gives_the_same_bits(session, expected, texts):
    for index, token in enumerate(texts[1][:100]):
        found = session.verify(rows_at([token], BASE + index, slot=1)).logits
        assert torch.equal(found[0], expected[index]), index
        session.commit(1, [0])
    two = rows_at(texts[1][100:120], BASE + 100, slot=1), rows_at(texts[1][:30], BASE, slot=2)
    packed = Rows(
        token=two[0].token + two[1].token,
        slot=two[0].slot + two[1].slot,
        position=two[0].position + two[1].position,
        parent=two[0].parent + [p + 20 if p >= 0 else -1 for p in two[1].parent],
    )
    found = session.verify(packed).logits
    assert torch.equal(found, torch.cat([expected[100:120], expected[:30]]))


def test_rows_of_a_tree_give_the_same_bits(target, expected, texts):
    """Each level has the true token last, behind two siblings: its ancestors lie apart in the store."""
    session = target.open((), slots=3)
    session.prefill(0, texts[0])
    token, position, parent, spine = list[int](), list[int](), list[int](), list[int]()
    for level, true in enumerate(texts[1][:80]):
        token += [(true + 1) % 151936, (true + 2) % 151936, true]
        position += [BASE + level] * 3
        parent += [spine[-1] if spine else -1] * 3
        spine.append(len(token) - 1)
    found = session.verify(Rows(token=token, slot=[0] * 240, position=position, parent=parent)).logits
    assert torch.equal(found[spine], expected[:80])
    session.commit(0, spine)
    assert torch.equal(session.verify(rows_at(texts[1][80:100], BASE + 80)).logits, expected[80:100])


def test_the_kernels_are_close_to_the_twin(target, session, expected, texts):
    twin = HFTarget(name="twin", model=target.model, stop_ids=frozenset()).open(())
    twin.prefill(0, texts[0])
    reference = twin.verify(rows_at(texts[1][:64], BASE)).logits.float()
    assert (expected[:64].float() - reference).norm() / reference.norm() < 2e-2


@pytest.fixture(scope="module")
def pair():
    target = dloop.load_target("smollm2", dtype="bfloat16", device="cuda", engine="fast")
    return target, dloop.load_drafter("demo", target)


def test_bfloat16_texts_are_plain_decoding_s_to_the_last_token(pair):
    target, drafter = pair
    assert target.is_exact
    for start, gate in itertools.product((5, 400, 9000), (1.0, -0.5, float("-inf"))):
        prompt = list(range(start, start + 24))
        plain = dloop.generate(target, None, prompt, max_new_tokens=192, stop_token_ids=())
        assert dloop.generate(target, drafter, prompt, 192, gate, stop_token_ids=(), exact=True).tokens == plain.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_many_at_once_are_the_texts_they_are_alone(pair, temperature):
    target, drafter = pair
    prompts = [list(range(start, start + 10 + start % 7)) for start in range(100, 140)]
    settings = Settings(max_new_tokens=96, temperature=temperature, seed=1, verify="match", loop_gate=-0.5)
    alone = [
        dloop.generate(target, None, p, 96, temperature=temperature, seed=sample_seed(1, i)).tokens
        for i, p in enumerate(prompts)
    ]
    for other, live in ((None, 32), (drafter, 8)):
        found = {text.index: text.tokens for text in generate_many(target, other, prompts, settings, live)}
        assert [found[i] for i in range(len(prompts))] == alone


def test_graphed_verdicts_are_the_plain_ones(pair):
    """Drafts of several lengths, drawn from laws near the target's, so that some are accepted and some are not."""
    target, _ = pair
    logits, taken = torch.empty(16, target.vocab_size, dtype=torch.bfloat16, device="cuda"), set()
    for seed in range(12):
        logits.normal_(std=4)
        for law in (Sampling(temperature=1.0, seed=seed), Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=seed)):
            for count in (2, 5, 9):
                rows, where = logits[:count].clone(), torch.arange(100, 100 + count, device="cuda")
                q = law_of(rows[:-1] + torch.randn_like(rows[:-1]), law)
                tokens = draw(q, seed, where[1:], DRAFT_STREAM).tolist()
                draft = Draft.rooted(7, 100).graft(
                    Stage(
                        tokens=tokens,
                        parents=list(range(-1, count - 2)),
                        logp=[0.0] * (count - 1),
                        spine=list(range(count - 1)),
                        score=0.0,
                        probs=q,
                    )
                )
                found = target.sampler.reject(logits[:count], law, draft)
                assert found == PLAIN.reject(logits[:count], law, draft)
                taken.add(found[0])
    assert len(taken) > 4


def test_graphed_choices_are_the_plain_ones(pair):
    """The same address with other logits, seeds and positions; and other numbers of rows."""
    target, _ = pair
    logits = torch.empty(16, target.vocab_size, dtype=torch.bfloat16, device="cuda")
    for seed in range(6):
        logits.normal_(std=3)
        for law in (Sampling(temperature=1.0, seed=seed), Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=seed)):
            for count in (1, 5, 16):
                positions = [100 * seed + row for row in range(count)]
                assert target.sampler.pick(logits[:count], law, positions) == PLAIN.pick(logits[:count], law, positions)
