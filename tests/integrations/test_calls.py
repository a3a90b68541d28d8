"""``replace_attention`` in modules that call ``scaled_dot_product_attention`` themselves."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from longlens import LaSAttention, create_mixer, replace_attention
from longlens.errors import BadInput
from longlens.integrations.masked import split_mask

D, H, L, B = 24, 4, 9, 3
STEEP = {"max_rate": 0.3, "window": 3}
TOKENS = torch.arange(L) < torch.tensor([[9], [5], [2]])
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()


class Attention(nn.Module):
    """As nanoGPT and timm write it."""

    def __init__(self, heads=H, fused=True):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.in_proj, self.out_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, mask=None, *, is_causal=False, dropout_p=0.0):
        query, key, value = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = self.attend(query, key, value, mask, is_causal, dropout_p)
        else:
            y = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, dim=-1) @ value
        return self.out_proj(y.transpose(1, 2).flatten(2))

    @staticmethod
    def attend(query, key, value, mask, is_causal, dropout_p):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(D)

    def forward(self, x, **options):
        return x + self.attention(self.norm(x), **options)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, is_causal=True)
        return x


class Pool(nn.Module):
    """A query of its own."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 1, D))

    def forward(self, x):
        return scaled_dot_product_attention(self.query.expand(len(x), -1, -1, -1), x.unsqueeze(1), x.unsqueeze(1))


def as_layer(attention, **options):
    layer = LaSAttention(D, H, **STEEP, **options)
    layer.load_state_dict(attention.state_dict())
    return layer.double()


def both(**options):
    plain = Attention().double()
    las = copy.deepcopy(plain)
    replace_attention(las, **STEEP | options)
    return plain, las, torch.randn(B, L, D, dtype=torch.float64)


def close(actual, expected, tolerance=1e-6):  # rates are float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_layer_with_its_gradients(causal):
    plain, las, x = both()
    layer = as_layer(plain, bidirectional=not causal)
    actual, expected = las(x, is_causal=causal), layer(x)
    close(actual, expected)
    weight = torch.randn_like(actual)
    found = [
        torch.autograd.grad((y * weight).sum(), m.in_proj.weight)[0] for y, m in ((actual, las), (expected, layer))
    ]
    close(*found, 1e-5)
    assert (actual - plain(x, is_causal=causal)).abs().max() > 1e-3


def test_masks_say_what_is_seen():
    plain, las, x = both()
    close(las(x, CAUSAL), as_layer(plain)(x))
    padded = as_layer(plain, bidirectional=True)(x, mask=TOKENS)
    close(las(x, TOKENS[:, None, None, :])[TOKENS], padded[TOKENS])
    for fill in (-torch.inf, torch.finfo(torch.float64).min, -1e9, -1e4):
        numbers = torch.zeros(B, 1, 1, L, dtype=torch.float64).masked_fill(~TOKENS[:, None, None, :], fill)
        close(las(x, numbers)[TOKENS], padded[TOKENS])
        close(las(x, torch.zeros(L, L, dtype=torch.float64).masked_fill(~CAUSAL, fill)), as_layer(plain)(x))
    document = torch.arange(L) >= 4
    apart = document[:, None] == document
    close(las(x, apart)[:, 4:], as_layer(plain, bidirectional=True)(x[:, 4:]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", ["-inf", "smallest", -1e4])
def test_what_hides(dtype, fill):
    value = torch.finfo(dtype).min if fill == "smallest" else float(fill)
    seen, bias = split_mask(torch.tensor([[0.0, value, -100.0]], dtype=dtype))
    assert seen.tolist() == [[True, False, True]]
    assert bias is not None
    assert bias.tolist() == [[0.0, 0.0, -100.0]]


def test_a_learned_bias_that_begins_with_0_gets_its_gradient():
    plain, las, x = both(max_rate=0, window=None)
    bias = torch.zeros(H, L, L, dtype=torch.float64, requires_grad=True)
    found, expected = (torch.autograd.grad(layer(x, bias).square().sum(), bias)[0] for layer in (las, plain))
    close(found, expected, 1e-12)
    assert expected.abs().max() > 1e-3


def test_without_decay_and_smoothing_it_is_what_it_was():
    plain, las, x = both(max_rate=0, window=None)
    bias = torch.randn(H, L, L, dtype=torch.float64)
    for mask in (None, CAUSAL, TOKENS[:, None, None, :], bias):
        close(las(x, mask), plain(x, mask), 1e-12)


def test_dropout_and_grouped_heads_go_on():
    _, las, x = both()
    assert (las(x, dropout_p=0.5) - las(x)).abs().max() > 1e-3

    class Grouped(nn.Module):
        def forward(self, query, key):
            return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True, scale=0.3)

    grouped, query, key = Grouped(), torch.randn(B, 4, L, 6), torch.randn(B, 2, L, 6)
    plain = grouped(query, key)
    replace_attention(grouped, max_rate=0, window=None)
    close(grouped(query, key), plain)


def test_all_that_call_it_are_found_and_no_others():
    model = nn.Sequential(
        Block(), nn.Linear(D, D), Block(), nn.MultiheadAttention(D, H), create_mixer("transformer", D, heads=H)
    )
    found = replace_attention(model, **STEEP, skip=["2"])
    assert found.replaced == ("0.attention", "3", "4")
    assert found.left == {"2.attention": "it is to be skipped"}
    x = torch.randn(B, L, D)
    layer = LaSAttention(D, H, **STEEP)
    layer.load_state_dict(model[4].state_dict())
    close(model[4](x), layer(x))
    with pytest.raises(
        BadInput, match=r"no attention that can be replaced \(nn.MultiheadAttention, or modules that call"
    ):
        replace_attention(nn.Linear(2, 2))


def test_what_is_skipped_stays_plain_inside_of_another():
    class Outer(Attention):
        def __init__(self):
            super().__init__()
            self.inner = Attention()

        def forward(self, x):
            return super().forward(self.inner(x))

    model = nn.Sequential(Outer(), Attention())
    found = replace_attention(model, **STEEP, skip=["0.inner"])
    assert found.replaced == ("1",)
    assert found.left == {"0": "it contains what is to be skipped", "0.inner": "it is to be skipped"}


def test_what_is_recomputed_for_the_backward_pass_is_las_too():
    model = Checkpointed()
    replace_attention(model, **STEEP)
    x = torch.randn(B, L, D)
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    direct = x
    for block in model.blocks:
        direct = block(direct, is_causal=True)
    for actual, expected in zip(
        found, torch.autograd.grad(direct.square().sum(), list(model.parameters())), strict=True
    ):
        close(actual, expected, 1e-4)


def test_copies_pickles_and_other_settings():
    plain, las, x = both()
    for other in (copy.deepcopy(las), pickle.loads(pickle.dumps(las))):
        assert torch.equal(other(x), las(x))
        other.out_proj.weight.data.zero_()
        assert not torch.equal(other(x), las(x)), "it is a model of its own"
    replace_attention(las, max_rate=0, window=None)
    close(las(x), plain(x), 1e-12)
    assert las.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.filterwarnings("ignore")
def test_it_compiles():
    plain, las, x = both()
    torch._dynamo.reset()
    compiled = torch.compile(las, backend="eager")
    close(compiled(x, is_causal=True), as_layer(plain)(x))
    close(compiled(x[:, :5], is_causal=True), as_layer(plain)(x[:, :5]))


def test_what_las_is_not():
    x = torch.randn(B, L, D)
    pool = Pool()
    replace_attention(pool, **STEEP)
    with pytest.raises(BadInput, match="of one sequence for LaS, got 1 and 9: between two there is no distance; name"):
        pool(x)
    unfused = Attention(fused=False)
    replace_attention(unfused, **STEEP)
    with pytest.raises(BadInput, match="Attention has computed its attention without scaled_dot_product_attention"):
        unfused(x)
    attention = Attention()
    replace_attention(attention, **STEEP)
    with pytest.raises(BadInput, match="attn_mask must be None if is_causal is True"):
        attention(x, CAUSAL, is_causal=True)

    class Flat(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    flat = Flat()
    replace_attention(flat, **STEEP)
    with pytest.raises(BadInput, match=r"\(batch, heads, length, width\) for LaS, got the shape \(3, 9, 24\)"):
        flat(x)
