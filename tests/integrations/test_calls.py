"""``replace_attention`` in modules that call ``scaled_dot_product_attention`` themselves."""

import copy
import io
import pickle
from functools import partial, update_wrapper
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from longlens import LaSAttention, create_mixer, decay_rates, las_attention, replace_attention
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


class Causal(nn.Module):
    """A causal layer of torch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False, attn_mask=~CAUSAL, is_causal=True)[0]


class Pooled(nn.Module):
    """Attention within a module that attends itself."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        x = self.block(x).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x).squeeze(1)


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


@pytest.mark.parametrize(
    "inner",
    [
        Causal,
        lambda: create_mixer("transformer", D, heads=H),
        lambda: Pooled(Attention()),
        lambda: LaSAttention(D, H, **STEEP),
    ],
)
def test_attention_within_another_is_las_once_with_settings_of_its_own(inner):
    alone, pool = inner().double(), Pooled(nn.Identity())
    model = Pooled(copy.deepcopy(alone))
    replace_attention(model, max_rate=0.1, window=5)
    replace_attention(pool, max_rate=0.1, window=5)
    if not isinstance(alone, LaSAttention):
        for module in (alone, model.block):
            replace_attention(module, **STEEP)
    x = torch.randn(B, L, D, dtype=torch.float64)
    actual, expected = model(x), pool(alone(x))
    close(actual, expected, 1e-12)
    found = torch.autograd.grad(actual.square().sum(), list(model.parameters()))
    close(found, torch.autograd.grad(expected.square().sum(), list(alone.parameters())), 1e-11)


def test_what_cannot_be_las_stays_plain_within_another():
    alone = create_mixer("bigbird", D, heads=H, block_size=2, dtype=torch.float64)
    model, pool = Pooled(copy.deepcopy(alone)), Pooled(nn.Identity())
    assert replace_attention(model, **STEEP).replaced == ("Pooled",)
    replace_attention(pool, **STEEP)
    x = torch.randn(B, L, D, dtype=torch.float64)
    close(model(x), pool(alone(x)), 1e-12)


def test_every_method_is_las_also_if_it_is_called_by_itself():
    class Features(Attention):
        def features(self, x):
            return self.heads_of(x, lambda y: F.scaled_dot_product_attention(y, y, y))

        def heads_of(self, x, attend):
            return attend(x.unflatten(-1, (H, -1)).transpose(1, 2))

        def forward(self, x):
            return self.features(x).transpose(1, 2).flatten(2)

    plain = Features().double()
    las = copy.deepcopy(plain)
    replace_attention(las, **STEEP)
    x = torch.randn(B, L, D, dtype=torch.float64)
    y = x.unflatten(-1, (H, -1)).transpose(1, 2)
    expected = las_attention(y, y, y, decay=decay_rates(H, 0.3), smoothing=3, is_causal=False)
    close(las.features(x), expected)
    close(las(x), expected.transpose(1, 2).flatten(2))
    close(las.attend(y, y, y, None, False, 0.0), expected)
    close(type(las).attend(y, y, y, None, False, 0.0), plain.features(x), 1e-12)


def test_calls_in_functions_within_a_method_are_found():
    class Inner(nn.Module):
        def forward(self, x):
            def attend(y):
                return (lambda z: F.scaled_dot_product_attention(z, z, z))(y)

            return attend(x)

    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = F.scaled_dot_product_attention

        def forward(self, x):
            return self.attend(x, x, x)

    x = torch.randn(B, H, L, 6, dtype=torch.float64)
    expected = las_attention(x, x, x, decay=decay_rates(H, 0.3), smoothing=3, is_causal=False)
    model = nn.ModuleList([Inner(), Made()])
    assert replace_attention(model, **STEEP).replaced == ("0", "1")
    for module in model:
        close(module(x), expected)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_forward_of_one_module_goes_on(is_first):
    """As accelerate sets it, around the old one, and later the old one again."""
    plain, las, x = both()
    hooked = copy.deepcopy(plain)
    old = hooked.forward
    if not is_first:
        replace_attention(hooked, **STEEP)
    hooked.forward = update_wrapper(partial(lambda module, x: 2 * old(x), hooked), old)
    for settings, expected in ((STEEP, las(x)), ({"max_rate": 0, "window": None}, plain(x))):
        replace_attention(hooked, **settings)
        close(hooked(x), 2 * expected, 1e-12)
    replace_attention(hooked, **STEEP)
    hooked.forward = old
    close(hooked(x), las(x), 1e-12)


def test_the_function_is_found_under_another_name():
    class Aliased(nn.Module):
        def forward(self, x):
            return sdpa(x, x, x)

    model, x = Aliased(), torch.randn(B, H, L, 6, dtype=torch.float64)
    assert replace_attention(model, **STEEP).replaced == ("Aliased",)
    close(model(x), las_attention(x, x, x, decay=decay_rates(H, 0.3), smoothing=3, is_causal=False))


def test_an_attribute_of_that_name_is_no_attention():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.sdpa = Attention()

        def forward(self, x):
            return self.sdpa(x)

    assert replace_attention(Block(), **STEEP).replaced == ("sdpa",)


def test_a_forward_may_call_itself():
    class Split(Attention):
        def forward(self, x, is_causal=True):
            if x.ndim == 4:
                return torch.stack([self(y) for y in x])
            return super().forward(x, is_causal=is_causal)

    _, las, x = both()
    split = Split().double()
    split.load_state_dict(las.state_dict())
    replace_attention(split, **STEEP)
    close(split(torch.stack([x, x])), las(x, is_causal=True).expand(2, -1, -1, -1), 1e-12)


def test_new_modules_of_its_class_are_plain_and_no_class_is_registered():
    class Registered(Attention):
        classes: ClassVar = []

        def __init_subclass__(cls):
            cls.classes.append(cls)

    class Made(Registered):
        def __init__(self):
            super().__init__()
            self.reset()

        def reset(self):
            nn.init.ones_(self.out_proj.bias)

    model = Made()
    replace_attention(model, **STEEP)
    assert [Made] == Registered.classes
    new, plain = type(model)().double(), Made().double()
    new.load_state_dict(plain.state_dict())
    x = torch.randn(B, L, D, dtype=torch.float64)
    assert torch.equal(new(x), plain(x))


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_masks_of_torch_are_causal(bias):
    class Biased(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=bias(L, L))

    model, x = Biased(), torch.randn(B, H, L, 6, dtype=torch.float64)
    replace_attention(model, **STEEP)
    close(model(x), las_attention(x, x, x, decay=decay_rates(H, 0.3), smoothing=3))


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


def test_a_method_that_is_recomputed_is_las_too():
    class Saving(Attention):
        def forward(self, x):
            query, key, value = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = checkpoint(self.attend, query, key, value, None, True, 0.0, use_reentrant=False)
            return self.out_proj(y.transpose(1, 2).flatten(2))

    plain, las, x = both()
    saving = Saving().double()
    saving.load_state_dict(plain.state_dict())
    replace_attention(saving, **STEEP)
    found = torch.autograd.grad(saving(x).square().sum(), list(saving.parameters()))
    expected = torch.autograd.grad(las(x, is_causal=True).square().sum(), list(las.parameters()))
    close(found, expected, 1e-11)


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make", [copy.copy, lambda module: module._replicate_for_data_parallel()])
def test_a_shallow_copy_computes_with_weights_of_its_own(make):
    _, las, x = both()
    other, weights = make(las), Attention().double()
    other._modules = dict(weights._modules)
    replace_attention(weights, **STEEP)
    assert torch.equal(other(x), weights(x))
    assert not torch.equal(other(x), las(x))


def test_copies_pickles_and_other_settings():
    plain, las, x = both()
    for other in (copy.deepcopy(las), pickle.loads(pickle.dumps(las)), saved(las)):
        assert isinstance(other, Attention)
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


@pytest.mark.parametrize("is_first", [True, False])
def test_a_compiled_parent_and_compiled_methods_are_las(is_first):
    class Inner(nn.Module):
        @torch.compile(backend="aot_eager")
        def attend(self, x):
            return F.scaled_dot_product_attention(x, x, x)

        def forward(self, x):
            return self.attend(x)

    x = torch.randn(B, H, L, 6, dtype=torch.float64)
    expected = las_attention(x, x, x, decay=decay_rates(H, 0.3), smoothing=3, is_causal=False)
    model = nn.Sequential(nn.Identity(), Inner())
    compiled = torch.compile(model, backend="aot_eager") if is_first else None
    replace_attention(model, **STEEP)
    close((compiled or torch.compile(model, backend="aot_eager"))(x), expected, 1e-12)
    close(model[1].attend(x), expected, 1e-12)


def test_it_is_exported():
    plain, las, x = both()
    close(torch.export.export(las, (x,), {"is_causal": True}).module()(x, is_causal=True), as_layer(plain)(x))


def test_what_las_is_not():
    x = torch.randn(B, L, D)
    pool = Pool()
    replace_attention(pool, **STEEP)
    with pytest.raises(BadInput, match="of one sequence for LaS, got 1 and 9: between two there is no distance; name"):
        pool(x)
    unfused = Attention(fused=False)
    replace_attention(unfused, **STEEP)
    with pytest.raises(BadInput, match="Attention has not called scaled_dot_product_attention"):
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
    nested = torch.nested.nested_tensor([x[0], x[1, :5]], layout=torch.jagged)
    with pytest.raises(BadInput, match="query must be an ordinary tensor, got a nested one"):
        flat(nested.unflatten(-1, (H, -1)).transpose(1, 2))
