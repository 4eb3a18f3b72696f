"""Loading is strict: two layouts, every key used, and each fault is one line that says what, why and the way out."""

import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dloop
from dloop.checkpoint import sha256
from dloop.detect import BLOCK_FAMILIES, FAMILIES, detect_family
from dloop.drafters.block import BlockDrafter
from dloop.drafters.families import READERS, build
from dloop.drafters.gap import READINGS
from dloop.drafters.host import PublishedConfig
from dloop.errors import UserError
from dloop.targets.hf import HFTarget
from dloop.testing import CHAIN_KINDS, KINDS, WINDOW_KINDS, tiny_drafter, tiny_target, write_drafter, write_target
from dloop.types import StageRequest

PROMPT = [5, 9, 11, 60]
Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("qwen3", num_layers=4)


@pytest.fixture
def folder(target, tmp_path) -> Path:
    """A sound drafter in SpecForge's layout."""
    return write_drafter(tiny_drafter(target), tmp_path / "draft", "specforge")


@pytest.fixture
def flat(target, tmp_path) -> Path:
    """The same in DeepSpec's."""
    return write_drafter(tiny_drafter(target), tmp_path / "draft", "deepspec")


@pytest.fixture
def target_folder(target, tmp_path) -> Path:
    return write_target(target, tmp_path / "target")


def one_line(error: pytest.ExceptionInfo[UserError], *words: str) -> None:
    """What every message must be: one line, about this thing, with these words."""
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def rounds_of(target: HFTarget, drafter: BlockDrafter) -> list[tuple[list[int], list[float], int]]:
    out = dloop.generate(target, drafter, PROMPT, 8, loop_gate=float("-inf"), max_stages=2)
    return [(r.drafted, r.scores, r.accepted) for r in out.rounds]


def alike(one: BlockDrafter, other: BlockDrafter) -> bool:
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


# What loads


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("layout", ["specforge", "deepspec"])
def test_what_was_written_is_what_is_loaded(target, head, layout, tmp_path):
    written = tiny_drafter(target, head=head)
    for name, size in (("single", None), ("sharded", 20_000)):
        where = write_drafter(written, tmp_path / name, layout, size)
        assert len(list(where.glob("*.safetensors"))) > (1 if size else 0)
        read = dloop.load_drafter(str(where), target)
        assert read.family == "dspark" and read.config == written.config
        assert alike(read, written)
        assert torch.equal(read.vocabulary.head, target.vocabulary.head)
        for found, expected in zip(rounds_of(target, read), rounds_of(target, written), strict=True):
            assert found == (expected[0], pytest.approx(expected[1], abs=1e-4), expected[2])


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
@pytest.mark.parametrize("kind", ["qwen3", "llama_tied"], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [None, 20_000], ids=["single", "sharded"])
def test_every_family_is_loaded_with_its_target_s_own_vocabulary(family, kind, size, tmp_path):
    target = tiny_target(kind, num_layers=4)
    written = tiny_drafter(target, family=family)
    for layout in ("specforge", "dflash"):
        where = write_drafter(written, tmp_path / layout, layout, size)
        assert len(list(where.glob("*.safetensors"))) > (1 if size else 0)
        read = dloop.load_drafter(str(where), target)
        assert read.family == family and read.config == written.config
        assert alike(read, written)
        assert read.vocabulary.embedding.data_ptr() == target.vocabulary.embedding.data_ptr()
        assert read.vocabulary.head.data_ptr() == target.vocabulary.head.data_ptr()
        for found, expected in zip(rounds_of(target, read), rounds_of(target, written), strict=True):
            assert found == (expected[0], pytest.approx(expected[1], abs=1e-4), expected[2])


# What the hub's files say, and how large their models are

SHAPES = {
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_target_layers": 36},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_target_layers": 36},
}
COMMON = {
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 5,
    "max_window_layers": 5,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
TAPS = [1, 9, 17, 25, 33]
INNER = {"mask_token_id": 151_669, "target_layer_ids": TAPS}
DOMINO = {"pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True, **INNER}
DSPARK = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    **INNER,
}
SPARE = {"attention_mode": "gqa", "confidence_head_alpha": 1.0}


def hub(architecture: str, block_size: int, inner: dict | None = None, **more: object) -> dict:
    """A published config without its sizes."""
    own = {} if inner is None else {"dflash_config": inner}
    return {**COMMON, "architectures": [architecture], "block_size": block_size, **own, **more}


PUBLISHED: dict[str, tuple[dict, str, int]] = {  # form -> (config, family, tokens of a stage)
    "dflash": (hub("DFlashDraftModel", 16, INNER, auto_map={"AutoModel": "dflash.DFlashDraftModel"}), "dflash", 15),
    "dflash-nested-block": (
        {k: v for k, v in hub("DFlashDraftModel", 16, {**INNER, "block_size": 16}).items() if k != "block_size"},
        "dflash",
        15,
    ),
    "dflash-without-taps": (hub("DFlashDraftModel", 16, {"mask_token_id": 151_669}), "dflash", 15),
    "dflash-no-projector": (hub("DFlashDraftModel", 16, {**INNER, "projector_type": None}), "dflash", 15),
    "dspark-deepspec": (hub("Qwen3DSparkModel", 7, None, num_anchors=512, **DSPARK), "dspark", 7),
    "dspark-specforge": (hub("DSparkDraftModel", 7, {"projector_type": "dspark", **SPARE, **DSPARK}), "dspark", 7),
    "dspark-early": (hub("DFlashDraftModel", 7, {"projector_type": "dspark", **DSPARK}), "dspark", 7),
    "dspark-no-projector": (hub("DSparkDraftModel", 7, DSPARK), "dspark", 7),
    "deepspec-dflash": (
        hub("Qwen3DSparkModel", 7, None, **{**DSPARK, "markov_rank": 0, "enable_confidence_head": False}),
        "dspark",
        7,
    ),
    "domino-released": (hub("DFlashDraftModel", 16, {"projector_type": "domino", **DOMINO}), "domino", 16),
    "domino-specforge": (
        hub("DominoDraftModel", 16, {"projector_type": "domino", **DOMINO}, emb_dim=256),
        "domino",
        16,
    ),
    "domino-alias": (hub("DFlashDraftModel", 16, {"projector_type": "causal_v5", **DOMINO}), "domino", 16),
    "domino-no-projector": (hub("DominoDraftModel", 16, DOMINO), "domino", 16),
    "domino-emb-dim-at-the-top": (
        hub("DominoDraftModel", 16, {k: v for k, v in DOMINO.items() if k != "emb_dim"}, emb_dim=256),
        "domino",
        16,
    ),
    "domino-same-position": (
        hub("DFlashDraftModel", 16, {"projector_type": "domino", **DOMINO, "shift_label": False}),
        "domino",
        15,
    ),
}


def read_published(form: str, size: str = "4B"):
    config, family, _ = PUBLISHED[form]
    raw = {**config, **SHAPES[size]}
    assert detect_family(raw, form) == family
    return READERS[family](raw, form)


@pytest.mark.parametrize("form", PUBLISHED)
def test_every_published_form_is_what_it_is(form):
    _, family, stage_len = PUBLISHED[form]
    config = read_published(form)
    assert config.family == family
    assert config.stage_len == stage_len
    assert config.mask_token_id == 151_669
    assert config.target_layer_ids == tuple(TAPS)
    assert config.gap_rows == "producing"
    if family == "domino":
        assert (config.emb_dim, config.gru_hidden_dim, config.pure_draft_prefix_len) == (256, 1024, 1)


def test_what_early_domino_files_leave_out_has_a_meaning():
    inner = {k: v for k, v in DOMINO.items() if k in ("mask_token_id", "emb_dim")}
    raw = {**hub("DFlashDraftModel", 16, {"projector_type": "causal_v5", **inner}), **SHAPES["4B"]}
    config = READERS[detect_family(raw, "early")](raw, "early")
    assert config.gru_hidden_dim == config.emb_dim == 256
    assert (config.pure_draft_prefix_len, config.label_shift) == (0, 1)
    assert config.target_layer_ids == tuple(TAPS)


@pytest.mark.parametrize(
    ("layers", "targets", "taps"),
    [(5, 36, TAPS), (5, 40, [1, 10, 19, 28, 37]), (5, 64, [1, 16, 31, 46, 61]), (1, 36, [18]), (1, 7, [3])],
)
def test_taps_left_out_are_spread_by_the_published_rule(layers, targets, taps):
    raw = {**hub("DFlashDraftModel", 16, {"mask_token_id": 3}), **SHAPES["4B"]}
    raw |= {"num_hidden_layers": layers, "num_target_layers": targets, "layer_types": None}
    assert READERS["dflash"](raw, "x").target_layer_ids == tuple(taps)


ROWS = {  # form, size -> parameters and tensors without and with a vocabulary of its own
    ("dflash", "4B"): (537_427_200, 58, None),
    ("dflash", "8B"): (1_048_626_432, 58, None),
    ("domino-released", "4B"): (588_250_368, 62, None),
    ("domino-released", "8B"): (1_104_561_408, 62, None),
    ("dspark-deepspec", "4B"): (615_221_249, 62, 1_393_133_569),
    ("dspark-deepspec", "8B"): (1_126_422_017, 62, 2_371_081_729),
}


@pytest.mark.parametrize(("form", "size"), ROWS)
def test_released_shapes_have_the_released_numbers_of_parameters(form, size):
    parameters, count, with_vocabulary = ROWS[form, size]
    config = read_published(form, size)
    with torch.device("meta"):
        model = build(config)
    stored = model.state_dict()
    assert len(stored) == count
    assert sum(tensor.numel() for tensor in stored.values()) == parameters
    if with_vocabulary is not None:  # DeepSpec stores embedding and head too: 64 tensors
        assert parameters + 2 * config.vocab_size * config.hidden_size == with_vocabulary


def test_a_tiny_drafter_of_no_family_is_refused(target):
    with pytest.raises(UserError, match="family='dspak' is none of dflash, dspark"):
        tiny_drafter(target, family="dspak")


def test_every_reader_is_of_a_family_that_is_detected():
    assert tuple(READERS) == FAMILIES


OPTIONAL = {  # what a config of some family may say beside what is written here, by where it stands
    "": "hidden_act attention_bias layer_types norm_output rope_scaling dflash_config dloop_config eagle_config "
    "draft_vocab_size target_hidden_size num_target_layers target_layer_ids eagle_aux_hidden_state_layer_ids "
    "mtp_use_dedicated_embeddings mtp_num_hidden_layers use_ordered_embeddings tie_word_embeddings shift_label "
    "pure_draft_prefix_len gru_hidden_dim use_bias_gate use_sliding_window quantization_config fc_norm "
    "speculators_model_type transformer_layer_config conv_kernel_size",
    "dloop_config": "gap_rows rope_theta",
    "eagle_config": "eagle_aux_hidden_state_layer_ids",
    "rope_parameters": "rope_type type rope_theta partial_rotary_factor",
    "rope_scaling": "rope_type type rope_theta factor",
    "dflash_config": "projector_type markov_head_type enable_confidence_head target_layer_ids pure_draft_prefix_len",
}


def objects(raw: dict, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where the objects of a config stand."""
    yield above
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from objects(value, (*above, key))


def part_of(raw: dict, place: tuple[str, ...]) -> dict:
    """The object that stands there; an empty one is made."""
    for name in place:
        raw = raw.setdefault(name, {})
    return raw


def meaning(raw: dict) -> object:
    """What is read of a config; None where it is refused."""
    try:
        family = detect_family(raw, "config", lambda: ["pre_fc_norm_hidden.weight"])
        config = READERS[family](raw, "config")
    except UserError:
        return None
    return replace(config, published="") if isinstance(config, PublishedConfig) else config


@pytest.mark.parametrize("family", [f for f in FAMILIES if f in BLOCK_FAMILIES or f == "eagle3" or CHAIN_KINDS])
def test_null_is_as_good_as_absent_in_every_config(family, tmp_path):
    owner = {"mtp-qwen3.5": "qwen3_5", "mtp-gemma4": "gemma4"}.get(family, "qwen3")
    where = write_drafter(tiny_drafter(tiny_target(owner), family=family), tmp_path, "specforge")
    told = json.loads((where / "config.json").read_text())
    assert meaning(told) is not None
    for place in {*objects(told), *((name,) for name in OPTIONAL if name)}:
        for key in {*part_of(deepcopy(told), place), *OPTIONAL.get(place[-1] if place else "", "").split()}:
            absent, null = deepcopy(told), deepcopy(told)
            part_of(absent, place).pop(key, None)
            part_of(null, place)[key] = None
            assert meaning(null) == meaning(absent), (place, key)


def test_tensors_nested_under_an_early_name_are_found(target, tmp_path):
    written = tiny_drafter(target, family="domino")
    where = write_drafter(written, tmp_path, "dflash")
    heads = ("prefix_gru.", "embed_proj.")
    tensors(lambda t: [t.update({f"logit_head.{k}": t.pop(k)}) for k in list(t) if k.startswith(heads)])(where)
    assert alike(dloop.load_drafter(str(where), target), written)


@pytest.mark.parametrize(("said", "held"), [("dflash", "domino"), ("dflash", "dspark"), ("domino", "dspark")])
def test_a_config_and_tensors_of_two_families_are_refused(target, tmp_path, said, held):
    where = write_drafter(tiny_drafter(target, family=held), tmp_path, "specforge")
    other = write_drafter(tiny_drafter(target, family=said), tmp_path / "other", "specforge")
    shutil.copy(other / "config.json", where / "config.json")
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(where), target)
    one_line(error, str(where), f"its config says {said}", f"is {held}'s", "correct")


WRONG_DOMINO = {
    "no-emb-dim": ({"emb_dim": None}, ["'emb_dim'", "never guessed"]),
    "state-text": ({"gru_hidden_dim": "20"}, ["gru_hidden_dim='20'", "whole number"]),
    "prefix-negative": ({"pure_draft_prefix_len": -1}, ["pure_draft_prefix_len=-1", "from 0 to"]),
    "shift-text": ({"shift_label": "yes"}, ["shift_label='yes'", "true or false"]),
    "bias-gate": ({"use_bias_gate": True}, ["use_bias_gate", "experimental"]),
    "bias-norm": ({"use_bias_norm": True}, ["use_bias_norm", "experimental"]),
    "another-size": ({"gru_hidden_dim": 21}, ["prefix_gru.weight_hh_l0", "(60, 20)", "(63, 21)"]),
}


@pytest.mark.parametrize("case", WRONG_DOMINO)
def test_a_domino_config_that_does_not_fit_is_refused(target, tmp_path, case):
    change, words = WRONG_DOMINO[case]
    where = write_drafter(tiny_drafter(target, family="domino"), tmp_path, "dflash")
    nested(**change)(where)
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(where), target)
    one_line(error, str(where), *words)


def test_a_same_position_block_of_one_row_is_refused(target, tmp_path):
    where = write_drafter(tiny_drafter(target, family="dflash"), tmp_path, "specforge")
    top(block_size=1)(where)
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(where), target)
    one_line(error, str(where), "block_size=1", "row 0 is the anchor's")


def test_a_drafter_s_own_vocabulary_is_kept_when_it_differs(target, flat):
    own = load_file(flat / "model.safetensors")
    own["lm_head.weight"] += 1
    save_file(own, flat / "model.safetensors")
    drafter = dloop.load_drafter(str(flat), target)
    assert torch.equal(drafter.vocabulary.head, own["lm_head.weight"])
    assert drafter.vocabulary.embedding.data_ptr() == target.vocabulary.embedding.data_ptr()


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_every_tensor_of_the_checkpoint_makes_a_difference(target, family, tmp_path):
    """A key that is loaded but never used would pass every other check."""

    def answer(drafter: BlockDrafter) -> tuple[list[Tensor], float]:
        memory = drafter.open()
        memory.extend(0, 0, PROMPT, target.open(drafter.taps).prefill(0, PROMPT).features)
        stages = memory.draft([StageRequest(slot=0, anchor=1, index=0)])
        stages += memory.draft([StageRequest(slot=0, anchor=2, index=1)])
        hidden = memory.slots[0].hidden[1]
        _, beside = drafter.model.teacher_forced(hidden, torch.arange(memory.stage_len), drafter.vocabulary)
        return [torch.tensor(stages[1].logp), *([] if beside is None else [beside])], stages[0].score

    folder = write_drafter(tiny_drafter(target, family=family), tmp_path, "specforge")
    drafter = dloop.load_drafter(str(folder), target)
    before = answer(drafter)
    for key, weight in drafter.model.state_dict().items():
        saved = weight.clone()
        weight[..., ::2] *= 1.5
        after = answer(drafter)
        same = [torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)]
        assert not all(same), f"{key} is never used"
        weight.copy_(saved)
    assert answer(drafter)[1] == before[1]


@pytest.mark.parametrize("reading", READINGS)
def test_gap_rows_come_from_the_checkpoint_unless_an_argument_overrides_them(target, reading, tmp_path):
    where = write_drafter(tiny_drafter(target, gap_rows=reading), tmp_path, "specforge")
    assert dloop.load_drafter(str(where), target).config.gap_rows == reading
    for other in READINGS:
        assert dloop.load_drafter(str(where), target, gap_rows=other).config.gap_rows == other
    edit_config(where, lambda config: config.pop("dloop_config"))
    assert dloop.load_drafter(str(where), target).config.gap_rows == "producing"  # released checkpoints carry none


@pytest.mark.parametrize(
    "style",
    [
        {"rope_theta": 10_000.0},
        {"rope_theta": 10_000},
        {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10_000.0}},
        {"rope_theta": 10_000.0, "rope_scaling": None},
        {"rope_theta": 10_000.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 10_000, "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}},
    ],
    ids=lambda style: "+".join(style),
)
def test_the_rope_base_is_read_in_old_and_new_style(target, folder, style):
    edit_config(folder, lambda config: (config.pop("rope_theta"), config.pop("rope_parameters"), config.update(style)))
    assert dloop.load_drafter(str(folder), target).config.rope_theta == 10_000.0


def test_remote_code_is_never_run(target, folder, target_folder, tmp_path):
    marker = tmp_path / "ran"
    for where in (folder, target_folder):
        (where / "modeling.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
        names = {"AutoModel": "modeling.X", "AutoModelForCausalLM": "modeling.X", "AutoConfig": "modeling.Y"}
        edit_config(where, lambda config, names=names: config.update(auto_map=names))
    loaded = dloop.load_target(str(target_folder), dtype="float32")
    dloop.load_drafter(str(folder), loaded)
    assert not marker.exists()


@pytest.mark.parametrize("kind", (*KINDS, *WINDOW_KINDS))
@pytest.mark.parametrize("shard", ["1GB", "30KB"], ids=["single", "sharded"])
def test_targets_are_loaded_exactly(kind, shard, tmp_path):
    written = tiny_target(kind, num_layers=3)
    read = dloop.load_target(str(write_target(written, tmp_path, shard)), dtype="float32")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "30KB")
    mine, theirs = read.model.state_dict(), written.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert (read.num_layers, read.hidden_size, read.vocab_size, read.context) == (3, 32, 97, 256)
    assert read.rope_theta == (100_000.0 if kind == "gemma4" else 10_000.0)
    assert read.stop_ids == frozenset()
    plain = [dloop.generate_autoregressive(t, PROMPT, 12).tokens for t in (read, written)]
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([3, 4], 5, {3, 4}), (3, None, {3}), (None, 5, {5}), (None, [5, 6], {5, 6}), (None, None, set())],
)
def test_stop_tokens_come_from_the_generation_config_first(target_folder, generation, config, expected):
    (target_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    edit_config(target_folder, lambda raw: raw.update(eos_token_id=config))
    assert dloop.load_target(str(target_folder), dtype="float32").stop_ids == expected


def test_the_drafter_follows_its_target_to_bfloat16(target, folder, target_folder):
    half = dloop.load_target(str(target_folder), dtype="bfloat16")
    drafter = dloop.load_drafter(str(folder), half)
    assert {weight.dtype for weight in drafter.model.parameters()} == {torch.bfloat16}
    assert len(dloop.generate(half, drafter, PROMPT, 8, loop_gate=float("-inf")).tokens) == 8


def test_the_hash_covers_every_weight_file(target, tmp_path):
    drafter = tiny_drafter(target)
    whole, parts = (write_drafter(drafter, tmp_path / str(size), "specforge", size) for size in (None, 20_000))
    assert sha256(whole) == sha256(whole) != sha256(parts)
    before = sha256(parts)
    shard = sorted(parts.glob("*.safetensors"))[-1]
    tensors = {key: tensor + 1 for key, tensor in load_file(shard).items()}
    save_file(tensors, shard)
    assert sha256(parts) != before


# What is refused: the config


def edit_config(where: Path, change: Callable[[dict], object]) -> None:
    path = where / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def top(**values: object) -> Edit:
    """Set keys of the config; None removes."""

    def change(config: dict) -> None:
        config.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del config[key]

    return lambda where: edit_config(where, change)


def nested(**values: object) -> Edit:
    """Set keys inside `dflash_config`; None removes."""

    def change(config: dict) -> None:
        config["dflash_config"].update(values)
        for key in [key for key, value in values.items() if value is None]:
            del config["dflash_config"][key]

    return lambda where: edit_config(where, change)


def both(*edits: Edit) -> Edit:
    return lambda where: [edit(where) for edit in edits] and None


def replaced(name: str, content: str | bytes) -> Edit:
    return lambda where: (
        (where / name).write_bytes(content if isinstance(content, bytes) else content.encode()) and None
    )


WRONG_FAMILY = {
    "dflash2": (top(architectures=["DFlash2DraftModel"]), ["DFlash 2"]),
    "dflash2-conv": (nested(conv_kernel_size=4), ["DFlash 2"]),
    "dflash2-selector": (top(selector_rank=8), ["DFlash 2"]),
    "speculators": (top(speculators_model_type="dspark"), ["speculators format", "convert"]),
    "speculators-layer-config": (top(transformer_layer_config={"hidden_size": 32}), ["speculators format"]),
    "gemma4-dspark": (top(architectures=["Gemma4DSparkModel"]), ["Gemma 4"]),
    "dflash2-before-all": (top(architectures=["DFlash2DraftModel"], speculators_model_type="x"), ["DFlash 2"]),
    "speculators-before-dspark": (
        top(architectures=["Qwen3DSparkModel"], transformer_layer_config={}),
        ["speculators"],
    ),
    "unknown-projector": (
        both(top(architectures=["DFlashDraftModel"]), nested(projector_type="mlp")),
        ["'DFlashDraftModel'", "'mlp'"],
    ),
    "unknown-architecture": (
        both(top(architectures=["SomethingElse"]), nested(projector_type=None)),
        ["'SomethingElse'"],
    ),
    "no-architecture": (both(top(architectures=None), nested(projector_type=None)), ["(none)"]),
}


@pytest.mark.parametrize("case", WRONG_FAMILY)
def test_other_families_are_refused_by_what_they_are(target, folder, case):
    edit, words = WRONG_FAMILY[case]
    edit(folder)
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(folder), target)
    one_line(error, str(folder), *words, "supported families", *FAMILIES)


def test_a_plain_model_is_no_drafter_and_a_drafter_is_no_target(target, folder, flat, target_folder):
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(target_folder), target)
    one_line(error, str(target_folder), "plain Qwen3ForCausalLM", "--model", "--draft-model")
    for where in (folder, flat):
        with pytest.raises(UserError) as error:
            dloop.load_target(str(where))
        one_line(error, str(where), "is a drafter for a target of 4 layers", "--draft-model", "--model")


NAN, DEEP = float("nan"), '{"a":' + "[" * 100_000
SIZES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
).split()
WRONG_CONFIG = {
    "vocabulary": (top(vocab_size=98), ["98", "97", "the drafter trained for this target"]),
    "hidden-size": (top(hidden_size=64), ["hidden size 64", "32"]),
    "target-layers": (top(num_target_layers=5), ["5 layers", "has 4"]),
    "taps-out-of-range": (nested(target_layer_ids=[0, 9]), ["[0, 9]", "below 3"]),
    "taps-last-layer": (nested(target_layer_ids=[0, 3]), ["[0, 3]", "below 3"]),
    "taps-below": (nested(target_layer_ids=[-2, 1]), ["[-2, 1]"]),
    "taps-falling": (nested(target_layer_ids=[2, 0]), ["[2, 0]", "increase"]),
    "taps-twice": (nested(target_layer_ids=[1, 1]), ["[1, 1]", "increase"]),
    "taps-none": (nested(target_layer_ids=[]), ["[]"]),
    "taps-missing": (nested(target_layer_ids=None), ["'target_layer_ids'", "never guessed"]),
    "taps-no-list": (nested(target_layer_ids="0,2"), ["target_layer_ids='0,2'", "list"]),
    "rope-mismatch-new": (
        top(rope_theta=None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        ["1e+06", "10000", "accepts almost nothing", "correct rope_theta"],
    ),
    "rope-mismatch-old": (top(rope_theta=1e6, rope_parameters=None), ["1e+06", "10000", "correct rope_theta"]),
    "rope-missing": (top(rope_theta=None, rope_parameters=None), ["'rope_theta'", "never guessed"]),
    "rope-missing-in-parameters": (
        top(rope_theta=None, rope_parameters={"rope_type": "default"}),
        ["'rope_theta'", "never guessed"],
    ),
    "rope-type": (top(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}), ["'yarn'", "supported: 'default'"]),
    "rope-type-old": (top(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}), ["'linear'"]),
    "rope-no-object": (top(rope_parameters=7), ["7", "object"]),
    "rope-no-number": (top(rope_parameters=None, rope_theta="1e4"), ["rope_theta='1e4'", "number"]),
    "gap-rows": (top(dloop_config={"gap_rows": "future"}), ["gap_rows='future'", *READINGS]),
    "gap-rows-no-object": (top(dloop_config="future"), ["'future'", *READINGS]),
    "block-size-missing": (top(block_size=None), ["'block_size'", "never guessed"]),
    "block-size-text": (top(block_size="7"), ["block_size='7'", "whole number"]),
    "block-size-flag": (top(block_size=True), ["block_size=True", "whole number"]),
    "block-size-zero": (top(block_size=0), ["block_size=0", "from 1 to 1024"]),
    "mask-token-missing": (nested(mask_token_id=None), ["'mask_token_id'", "never guessed"]),
    "mask-token-outside": (nested(mask_token_id=97), ["mask_token_id=97", "out of range"]),
    "markov-rank-missing": (nested(markov_rank=None), ["'markov_rank'"]),
    "markov-head-type": (nested(markov_head_type="lstm"), ["'lstm'", "vanilla, gated or rnn"]),
    "confidence-text": (nested(enable_confidence_head="yes"), ["enable_confidence_head='yes'", "true or false"]),
    "activation": (top(hidden_act="gelu"), ["hidden_act='gelu'", "silu"]),
    "sliding-layers": (top(layer_types=["full_attention", "sliding_attention"]), ["sliding", "full attention"]),
    "nested-no-object": (top(dflash_config="dspark"), ["dflash_config", "object"]),
    **{
        f"{key}={str(value)[:9]}": (top(**{key: value}), [f"{key}=", words])
        for key, value, words in [
            *(("rms_norm_eps", value, "above 0 and below 1") for value in (NAN, -1e-6, 0, 1e9, 10**400)),
            ("max_position_embeddings", 0, "from 1 to"),
            ("block_size", 1025, "from 1 to 1024"),
            *((key, value, "from 1 to") for key in SIZES for value in (0, -1, 10**30, 2**62)),
            ("num_key_value_heads", 3, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
            ("head_dim", 7, "must be even"),
            ("architectures", True, "list of names"),
            ("architectures", [7], "list of names"),
            ("layer_types", -1, "full attention"),
        ]
    },
    "rope-bases": (
        top(rope_theta=5.0, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}),
        ["rope_theta=5 but rope_parameters.rope_theta=10000"],
    ),
    "rope-base-nan": (top(rope_theta=NAN, rope_parameters=None), ["rope_theta=nan", "above 0"]),
    "rope-scaling-beside": (top(rope_scaling={"type": "linear", "factor": 2.0}), ["'linear'"]),
    "taps-flag": (nested(target_layer_ids=[True, 2]), ["target_layer_ids=[True, 2]", "whole numbers"]),
    "deep": (replaced("config.json", DEEP), ["config.json", "not valid JSON"]),
    "invalid-json": (replaced("config.json", "{"), ["config.json", "not valid JSON"]),
    "json-list": (replaced("config.json", "[]"), ["config.json", "JSON object"]),
    "no-config": (lambda where: (where / "config.json").unlink(), ["config.json", "does not exist"]),
}


@pytest.mark.parametrize("case", WRONG_CONFIG)
def test_a_config_that_does_not_fit_is_refused(target, folder, case):
    edit, words = WRONG_CONFIG[case]
    edit(folder)
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(folder), target)
    one_line(error, str(folder), *words)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_reading_is_refused_with_the_choices(target, folder):
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(folder), target, gap_rows="future")
    one_line(error, "gap_rows='future'", *READINGS)


# What is refused: the weights


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Edit:
    def edit(where: Path) -> None:
        values = load_file(where / "model.safetensors")
        change(values)
        save_file({key: value.contiguous() for key, value in values.items()}, where / "model.safetensors")

    return edit


def poisoned(key: str, value: float) -> Edit:
    return tensors(lambda t: t[key].view(-1)[:1].fill_(value))


def pickled(name: str) -> Edit:
    def edit(where: Path) -> None:
        torch.save(load_file(where / "model.safetensors"), where / name)
        (where / "model.safetensors").unlink()

    return edit


def truncated(where: Path) -> None:
    content = (where / "model.safetensors").read_bytes()
    (where / "model.safetensors").write_bytes(content[: len(content) // 2])


def index(weight_map: dict[str, object] | None) -> Edit:
    content = {} if weight_map is None else {"weight_map": weight_map}
    return replaced("model.safetensors.index.json", json.dumps(content))


BESIDE = "no safetensors file beside it"
OUTSIDE = {
    f"index-names-{name}": (index({"fc.weight": name}), ["model.safetensors.index.json", repr(name), BESIDE])
    for name in (7, None, True, "../model.safetensors", "/model.safetensors", "a/../model.safetensors", "x.bin", "")
}

FC, HEAD, EMBED = "fc.weight", "lm_head.weight", "embed_tokens.weight"
WRONG_WEIGHTS = {
    "missing": (tensors(lambda t: t.pop(FC)), ["is missing 1 tensors", FC]),
    "unexpected": (tensors(lambda t: t.update(extra=torch.ones(2))), ["unexpected 1 tensors", "extra"]),
    "renamed": (tensors(lambda t: t.update({"fc2.weight": t.pop(FC)})), ["is missing", FC]),
    "prefixed": (tensors(lambda t: t.update({"draft_model." + FC: t.pop(FC)})), ["is missing", FC]),
    "wrong-shape": (tensors(lambda t: t.update({FC: t[FC][:, :-1]})), [FC, "(32, 63)", "(32, 64)"]),
    "transposed": (tensors(lambda t: t.update({FC: t[FC].T})), [FC, "(64, 32)", "(32, 64)"]),
    "more-layers-than-the-config": (top(num_hidden_layers=1), ["unexpected", "layers.1."]),
    "fewer-layers-than-the-config": (top(num_hidden_layers=3), ["missing", "layers.2."]),
    "nan": (poisoned(FC, float("nan")), ["NaN or infinite", FC]),
    "infinite": (poisoned("norm.weight", float("inf")), ["NaN or infinite", "norm.weight"]),
    "integers": (tensors(lambda t: t.update({FC: t[FC].to(torch.int8)})), ["quantised", FC, "int8"]),
    "float8": (tensors(lambda t: t.update({FC: t[FC].to(torch.float8_e4m3fn)})), ["quantised", FC, "float8"]),
    "embedding-without-head": (tensors(lambda t: t.update({EMBED: torch.ones(97, 32)})), [EMBED, HEAD]),
    "bin-only": (pickled("pytorch_model.bin"), ["pytorch_model.bin", "can run code", "Convert", "torch.load"]),
    "pt-only": (pickled("weights.pt"), ["weights.pt", "Convert"]),
    "no-weights": (lambda where: (where / "model.safetensors").unlink(), ["no model.safetensors", "complete"]),
    "truncated": (truncated, ["model.safetensors", "cannot be read", "fetch the checkpoint again"]),
    "garbage": (replaced("model.safetensors", b"not a tensor file"), ["cannot be read", "fetch the checkpoint again"]),
    "absent-shard": (
        index({FC: "model-00002-of-00002.safetensors"}),
        ["model-00002-of-00002.safetensors", "not found", "fetch"],
    ),
    "index-without-a-map": (index(None), ["model.safetensors.index.json", "weight_map"]),
    **OUTSIDE,
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_are_refused(target, folder, case):
    edit, words = WRONG_WEIGHTS[case]
    edit(folder)
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(folder), target)
    one_line(error, str(folder), *words)


WRONG_VOCABULARY = {
    "head-missing": (tensors(lambda t: t.pop(HEAD)), [EMBED, HEAD, "fetch it again"]),
    "head-nan": (poisoned(HEAD, float("nan")), [HEAD, "NaN or infinite"]),
    "embedding-wrong-shape": (tensors(lambda t: t.update({EMBED: t[EMBED][:-1]})), [EMBED, "(96, 32)", "(97, 32)"]),
}


@pytest.mark.parametrize("case", WRONG_VOCABULARY)
def test_an_own_vocabulary_that_does_not_fit_is_refused(target, flat, case):
    edit, words = WRONG_VOCABULARY[case]
    edit(flat)
    with pytest.raises(UserError) as error:
        dloop.load_drafter(str(flat), target)
    one_line(error, str(flat), *words)


# What is refused: targets, names, devices

NORM = "model.norm.weight"


def rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_theta": 1e4, "factor": 2.0, **more, "rope_type": kind}


def stops(content: object) -> Edit:
    return replaced("generation_config.json", json.dumps(content))


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}
WRONG_TARGET = {
    "other-architecture": (top(model_type="gpt2"), ["'gpt2'", "qwen3, qwen2, llama"]),
    "no-type": (top(model_type=None), ["supported targets", "qwen3, qwen2, llama"]),
    "sliding-layers": (top(layer_types=["sliding_attention"] * 4), ["sliding-window", "full-attention"]),
    "sliding-window": (top(use_sliding_window=True), ["sliding-window", "full-attention"]),
    "missing": (tensors(lambda t: t.pop(NORM)), ["missing 1 tensors", NORM]),
    "unexpected": (tensors(lambda t: t.update({"model.extra": torch.ones(2)})), ["unexpected", "model.extra"]),
    "wrong-shape": (tensors(lambda t: t.update({NORM: t[NORM][:-1]})), ["wrongly shaped", NORM]),
    "bin-only": (pickled("pytorch_model.bin"), ["pytorch_model.bin", "can run code", "Convert"]),
    "no-weights": (lambda where: (where / "model.safetensors").unlink(), ["no model.safetensors"]),
    "truncated": (truncated, ["safetensors"]),
    "garbage": (replaced("model.safetensors", b"not a tensor file"), ["safetensors"]),
    "absent-shard": (index({NORM: "model-00009-of-00009.safetensors"}), ["model-00009-of-00009.safetensors"]),
    "index-without-a-map": (index(None), ["model.safetensors.index.json", "weight_map"]),
    **OUTSIDE,
    "no-config": (lambda where: (where / "config.json").unlink(), ["config.json", "does not exist"]),
    "invalid-json": (replaced("config.json", "{"), ["config.json", "not valid JSON"]),
    "deep": (replaced("config.json", DEEP), ["config.json", "not valid JSON"]),
    **OUTSIDE,
    "two-sets-of-weights": (
        both(
            lambda where: shutil.copy(where / "model.safetensors", where / "other.safetensors"),
            index({NORM: "other.safetensors"}),
        ),
        ["model.safetensors and model.safetensors.index.json", "remove one"],
    ),
    "integers": (tensors(lambda t: t.update({NORM: t[NORM].to(torch.int8)})), ["quantised", NORM, "I8"]),
    "float8": (tensors(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})), ["quantised", NORM, "F8_E4M3"]),
    "nan": (poisoned(NORM, NAN), ["NaN or infinite", NORM]),
    "infinite": (poisoned("lm_head.weight", -float("inf")), ["NaN or infinite", "lm_head.weight"]),
    "longrope": (top(rope_parameters=rope("longrope", **LONG)), ["'longrope'", "length of a forward"]),
    "longrope-old": (top(rope_scaling={"type": "longrope", **LONG}), ["'longrope'", "length of a forward"]),
    "longrope-hidden": (top(rope_parameters=rope("default", type="longrope")), ["'longrope'", "length of a forward"]),
    "dynamic": (top(rope_parameters=rope("dynamic")), ["'dynamic'", "length of a forward"]),
    "rope-unknown": (top(rope_parameters=rope("x")), ["'x'", "default, linear, yarn, llama3"]),
    "rope-no-object": (top(rope_scaling=7), ["rope_scaling=7", "object"]),
    "rope-base-text": (top(rope_parameters={"rope_theta": "x", "rope_type": "default"}), ["rope_theta"]),
    "eps-nan": (top(rms_norm_eps=NAN), ["rms_norm_eps=nan"]),
    "layer-types": (top(layer_types=-1), ["layer_types=-1", "full-attention"]),
    "layers-text": (top(num_hidden_layers="4"), ["num_hidden_layers='4'", "whole number"]),
    "layers-many": (top(num_hidden_layers=1000, layer_types=None), ["1000", "its files hold"][1:]),
    "hidden-huge": (top(hidden_size=10**30), ["hidden_size=1000", "from 1 to"]),
    **{
        f"config-{key}": (top(**{key: value}), ["config.json does not describe a loadable model"])
        for key, value in [
            ("attention_dropout", "x"),
            ("hidden_act", "nothing"),
            ("hidden_act", 7),
            ("tie_word_embeddings", "no"),
            ("dtype", "float99"),
            ("layer_types", []),
        ]
    },
    **{
        f"quantised-{method}": (top(quantization_config={"quant_method": method}), [repr(method), "not supported"])
        for method in ("gptq", "fp8", "bitsandbytes", "none-known")
    },
    "quantised-text": (top(quantization_config="int4"), ["'int4'", "not supported"]),
    **{
        f"stop-{eos}": (stops({"eos_token_id": eos}), ["generation_config.json", "eos_token_id=", "below 97"])
        for eos in ("x", [[1]], -1, 97, True, [1, 97], 1.5)
    },
    "stop-list": (stops([1]), ["generation_config.json", "JSON object"]),
    "stop-config": (top(eos_token_id=97), ["config.json", "eos_token_id=97"]),
}


@pytest.mark.parametrize("case", WRONG_TARGET)
def test_a_target_that_cannot_be_decoded_exactly_is_refused(target_folder, case):
    edit, words = WRONG_TARGET[case]
    edit(target_folder)
    with pytest.raises(UserError) as error:
        dloop.load_target(str(target_folder), dtype="float32")
    one_line(error, str(target_folder), *words)


def test_a_target_with_nan_weights_is_refused_before_it_says_anything(target_folder):
    poisoned(NORM, float("nan"))(target_folder)
    with pytest.raises(UserError) as error:
        broken = dloop.load_target(str(target_folder), dtype="float32")
        dloop.generate_autoregressive(broken, PROMPT, 4)
    one_line(error, str(target_folder), "NaN")


def test_names_that_lead_nowhere_are_refused_without_a_network(target, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").write_text("")
    for name, words in {
        str(tmp_path / "nowhere"): ["neither a folder", "owner/name"],
        "a/b/c": ["neither a folder", "owner/name"],
        "./x": ["neither a folder", "owner/name"],
        str(tmp_path / "file"): ["is a file", "config.json"],
        "": ["neither a folder", "owner/name"],
        "~nobody-here/x/y": ["neither a folder", "owner/name"],
        "n" * 5000: ["neither a folder", "owner/name"],
        "bad name/x": ["neither a folder", "owner/name"],
        "owner/": ["neither a folder", "owner/name"],
        "-x/y": ["neither a folder", "owner/name"],
        "owner/name@main": ["neither a folder", "owner/name"],
        "nobody/nothing-here": ["could not be fetched", "local folder"],
    }.items():
        with pytest.raises(UserError) as error:
            dloop.load_target(name)
        one_line(error, f"target {name!r}", *words)
        with pytest.raises(UserError) as error:
            dloop.load_drafter(name, target)
        one_line(error, f"drafter {name!r}", *words)


def test_a_revision_applies_to_hub_ids_only(target, folder, target_folder):
    for name in ("smollm2", str(target_folder)):
        with pytest.raises(UserError) as error:
            dloop.load_target(name, revision="main")
        one_line(error, "'main'", f"target {name!r}", "a revision only applies to hub ids")
    for name in ("demo", str(folder)):
        with pytest.raises(UserError) as error:
            dloop.load_drafter(name, target, revision="main")
        one_line(error, "'main'", f"drafter {name!r}", "a revision only applies to hub ids")


@pytest.mark.parametrize("failure", [MemoryError("x"), torch.OutOfMemoryError("x"), KeyboardInterrupt("x")], ids=repr)
def test_want_of_memory_is_not_the_config_s_fault(target_folder, monkeypatch, failure):
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(type(failure)):
        dloop.load_target(str(target_folder))


def test_scaled_positions_that_are_the_same_in_every_forward_load(target_folder):
    for kind in ("linear", "yarn"):
        edit_config(target_folder, lambda raw, kind=kind: raw.update(rope_parameters=rope(kind)))
        dloop.load_target(str(target_folder))


@pytest.mark.usefixtures("unchecked")
def test_unknown_devices_and_types_are_refused(target_folder):
    for arguments, words in (
        ({"dtype": "float16"}, ["dtype='float16'", "float32, bfloat16"]),
        ({"device": "tpu9x"}, ["device='tpu9x'", "cpu or cuda"]),
    ):
        with pytest.raises(UserError) as error:
            dloop.load_target(str(target_folder), **arguments)
        one_line(error, *words)
    if not torch.cuda.is_available():
        with pytest.raises(UserError) as error:
            dloop.load_target(str(target_folder), device="cuda")
        one_line(error, "device='cuda'", "NVIDIA GPU", "--device cpu")
