import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from longlens import LaSAttention, LaSCache, las_attention
from longlens.bench.measure import peak_memory
from longlens.errors import BadInput
from longlens.mixers.registry import create_mixer, find_mixer

VARIANTS = {
    "las": {},
    "las-chunk": {"chunk_size": 7},
    "l-attention": {"window": None},
    "s-attention": {"max_rate": 0.0},
    "steep": {"max_rate": 40.0},
    "literal": {"schedule": "literal"},
    "rotary": {"rotary": True},
    "rotary chunks": {"rotary": True, "chunk_size": 7},
}


def sequence(length=23):
    return torch.randn(2, length, 16, dtype=torch.float64)


@pytest.mark.parametrize("name", VARIANTS)
def test_step_by_step_equals_the_whole_sequence(name):
    layer, x = LaSAttention(16, 4, dtype=torch.float64, **VARIANTS[name]), sequence()
    whole = layer(x)
    for sizes in ([1] * 23, [5, 1, 9, 8], [23], [22, 1], [0, 6, 0, 17]):
        cache = LaSCache()
        parts = [layer(part, cache=cache) for part in x.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_fill_the_cache_of_decoding(name):
    """A step is a part of one token, and other parts may follow it."""
    layer, x = LaSAttention(16, 4, dtype=torch.float64, **VARIANTS[name]), sequence()
    state, outputs = None, []
    for t in range(9):
        output, state = layer.step(x[:, t], state)
        outputs.append(output)
    assert isinstance(state, LaSCache)
    assert state.seen == 9
    outputs = torch.cat([torch.stack(outputs, dim=1), layer(x[:, 9:], cache=state)], dim=1)
    torch.testing.assert_close(outputs, layer(x), rtol=0, atol=1e-12)


def test_step_misuse_is_refused():
    for options in ({"bidirectional": True}, {"side": "centered"}):
        with pytest.raises(ValueError, match="step needs a causal layer"):
            LaSAttention(16, 4, dtype=torch.float64, **options).step(sequence()[:, 0])
    layer = LaSAttention(16, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x must have the shape \(batch, 16\) in a step, got \(2, 23, 16\)"):
        layer.step(sequence())
    with pytest.raises(TypeError, match="cache must be a LaSCache, got a tuple"):
        layer.step(sequence()[:, 0], ())
    centered = LaSAttention(16, 4, side="centered", window=1, dtype=torch.float64)
    assert centered.step(sequence()[:, 0])[0].shape == (2, 16), "a window of 1 looks nowhere"


def test_the_cache_of_chunks_is_bounded():
    layer, cache = LaSAttention(16, 4, chunk_size=7, dtype=torch.float64), LaSCache()
    for part in sequence().split(3, dim=1):
        layer(part, cache=cache)
        assert len(cache) < 7


def test_cache_misuse_is_refused():
    x, mask = sequence(), torch.ones(2, 23, dtype=torch.bool)
    for options in ({"bidirectional": True}, {"side": "centered"}):
        with pytest.raises(ValueError, match="cache needs a causal layer"):
            LaSAttention(16, 4, dtype=torch.float64, **options)(x, cache=LaSCache())
    layer, cache = LaSAttention(16, 4, dtype=torch.float64), LaSCache()
    with pytest.raises(ValueError, match="cache does not take a mask"):
        layer(x, mask=mask, cache=cache)
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="x must have the cache's batch of 2, got 1: start a new cache"):
        layer(x[:1], cache=cache)
    with pytest.raises(ValueError, match=r"x must give keys of torch\.float64 as the cache's, got torch\.float32"):
        layer.float()(x.float(), cache=cache)
    assert len(cache) == 23, "a refused step leaves the cache as it was"


def test_plain_attention_is_a_special_case():
    """With no decay and no smoothing, and its own weights, it is nn.MultiheadAttention."""
    layer, x = LaSAttention(16, 4, max_rate=0.0, window=None, dtype=torch.float64), sequence()
    plain = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    plain.load_state_dict(
        {
            "in_proj_weight": layer.in_proj.weight,
            "in_proj_bias": layer.in_proj.bias,
            "out_proj.weight": layer.out_proj.weight,
            "out_proj.bias": layer.out_proj.bias,
        }
    )
    mask = torch.nn.Transformer.generate_square_subsequent_mask(23, dtype=torch.float64)
    expected, _ = plain(x, x, x, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"side": "centered"}, {"bidirectional": True}, {"chunk_size": 7}])
def test_attention_weights_explain_the_output(options):
    layer, x = LaSAttention(16, 4, max_rate=0.1, dtype=torch.float64, **options), sequence()
    value = layer.in_proj(x)[..., 32:].unflatten(-1, (4, 4)).transpose(1, 2)
    output = layer.out_proj((layer.attention_weights(x) @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), output, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"side": "centered"}, {"bidirectional": True}, {"chunk_size": 7}])
def test_padding_does_not_change_the_tokens(options):
    layer, x = LaSAttention(16, 4, max_rate=0.1, dtype=torch.float64, **options), sequence()
    mask = torch.arange(30) < 23
    padded = torch.cat([x, 100 * torch.randn(2, 7, 16, dtype=torch.float64)], dim=1)
    output = layer(padded, mask=mask.expand(2, -1))
    torch.testing.assert_close(output[:, :23], layer(x), rtol=0, atol=1e-12)


def test_state_dict_keys_are_frozen():
    """Checkpoints of strangers depend on these names. There are no buffers: nothing for DDP to broadcast."""
    names = ["in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"]
    assert list(LaSAttention(16, 4).state_dict()) == names
    assert list(LaSAttention(16, 4, bias=False).state_dict()) == ["in_proj.weight", "out_proj.weight"]
    assert not list(LaSAttention(16, 4).buffers())


def test_it_has_the_parameters_of_plain_attention():
    count = sum(p.numel() for p in LaSAttention(16, 4).parameters())
    assert count == sum(p.numel() for p in torch.nn.MultiheadAttention(16, 4).parameters())


def test_meta_device_then_reset_parameters():
    torch.manual_seed(1)
    expected = LaSAttention(16, 4)
    with torch.device("meta"):
        layer = LaSAttention(16, 4)
    assert all(p.is_meta for p in layer.parameters())
    assert layer(torch.empty(1, 5, 16, device="meta")).shape == (1, 5, 16)
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    x = torch.randn(1, 10, 16)
    assert torch.isfinite(layer(x)).all()
    assert layer.rates == expected.rates
    assert layer.in_proj.weight.std().item() == pytest.approx(expected.in_proj.weight.std().item(), rel=0.2)


def test_rates_survive_low_precision_and_copies():
    layer = LaSAttention(16, 4)
    rates = layer.rates
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert LaSAttention(16, 4).rates == rates
    finally:
        torch.set_default_dtype(torch.float32)
    assert copy.deepcopy(layer).bfloat16().rates == rates
    assert layer.half()(torch.randn(1, 5, 16, dtype=torch.float16)).dtype == torch.float16


def test_dropout_only_in_training():
    layer, x = LaSAttention(16, 4, dropout=0.5, dtype=torch.float64), sequence()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_autocast():
    layer, x = LaSAttention(16, 4), torch.randn(2, 20, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    assert (output - layer(x)).abs().max() < 0.05
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("length", "chunk_size"), [(1024, None), (2048, None), (2048, 128)])
def test_peak_memory_is_that_of_plain_attention(length, chunk_size):
    layer = LaSAttention(256, 8, chunk_size=chunk_size)
    x = torch.randn(1, length, 256, requires_grad=True)

    def plain():
        query, key, value = layer.in_proj(x).unflatten(-1, (3, 8, 32)).permute(2, 0, 3, 1, 4)
        if chunk_size is None:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            attended = las_attention(query, key, value, chunk_size=chunk_size)
        return layer.out_proj(attended.transpose(1, 2).flatten(2))

    cpu = torch.device("cpu")
    las = peak_memory(lambda: layer(x).sum().backward(), cpu)
    assert las <= 1.15 * peak_memory(lambda: plain().sum().backward(), cpu)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((16, 3), {}, "num_heads must divide the width of the layer, got num_heads=3 and a width of 16"),
        ((16, 0), {}, "num_heads must be a whole number of at least 1, got 0"),
        ((16.5, 4), {}, "embed_dim must be a whole number of at least 1, got 16.5"),
        ((0, 4), {}, "embed_dim must be a whole number of at least 1, got 0"),
        ((20, 4), {"rotary": True}, "rotary positions need heads of even width, got 20 / 4"),
        ((16, 4), {"window": True}, "window must be an odd number of at least 1 or none, got True"),
        ((16, 4), {"window": 4}, "window must be an odd number of at least 1 or none, got 4"),
        ((16, 4), {"max_rate": -1.0}, "max_rate must be a number of at least 0, got -1.0"),
        ((16, 4), {"max_rate": math.inf}, "max_rate must be a number of at least 0, got inf"),
        ((16, 4), {"side": "left"}, "side must be past or centered, got left"),
        ((16, 4), {"schedule": "linear"}, "schedule must be one of exp-uniform, positive, literal, got linear"),
        (
            (16, 4),
            {"schedule": "literal", "max_rate": 1.0},
            "max_rate must be a number between 0 and 1 for sche",
        ),
        ((16, 4), {"chunk_size": 0}, "chunk_size must be a whole number of at least 1 or none, got 0"),
        ((16, 4), {"dropout": 2.0}, "dropout must be a number of at least 0 and below 1, got 2.0"),
    ],
)
def test_bad_construction(arguments, options, message):
    with pytest.raises(BadInput, match=message):
        LaSAttention(*arguments, **options)


def test_it_says_how_it_is_called():
    assert "layer(x, mask=tokens)" in LaSAttention.__doc__
    assert "replace_attention" in LaSAttention.__doc__
    assert all(f"    {name}: " in LaSAttention.forward.__doc__ for name in ("x", "mask", "cache"))


def test_bad_input():
    layer = LaSAttention(16, 4)
    with pytest.raises(ValueError, match=r"x must have the shape \(batch, length, 16\), got \(2, 5, 8\)"):
        layer(torch.zeros(2, 5, 8))
    for arguments, message in (
        (([1.0],), "x must be a Tensor, got a list"),
        ((torch.zeros(2, 5, 16),), "cache must be a LaSCache, got a dict"),
    ):
        with pytest.raises(TypeError, match=message):
            layer(*arguments, cache={})
    with pytest.raises(ValueError, match=r"mask must be boolean with the shape \(batch, length\) = \(2, 5\)"):
        layer(torch.zeros(2, 5, 16), mask=torch.ones(2, 5))


@pytest.mark.parametrize(
    ("name", "decays", "smooths", "chunk_size", "bidirectional"),
    [
        ("las", True, True, None, False),
        ("las-chunk", True, True, 128, False),
        ("las-bidirectional", True, True, None, True),
        ("l-attention", True, False, None, False),
        ("s-attention", False, True, None, False),
    ],
)
def test_what_a_name_means_is_no_option_of_it(name, decays, smooths, chunk_size, bidirectional):
    layer = create_mixer(name, 16, heads=4, rotary=True)
    assert isinstance(layer, LaSAttention)
    assert (layer.heads, layer.rotary, layer.chunk_size) == (4, True, chunk_size)
    assert (any(layer.rates), layer.window is not None, layer.bidirectional) == (decays, smooths, bidirectional)
    assert layer.causal is not bidirectional
    options = find_mixer(name).options
    assert ("max_rate" in options, "window" in options, "bidirectional" in options) == (decays, smooths, False)
    if smooths:
        centered = create_mixer(name, 16, side="centered")
        assert not centered.causal, "a centered window looks ahead"
    else:
        with pytest.raises(BadInput, match=f"mixer '{name}' has no option 'window'"):
            create_mixer(name, 16, window=5)


@pytest.mark.slow
def test_it_learns_to_copy_the_previous_token():
    """A layer that trains: predict the token before, which needs attention and positions that decay."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 8, (64, 32))
    embed, layer, head = (
        torch.nn.Embedding(8, 32),
        LaSAttention(32, 4, max_rate=3.0, window=None),
        torch.nn.Linear(32, 8),
    )
    positions = torch.nn.Parameter(torch.randn(32, 32) * 0.1)
    parameters = list(itertools.chain(embed.parameters(), layer.parameters(), head.parameters(), [positions]))
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    losses = []
    for _ in range(150):
        loss = F.cross_entropy(head(layer(embed(tokens) + positions))[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
