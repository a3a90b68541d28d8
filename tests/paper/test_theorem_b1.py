"""Theorem B.1: the heads, run as attention, are the convolution. Witnesses: ``numpy.convolve`` and a case by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.registry import create_mixer
from longlens.ops.long_conv import long_conv_reference
from longlens.paper import theorem_b1
from longlens.paper.theorem_b1 import (
    LOG_ZERO,
    encode,
    express,
    head_for_kernel,
    heads_for,
    heads_for_signed_kernel,
    reproduce_theorem,
)

WIDTH = 4  # of the layers
EPSILON = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def convolve(kernel, u):
    return torch.from_numpy(np.convolve(kernel.numpy(), u.numpy())[: len(u)])


def layer_kernels(name, length):
    """The kernels of a new causal layer, a row for each channel."""
    torch.manual_seed(0)
    options = {"bidirectional": False} if name == "sgconv" else {}
    layer = create_mixer(name, WIDTH, max_length=length, dtype=torch.float64, **options).eval()
    return layer.kernel(length).detach()


KERNELS = {
    "signed": lambda length: numbers(length),
    "non-negative": lambda length: numbers(length).abs(),
    "all below 0": lambda length: -numbers(length).abs(),
    "zeros at the start": lambda length: numbers(length).abs() * (torch.arange(length) >= length // 2),
    "zeros at the end": lambda length: numbers(length).abs() * (torch.arange(length) < (length + 1) // 2),
    "every other one": lambda length: numbers(length) * (torch.arange(length) % 2),
    "all zeros": lambda length: torch.zeros(length, dtype=torch.float64),
    "steep": lambda length: torch.exp(-40.0 * torch.arange(length, dtype=torch.float64)),  # down to 0, by way of 1e-320
    "large": lambda length: 1e200 * numbers(length),
    "tiny": lambda length: 1e-300 * numbers(length),
}


def test_a_kernel_of_two_by_hand():
    """k = (3, 1), c = 4, c_1 = 1: the rows of softmax are (3/4, 0, 1/4), (1/4, 3/4, 0) and (0, 0, 1)."""
    head = head_for_kernel(torch.tensor([3.0, 1.0]))
    u = torch.tensor([5.0, 7.0], dtype=torch.float64)
    tokens = encode(u, 2)
    assert tokens.tolist() == [[1, 0, 0, 5], [0, 1, 0, 7], [0, 0, 1, 0]]
    weights = head.attention_weights(tokens)[0]
    hand = torch.tensor([[0.75, 0, 0.25], [0.25, 0.75, 0], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(weights, hand, rtol=0, atol=1e-15)
    torch.testing.assert_close(head.attend(tokens), torch.tensor([15.0, 26.0, 0.0], dtype=torch.float64))
    assert torch.allclose(head.key[0], math.sqrt(3) * torch.eye(4, 3, dtype=torch.float64))
    assert head.value[0, :, 0].tolist() == [0, 0, 0, 4]


@pytest.mark.parametrize("length", [16, 63, 257])
@pytest.mark.parametrize("name", ["s4", "s4d", "sgconv"])
def test_every_channel_of_a_layer_is_expressed(name, length):
    kernels, u = layer_kernels(name, length), numbers(WIDTH, length, seed=1)
    assert kernels.shape == (WIDTH, length)
    outputs = torch.stack([express(kernel, each) for kernel, each in zip(kernels, u, strict=True)])
    expected = torch.stack([convolve(kernel, each) for kernel, each in zip(kernels, u, strict=True)])
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(outputs, long_conv_reference(u.mT[None], kernels)[0].mT, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 127])
@pytest.mark.parametrize("name", KERNELS)
def test_any_kernel_is_expressed(name, length):
    kernel, u = KERNELS[name](length), numbers(length, seed=1)
    scale = kernel.abs().max().clamp(min=1e-300)
    torch.testing.assert_close(express(kernel, u) / scale, convolve(kernel, u) / scale, rtol=0, atol=1e-10)
    assert heads_for(kernel).count == (2 if (kernel < 0).any() else 1)


@pytest.mark.parametrize("name", KERNELS)
def test_weights_are_those_of_a_softmax(name):
    """Rows of numbers that are not negative and have the sum 1; the convolution's part of them is A / c."""
    kernel = KERNELS[name](31)
    heads = heads_for_signed_kernel(kernel)
    weights = heads.attention_weights(encode(numbers(31), 31))
    assert weights.shape == (2, 32, 32)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 32, dtype=torch.float64), rtol=0, atol=1e-14)
    sums = torch.stack([kernel.clamp(min=0).sum(), (-kernel).clamp(min=0).sum()])
    torch.testing.assert_close(heads.value[:, -1, 0], sums, rtol=1e-15, atol=0)
    assert (weights[:, :31, :31].triu(1) == 0).all(), "no weight on later tokens"


def test_the_gradient_by_the_input_is_the_matrix_of_the_convolution():
    """So the input has no influence on the scores."""
    kernel = numbers(9)
    found = torch.autograd.functional.jacobian(lambda u: express(kernel, u), numbers(9, seed=1))
    expected = [[kernel[i - j].item() if j <= i else 0.0 for j in range(9)] for i in range(9)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


def test_attention_is_really_run():
    """Other weights give other outputs, and the explicit softmax the same ones."""
    kernel, tokens = numbers(15), encode(numbers(15, seed=1), 15)
    heads = heads_for_signed_kernel(kernel)
    values = tokens @ heads.value  # (H, N, 1)
    by_hand = ((heads.attention_weights(tokens) @ values)[..., 0].mT @ heads.output)[:, 0]
    torch.testing.assert_close(heads.attend(tokens), by_hand, rtol=0, atol=1e-14)
    for name in ("query", "key", "value", "output"):
        changed = replace(heads, **{name: 0.9 * getattr(heads, name)})
        assert (changed.attend(tokens) - heads.attend(tokens)).abs().max() > 1e-3, name


@pytest.mark.parametrize("shorter", [1, 8, 20])
def test_shorter_sequences_are_served_by_the_same_weights(shorter):
    kernel, u = numbers(21), numbers(shorter, seed=1)
    torch.testing.assert_close(express(kernel, u), convolve(kernel, u), rtol=0, atol=1e-12)


def test_the_empty_token_must_be_seen_and_stand_first_under_a_causal_mask():
    """At the end, as in the proof, a causal mask hides weight that is on it; first, the mask hides nothing."""
    weights = head_for_kernel(numbers(12).abs()).attention_weights(encode(numbers(12), 12))[0]
    assert (weights[:11, 12] > 0.01).all()
    first = [12, *range(12)]
    assert (weights[first][:, first].triu(1) == 0).all()


def test_the_printed_logarithm_of_0_is_not_a_number():
    head = head_for_kernel(numbers(7).abs())
    assert (head.query == LOG_ZERO).any()
    printed = replace(head, query=head.query.masked_fill(head.query == LOG_ZERO, -torch.inf))
    assert printed.attend(encode(numbers(7), 7)).isnan().any()


def test_scores_do_not_depend_on_the_scale_of_the_kernel():
    """As printed they would, and in bfloat16 a large score leaves few digits for the weights."""
    kernel, u = numbers(50).abs(), numbers(50, seed=1).bfloat16().double()
    head, scaled = head_for_kernel(kernel), head_for_kernel(2.0**60 * kernel)
    torch.testing.assert_close(scaled.query, head.query, rtol=1e-12, atol=1e-12)
    shift = torch.zeros_like(scaled.query)
    shift[:, :-1] = scaled.value[0, -1].log()
    printed = replace(scaled, query=scaled.query + shift)
    exact, errors = 2.0**60 * convolve(kernel, u), []
    for each in (scaled, printed):
        torch.testing.assert_close(each.attend(encode(u, 50))[:-1], exact, rtol=0, atol=1e-10 * 2.0**60)
        outputs = each.to(torch.bfloat16).attend(encode(u.bfloat16(), 50))[:-1]
        errors.append((outputs.double() - exact).abs().max().item())
    assert errors[1] > 3 * errors[0]


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("name", ["signed", "non-negative", "zeros at the start", "every other one"])
def test_errors_are_as_large_as_precision_and_the_sum_of_the_kernel_allow(name, dtype):
    """A weight w = exp(s) is off by about 3ε·|s|·w, whose sum is at most 3ε·ln(L + 1); others come with constants."""
    kernel, u = KERNELS[name](200), numbers(200, seed=1).bfloat16().double()
    bound = EPSILON[dtype] * (4 + 3 * math.log(201)) * kernel.abs().sum() * u.abs().max()
    outputs = express(kernel, u, dtype=dtype)
    assert outputs.dtype == dtype
    assert (outputs.double() - convolve(kernel, u)).abs().max() <= bound
    rounded_at_the_end = express(kernel, u).to(dtype)
    assert outputs.equal(rounded_at_the_end) == (dtype == torch.float64), "all of it runs in that precision"


def test_one_head_refuses_a_signed_kernel():
    with pytest.raises(BadInput) as error:
        head_for_kernel(torch.tensor([1.0, -0.5]))
    expected = "kernel must have no number below 0 for one head, got -0.5; use heads_for_signed_kernel, which takes two"
    assert str(error.value) == f"{expected} heads"


@pytest.mark.parametrize("kernel", [torch.zeros(0), torch.ones(2, 3), torch.tensor(1.0)])
def test_a_kernel_has_one_axis(kernel):
    with pytest.raises(BadInput, match=r"kernel must have the shape \(L,\)"):
        express(kernel, torch.ones(1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.7e308])
def test_a_kernel_is_finite(bad):
    with pytest.raises(BadInput, match="kernel must be finite and have a finite sum"):
        express(torch.tensor([bad, bad], dtype=torch.float64), torch.ones(1))


@pytest.mark.parametrize("u", [torch.ones(0), torch.ones(5), torch.ones(2, 2)])
def test_an_input_is_no_longer_than_the_kernel(u):
    with pytest.raises(BadInput, match=r"u must have the shape \(N,\) with N from 1 to the kernel's 4"):
        express(torch.ones(4), u)


def test_the_table_has_a_row_for_each_kernel_and_length():
    sheet = reproduce_theorem(lengths=(1, 16, 33), seed=1)
    columns = [column.name for column in sheet.columns]
    names = ["s4", "s4d", "sgconv", "random, signed", "random, ≥ 0", "exp(-t)"]
    assert [row[0] for row in sheet.rows] == 3 * names
    rows = [dict(zip(columns, row, strict=True)) for row in sheet.rows]
    assert [row["length"] for row in rows] == ["1"] * 6 + ["16"] * 6 + ["33"] * 6
    for row in rows:
        length, heads = int(row["length"]), int(row["heads"])
        assert int(row["width"]) == length + 2
        assert int(row["weights"].replace(",", "")) == heads * (2 * (length + 2) * (length + 1) + length + 3)
        assert length == 1 or heads == (1 if row["kernel"] in names[-2:] else 2)
        assert float(row["float64"]) < 1e-13
        assert float(row["float32"]) < 1e-5
        assert float(row["bfloat16"]) < 0.1
        assert float(row["conv."]) < 0.01
        assert float(row["conv."]) > 1e-4 or length == 1
    assert any(float(row["float32"]) > 1e-9 for row in rows)
    assert "2,416 for a kernel of 33 numbers" in sheet.notes[1]


def test_of_a_layer_that_sees_both_sides_the_table_has_the_past(monkeypatch):
    steps = torch.arange(-8, 8)
    kernels = torch.where(steps >= 0, 1.0, -1.0).double().expand(4, 16)
    monkeypatch.setattr(theorem_b1, "initial_kernels", lambda name, **options: (steps, kernels))
    assert [row[1:3] for row in reproduce_theorem(lengths=(8,)).rows[:3]] == 3 * [["8", "1"]]


def test_the_table_is_the_same_again():
    assert reproduce_theorem(lengths=(16,)) == reproduce_theorem(lengths=(16,))
