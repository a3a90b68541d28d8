"""Models by name: their parts, their sizes, and what cannot go together."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longlens.errors import BadInput
from longlens.mixers.common import sinusoids
from longlens.mixers.registry import REGISTRY, choose_mixer, create_mixer, list_mixers, register
from longlens.models.config import ModelConfig
from longlens.models.model import Model, change_by_future, check_fit, check_mixer_builds, create_model, refuse_foresight
from longlens.models.model import count_parameters as count
from longlens.options import options_of
from longlens.tasks.base import Spec, create_task

SPECS = {
    "classify": Spec("tokens", 11, 20, "classify", 3, "accuracy"),
    "pixels": Spec("real", 2, 20, "classify", 3, "accuracy"),
    "match": Spec("tokens", 11, 20, "match", 2, "accuracy"),
    "regress": Spec("real", 3, 20, "regress", 1, "r2"),
    "positions": Spec("real", 3, 20, "regress", 1, "r2", positions=5),
    "language": Spec("tokens", 11, 20, "language", 11, "perplexity"),
}
SHAPES = {
    "classify": (2, 3),
    "pixels": (2, 3),
    "match": (2, 2),
    "regress": (2,),
    "positions": (2, 5),
    "language": (2, 13, 11),
}
SMALL = {"depth": 2, "width": 16, "heads": 4}


def inputs(spec, batch=2, length=13, dtype=torch.float64):
    if spec.inputs == "real":
        return torch.randn(batch, length, spec.size, dtype=dtype)
    return torch.randint(spec.size, (batch, 2, length) if spec.head == "match" else (batch, length))


@pytest.mark.parametrize("name", SPECS)
def test_the_output_is_what_the_task_asks_for(name):
    spec = SPECS[name]
    model = create_model(spec, "las", dtype=torch.float64, **SMALL)
    output = model(inputs(spec))
    assert output.shape == SHAPES[name]
    assert output.dtype == torch.float64
    assert all(tensor.dtype == torch.float64 for tensor in model.state_dict().values())
    assert model(inputs(spec, batch=0)).shape == (0, *SHAPES[name][1:]), "no samples, no outputs"


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("prenorm", [True, False])
def test_a_model_is_its_parts_one_after_another(prenorm, norm):
    """Without prenorm there is no norm before the head, as the last block ends in one."""
    model = create_model(SPECS["classify"], "las", prenorm=prenorm, norm=norm, dtype=torch.float64, **SMALL).eval()
    tokens, mask = inputs(SPECS["classify"]), torch.arange(13) < torch.tensor([[13], [6]])
    x = model.embedding(tokens)
    for block in (model.blocks[0], model.blocks[1]):
        x = block(x, mask)
    if prenorm and norm == "layer":
        x = F.layer_norm(x, (16,))
    elif prenorm:
        x = x / (1 + 1e-5) ** 0.5  # running statistics of a new model: mean 0, variance 1
    assert (model.norm is None) == (not prenorm)
    expected = torch.stack([x[0].mean(dim=0), x[1, :6].mean(dim=0)]) @ model.head.linear.weight.T
    torch.testing.assert_close(model(tokens, mask), expected + model.head.linear.bias, rtol=0, atol=1e-12)


def test_pairs_are_embedded_apart_from_each_other():
    """The two of a pair meet in the head only, and swapping them swaps their vectors."""
    spec = SPECS["match"]
    model = create_model(spec, "las", dtype=torch.float64, **SMALL).eval()
    pairs = inputs(spec)
    mask = torch.arange(13) < torch.tensor([[13, 5], [7, 13]]).unsqueeze(-1)
    alone = create_model(SPECS["classify"], "las", dtype=torch.float64, **SMALL).eval()
    alone.load_state_dict(
        {name: value for name, value in model.state_dict().items() if "head" not in name}, strict=False
    )
    alone.head.linear = nn.Identity()
    rows = []
    for pair, lengths in zip(pairs, ((13, 5), (7, 13)), strict=True):
        one, two = (alone(sequence[None, :length])[0] for sequence, length in zip(pair, lengths, strict=True))
        rows.append(model.head.mlp(torch.cat([one, two, one - two, one * two])))
    torch.testing.assert_close(model(pairs, mask), torch.stack(rows), rtol=0, atol=1e-11)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none", "rotary"])
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("ffn", ["plain", "glu", "none"])
def test_parameters_of_a_transformer_by_hand(ffn, prenorm, positions):
    D, depth, V, C, L = 16, 3, 11, 3, 20
    inner = 4 * D
    attention = D * 3 * D + 3 * D + D * D + D
    feedforward = {
        "plain": D * inner + inner + inner * D + D,
        "glu": D * 2 * inner + 2 * inner + inner * D + D,
        "none": 0,
    }
    norms = (1 if ffn == "none" else 2) * 2 * D
    expected = V * D + depth * (attention + feedforward[ffn] + norms) + D * C + C
    expected += (2 * D if prenorm else 0) + (L * D if positions == "learned" else 0)
    options = {"width": D, "depth": depth, "heads": 4, "ffn": ffn, "prenorm": prenorm, "positions": positions}
    assert count(create_model(SPECS["classify"], "transformer", **options)) == expected


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_all_variants_have_the_parameters_of_a_transformer(norm):
    """Norms count alike, too: running statistics are no parameters."""
    counts = {count(create_model(SPECS["classify"], name, norm=norm, **SMALL)) for name in FAMILY}
    assert len(counts) == 1


FAMILY = ("transformer", "l-attention", "s-attention", "las", "las-chunk", "las-bidirectional")


def test_only_trained_parameters_count():
    model = create_model(SPECS["classify"], "las", **SMALL)
    before = count(model)
    model.embedding.requires_grad_(False)
    assert count(model) == before - 11 * 16


def test_a_tied_head_shares_the_weights_and_counts_once():
    spec = SPECS["language"]
    tied, untied = (create_model(spec, "las", tied=tied, dtype=torch.float64, **SMALL) for tied in (True, False))
    assert tied.head.linear.weight is tied.embedding.values.weight
    assert count(untied) - count(tied) == 11 * 16
    tokens = inputs(spec)
    loss = tied(tokens).square().sum()
    (gradient,) = torch.autograd.grad(loss, tied.head.linear.weight)
    # By hand: the same model with two tables of equal weights has the two halves of that gradient.
    untied.load_state_dict(tied.state_dict())
    untied.embedding.scale, untied.head.scale = 4.0, 0.25
    both = [untied.embedding.values.weight, untied.head.linear.weight]
    halves = torch.autograd.grad(untied(tokens).square().sum(), both)
    torch.testing.assert_close(gradient, sum(halves), rtol=0, atol=1e-10)


def test_tied_is_for_languages():
    model = create_model(SPECS["classify"], "las", tied=True, **SMALL)
    assert model.embedding.scale == 1
    assert model.head.linear.weight.shape == (3, 16)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_starts_with_nearly_equal_probabilities(tied):
    spec = Spec("tokens", 500, 64, "language", 500, "perplexity")
    torch.manual_seed(0)
    model, tokens = create_model(spec, "las", tied=tied, depth=2, width=64), torch.randint(500, (4, 65))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(500)) < 0.3


def test_dropout_is_for_training_only():
    options = {"dtype": torch.float64, **SMALL}
    model = create_model(SPECS["classify"], "las", dropout=0.3, **{"mixer.dropout": 0.3}, **options)
    assert (model.dropout.p, model.blocks[0].dropout.p, model.blocks[0].mixer.dropout) == (0.3, 0.3, 0.3)
    plain, tokens = create_model(SPECS["classify"], "las", **options), inputs(SPECS["classify"])
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), plain(tokens))


@pytest.mark.parametrize("name", FAMILY)
def test_options_of_the_model_and_of_the_mixer_are_told_apart(name):
    given = {"depth": 3, "width": 32, "heads": 2, "rotary": True, "pooling": "last"}
    model = create_model(SPECS["classify"], name, **given)
    assert (model.config.depth, model.config.width, model.config.pooling) == (3, 32, "last")
    assert (len(model.blocks), model.mixer.options["heads"], model.mixer.options["rotary"]) == (3, 2, True)
    assert model.blocks[2].mixer.heads == 2
    same = create_model(SPECS["classify"], choose_mixer(name, heads=2, rotary=True), depth=3, width=32, pooling="last")
    assert same.config == model.config
    assert same.mixer == model.mixer


def test_few_options_belong_to_both():
    """Then the plain name is the model's."""
    both = {option for name in list_mixers() for option in choose_mixer(name).options} & set(options_of(ModelConfig))
    assert both == {"dropout"}
    model = create_model(SPECS["classify"], "las", dropout=0.3, **SMALL)
    assert (model.config.dropout, model.mixer.options["dropout"]) == (0.3, 0.0)


def test_a_task_or_its_name_is_as_good_as_its_spec():
    task = create_task("atomic-cumsum", max_length=30)
    model = create_model(task, "las", **SMALL)
    assert model.spec == task.spec
    assert model(torch.randn(2, 30, 3)).shape == (2, 30)
    assert create_model("atomic-cumsum", "las", **SMALL).spec == create_task("atomic-cumsum").spec


def test_blocks_share_nothing():
    model = create_model(SPECS["classify"], "las", **SMALL)
    assert len({id(parameter) for parameter in model.parameters()}) == len(model.state_dict())


def test_a_model_on_the_meta_device_has_shapes_and_no_memory():
    for positions in ("sinusoidal", "learned", "rotary"):
        with torch.device("meta"):
            model = create_model(SPECS["language"], "las", tied=True, positions=positions, **SMALL)
            assert model(torch.zeros(2, 13, dtype=torch.long)).shape == (2, 13, 11)
        assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("lass", {}, "unknown mixer 'lass'; did you mean 'las'"),
        ("las", {"dept": 3}, "neither the model nor mixer 'las' has an option 'dept'; did you mean 'depth'"),
        ("las", {"windows": 3}, "neither the model nor mixer 'las' has an option 'windows'; did you mean 'window'"),
        ("transformer", {"window": 3}, "neither the model nor mixer 'transformer' has an option 'window'"),
        ("las", {"depth": 0}, "depth must be a whole number from 1 to 10,000, got 0"),
        ("las", {"depth": "deep"}, "depth must be a whole number from 1 to 10,000, got deep"),
        ("las", {"depth": 10**23}, "depth must be a whole number from 1 to 10,000, got 1000"),
        ("las", {"width": 4 * 10**18}, "width must be a whole number from 1 to 2\\^20, got 4000000000000000000"),
        ("las", {"ffn_ratio": 1e308}, "ffn_ratio must be a number above 0, at most 1000, got 1e\\+308"),
        ("las", {"norm": "bath"}, "norm must be one of layer, batch, scale, rms, got bath"),
        ("las", {"dropout": 1.0}, "dropout must be a number of at least 0 and below 1, got 1.0"),
        ("las", {"heads": "many"}, "heads must be a whole number of at least 1, got many"),
        ("las", {"width": 30}, "heads=8 and a width of 30"),
        ("las", {"width": 24, "positions": "rotary"}, "rotary positions need heads of even width, got 24 / 8"),
        (choose_mixer("las"), {"heads": 2}, "the mixer has its options already, so heads cannot be given beside it"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(mixer, options, message):
    with pytest.raises(BadInput, match=message) as caught:
        create_model(SPECS["classify"], mixer, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        (
            "las-bidirectional",
            {},
            "needs a causal mixer, and 'las-bidirectional' is not: it cannot be, so choose another",
        ),
        ("linformer", {}, "needs a causal mixer, and 'linformer' is not: it cannot be, so choose another"),
        ("las", {"side": "centered"}, "needs a causal mixer, and 'las' is not: choose side='past'"),
        ("las-chunk", {"side": "centered", "window": 3}, "and 'las-chunk' is not: choose side='past'"),
        ("s4d", {"bidirectional": True}, "and 's4d' is not: choose bidirectional=False"),
        ("las", {"norm": "batch"}, "norm must be layer, scale or rms for a language task, got batch, which mixes pos"),
    ],
)
def test_a_language_model_sees_the_past_only(mixer, options, message):
    with pytest.raises(BadInput, match=message):
        create_model(SPECS["language"], mixer, **options)
    create_model(SPECS["classify"], mixer, **options)  # where it does no harm, it is fine


def test_smoothing_over_one_token_looks_nowhere():
    model = create_model(SPECS["language"], "las", side="centered", window=1)
    assert change_by_future(model.blocks[0].mixer, model.config.width) == 0


def test_asking_a_layer_whether_it_is_causal_draws_no_random_numbers():
    """The weights of a model are those of its seed, for a language, too."""
    torch.manual_seed(1)
    for name in list_mixers():
        check_fit("regress", choose_mixer(name), ModelConfig())
        with contextlib.suppress(BadInput):
            check_fit("language", choose_mixer(name), ModelConfig())
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


def test_a_layer_that_cannot_be_built_is_refused_before_anything_runs():
    task = create_task("atomic-cumsum")
    check_mixer_builds(task, choose_mixer("las"), ModelConfig(width=2**20))  # no memory is needed
    with pytest.raises(BadInput, match="heads=8 and a width of 30"):
        check_mixer_builds(task, choose_mixer("las"), ModelConfig(width=30))


class Dummy(nn.Module):
    """A layer of one's own: what it returns is chosen by a test."""

    returned = staticmethod(lambda x: x)

    def __init__(self, d_model: int):
        super().__init__()

    def forward(self, x, *, mask=None):
        return self.returned(x)


@pytest.fixture
def dummy(monkeypatch):
    """Its name, which does not stay."""
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    monkeypatch.setattr(REGISTRY, "homes", dict(REGISTRY.homes))
    register("dummy")(Dummy)
    return "dummy"


def test_rotary_positions_need_a_mixer_that_takes_them(dummy):
    message = "must be none, sinusoidal or learned for mixer 'dummy', which takes no rotary ones, got rotary"
    with pytest.raises(BadInput, match=message):
        create_model(SPECS["classify"], dummy, positions="rotary")
    create_model(SPECS["classify"], dummy, positions="learned")


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda x: x[:, :1], r"shape \(2, 1, 16\)"),  # which would be broadcast
        (lambda x: x.mean(1), r"shape \(2, 16\)"),
        (lambda x: (x, None), "a tuple"),
        (lambda x: None, "a NoneType"),
    ],
)
@pytest.mark.parametrize("prenorm", [True, False])
def test_a_mixer_that_returns_another_shape_is_a_sentence(dummy, monkeypatch, returned, got, prenorm):
    model = create_model(SPECS["classify"], dummy, depth=1, width=16, prenorm=prenorm)
    model(inputs(SPECS["classify"]))
    monkeypatch.setattr(Dummy, "returned", staticmethod(returned))
    wanted = r"return a tensor of the same shape, \(2, 13, 16\), got "
    with pytest.raises(BadInput, match=r"Dummy.forward\(x, \*, mask=None\) must accept .*" + wanted + got):
        model(inputs(SPECS["classify"]))


@pytest.mark.parametrize(
    ("returned", "sees"),
    [(lambda x: x.cumsum(1), False), (lambda x: x.flip(1), True), (lambda x: x + x.mean(1, keepdim=True), True)],
)
def test_a_layer_of_ones_own_that_sees_later_tokens_is_refused_whatever_it_says(dummy, monkeypatch, returned, sees):
    monkeypatch.setattr(Dummy, "returned", staticmethod(returned))
    model = create_model(SPECS["language"], dummy, depth=1, width=16)  # it says nothing, and so that it is causal
    drawn = torch.get_rng_state()
    if sees:
        with pytest.raises(
            BadInput, match="a language task needs a causal mixer, and 'dummy' is not: its outputs change"
        ):
            refuse_foresight(model)
    else:
        refuse_foresight(model)
    assert torch.equal(torch.get_rng_state(), drawn)
    refuse_foresight(create_model(SPECS["classify"], dummy, depth=1, width=16))


def test_a_mixer_that_takes_no_mask_is_a_sentence():
    class Maskless(nn.Module):
        def __init__(self, d_model: int):
            super().__init__()

        def forward(self, x):
            return x

    with pytest.raises(BadInput, match=r"must accept a mask: forward\(self, x, \*, mask=None\)"):
        register("maskless")(Maskless)


def test_rotary_positions_turn_queries_and_add_nothing():
    model = create_model(SPECS["classify"], "las", positions="rotary", dtype=torch.float64, **SMALL)
    assert all(block.mixer.rotary for block in model.blocks)
    tokens = inputs(SPECS["classify"])
    assert torch.equal(model.embedding(tokens), model.embedding.values(tokens))
    plain = create_model(SPECS["classify"], "las", positions="none", dtype=torch.float64, **SMALL)
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(tokens), model(tokens))
    assert isinstance(plain, Model)


BOTH = {"mixer": "las-bidirectional", **SMALL}


@pytest.mark.parametrize("name", ["classify", "match", "pixels", "regress"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none", "rotary"])
def test_a_learned_token_before_the_sequence_is_its_vector(name, positions):
    """As if the sequence had one more token: positions, the mask and the length of the layer count it."""
    spec = SPECS[name]
    model = create_model(spec, pooling="cls", positions=positions, dtype=torch.float64, **BOTH).eval()
    nn.init.normal_(model.embedding.cls)
    given = inputs(spec)
    lengths = torch.tensor([[13], [6]])
    mask = torch.arange(13) < (torch.tensor([[[13], [6]], [[2], [13]]]) if name == "match" else lengths)
    flat, flat_mask = (given.flatten(0, 1), mask.flatten(0, 1)) if name == "match" else (given, mask)
    rows = []
    for row, kept in zip(flat, flat_mask, strict=True):
        x = model.embedding.values(row[kept])
        x = torch.cat([model.embedding.cls[0], x])
        if positions == "sinusoidal":
            x = x + sinusoids(len(x), 16)
        elif positions == "learned":
            x = x + model.embedding.learned.weight[: len(x)]
        for block in model.blocks:
            x = block(x[None])[0]
        rows.append(model.norm(x)[0])
    pooled = torch.stack(rows)
    if name == "match":
        one, two = pooled[::2], pooled[1::2]
        expected = model.head.mlp(torch.cat([one, two, one - two, one * two], dim=-1))
    else:
        expected = model.head.linear(pooled)
    torch.testing.assert_close(model(given, mask), expected.squeeze(-1), rtol=0, atol=1e-11)
    assert model(inputs(spec, length=20)).shape[0] == 2, "the longest sequence still fits"


def test_the_token_before_the_sequence_starts_at_0_and_learns():
    model = create_model(SPECS["classify"], pooling="cls", **BOTH)
    assert model.embedding.cls.shape == (1, 1, 16)
    assert not model.embedding.cls.any()
    model(inputs(SPECS["classify"])).sum().backward()
    assert model.embedding.cls.grad.any()
    with pytest.raises(BadInput, match="at most 20 tokens, as there are learned positions, got 21"):
        create_model(SPECS["classify"], pooling="cls", positions="learned", **BOTH)(torch.zeros(2, 21, dtype=int))


def test_a_causal_layer_has_no_token_before_the_sequence():
    for mixer, way_out in (("las", "choose another one"), ("s4d", "choose bidirectional=True")):
        message = f"pooling must be mean or last for mixer '{mixer}', got cls: it is causal, .*; {way_out}"
        with pytest.raises(BadInput, match=message):
            create_model(SPECS["classify"], mixer, pooling="cls")
    assert create_model(SPECS["language"], "las", pooling="cls", **SMALL).embedding.cls is None
    assert create_model(SPECS["positions"], pooling="cls", **BOTH).embedding.cls is None


@pytest.mark.parametrize("name", ["classify", "match"])
def test_a_head_of_two_layers(name):
    """W₂·relu(W₁x + b₁) + b₂."""
    spec = SPECS[name]
    model = create_model(spec, "las", head_width=7, dtype=torch.float64, **SMALL)
    up, _, down = model.head.mlp
    assert up.weight.shape == (7, 64 if name == "match" else 16)
    x = torch.randn(4, 9, 16, dtype=torch.float64)
    pooled = x.mean(dim=1)
    if name == "match":
        one, two = pooled[::2], pooled[1::2]
        pooled = torch.cat([one, two, one - two, one * two], dim=1)
    expected = (pooled @ up.weight.T + up.bias).clamp(min=0) @ down.weight.T + down.bias
    torch.testing.assert_close(model.head(x, None), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("embedding", "expected"), [(None, 0.5), (0.0, 0.0), (0.25, 0.25)])
def test_the_embedding_may_have_a_dropout_of_its_own(embedding, expected):
    model = create_model(SPECS["classify"], "las", dropout=0.5, embedding_dropout=embedding, tied_dropout=True, **SMALL)
    assert (model.dropout.p, model.blocks[0].dropout.p) == (expected, 0.5)
    assert model.dropout.tied
    assert model.blocks[0].dropout.tied


def test_the_last_norm_can_be_left_out():
    model = create_model(SPECS["classify"], "las", final_norm=False, dtype=torch.float64, **SMALL)
    tokens = inputs(SPECS["classify"])
    x = model.embedding(tokens)
    for block in model.blocks:
        x = block(x)
    torch.testing.assert_close(model(tokens), model.head.linear(x.mean(dim=1)), rtol=0, atol=1e-12)


class Placed(nn.Module):
    """A layer that is told where it is."""

    causal = False

    def __init__(self, d_model: int, number: int = 0, shape: tuple[int, int] | None = None, max_length: int = 1):
        super().__init__()
        self.place = number, shape, max_length

    def forward(self, x, *, mask=None):
        return x


def test_a_layer_is_told_its_number_and_the_shape_of_an_image(monkeypatch):
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    monkeypatch.setattr(REGISTRY, "homes", dict(REGISTRY.homes))
    register("placed")(Placed)
    assert not choose_mixer("placed").options
    image = Spec("real", 1, 20, "classify", 3, "accuracy", shape=(4, 5))
    for pooling, places in (
        ("mean", [(0, (4, 5), 20), (1, (4, 5), 20)]),
        ("cls", [(0, None, 21), (1, None, 21)]),  # the sequence is no image any more
    ):
        model = create_model(image, "placed", depth=2, width=8, pooling=pooling)
        assert [block.mixer.place for block in model.blocks] == places
    assert create_model(SPECS["classify"], "placed", depth=1).blocks[0].mixer.place == (0, None, 20)
    assert create_mixer("placed", 8).place == (0, None, 1024)


@pytest.mark.parametrize(
    ("task", "options", "shape"),
    [
        ("image", {}, (32, 32)),
        ("smnist", {}, (28, 28)),
        ("pmnist", {}, None),
        ("pathfinder", {}, (32, 32)),
        ("pathfinder", {"size": 16, "contour": 6}, (16, 16)),
        ("path-x", {}, (128, 128)),
        ("listops", {}, None),
    ],
)
def test_tasks_of_images_say_their_height_and_width(task, options, shape):
    spec = create_task(task, **options).spec
    assert spec.shape == shape
    assert shape is None or spec.max_length == shape[0] * shape[1]
