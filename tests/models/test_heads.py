"""Pooling, heads and losses against naive loops."""

import pytest
import torch
from torch import nn

from longlens.data.datasets import IGNORE
from longlens.models.model import TaskHead, loss_sum, pool
from longlens.tasks.base import Spec

LENGTHS = [9, 4, 1, 7]
MASK = torch.arange(9) < torch.tensor(LENGTHS).unsqueeze(-1)


def spec(head, outputs=3, positions=None):
    metric = {"regress": "r2", "language": "perplexity"}.get(head, "accuracy")
    return Spec("tokens", 11, 9, head, outputs, metric, positions)


def vectors():
    return torch.randn(4, 9, 6, dtype=torch.float64, requires_grad=True)


def pooled(x, lengths, how):
    """One sequence after another, cut to its tokens."""
    rows = [row[:length] for row, length in zip(x, lengths, strict=True)]
    return torch.stack([sum(row) / len(row) if how == "mean" else row[len(row) - 1] for row in rows])


def assert_same(actual, expected, *inputs):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, inputs, grad) for output in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["mean", "last"])
def test_pooling_sees_the_tokens_of_each_sequence_only(how):
    x = vectors()
    assert_same(pool(x, MASK, how), pooled(x, LENGTHS, how), x)
    assert_same(pool(x, None, how), pooled(x, [9] * 4, how), x)
    full = torch.ones_like(MASK)
    assert_same(pool(x, full, how), pool(x, None, how), x)


@pytest.mark.parametrize("how", ["mean", "last"])
def test_pooling_nothing_is_finite(how):
    x = vectors()
    output = pool(x, torch.zeros_like(MASK), how)
    assert output.shape == (4, 6)
    assert output.isfinite().all()
    assert torch.autograd.grad(0 * output.sum(), x)[0].count_nonzero() == 0


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_classify_is_a_linear_map_of_the_pooled_vector(pooling):
    head, x = TaskHead(spec("classify"), 6, pooling).double(), vectors()
    expected = pooled(x, LENGTHS, pooling) @ head.linear.weight.T + head.linear.bias
    assert_same(head(x, MASK), expected, x, *head.parameters())


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_match_compares_the_two_of_a_pair(pooling):
    """Samples 2i and 2i + 1 are a pair; the features are both, their difference and their product."""
    head, x = TaskHead(spec("match"), 6, pooling).double(), vectors()
    up, _, down = head.mlp
    rows = []
    for first, second in ((0, 1), (2, 3)):
        one, two = pooled(x, LENGTHS, pooling)[[first, second]]
        features = torch.cat([one, two, one - two, one * two])
        hidden = (up.weight @ features + up.bias).clamp(min=0)
        rows.append(down.weight @ hidden + down.bias)
    assert_same(head(x, MASK), torch.stack(rows), x, *head.parameters())


def test_regress_reads_the_last_tokens_before_the_padding():
    head, x = TaskHead(spec("regress", 1, positions=3), 6, "mean").double(), vectors()
    lengths = [9, 4, 3, 7]
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(-1)

    def number(row, place):
        return (head.linear.weight[0] * x[row, place]).sum() + head.linear.bias[0]

    for given, ends in ((mask, lengths), (None, [9] * 4)):
        rows = [torch.stack([number(row, place) for place in range(end - 3, end)]) for row, end in enumerate(ends)]
        assert_same(head(x, given), torch.stack(rows), x, *head.parameters())


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_regress_without_positions_gives_one_number(pooling):
    head, x = TaskHead(spec("regress", 1), 6, pooling).double(), vectors()
    expected = pooled(x, LENGTHS, pooling) @ head.linear.weight[0] + head.linear.bias
    assert head(x, MASK).shape == (4,)
    assert_same(head(x, MASK), expected, x, *head.parameters())


def test_language_has_logits_for_every_token():
    head, x = TaskHead(spec("language", 11), 6, "mean").double(), vectors()
    assert_same(head(x, MASK), torch.einsum("bld,vd->blv", x, head.linear.weight), x, *head.parameters())
    table = nn.Embedding(11, 6).double()
    tied = TaskHead(spec("language", 11), 6, "mean", table.weight)
    assert tied.linear.weight is table.weight
    assert_same(tied(x, MASK), torch.einsum("bld,vd->blv", x, table.weight) / 6**0.5, x, table.weight)


def surprise(logits, target):
    """-log of the probability of a target, by its definition."""
    return -(logits[target].exp() / logits.exp().sum()).log()


@pytest.mark.parametrize("head", ["classify", "match"])
def test_the_loss_of_classes_is_their_surprise(head):
    outputs = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 2, 1, 1, IGNORE])
    expected = sum(surprise(outputs[i], targets[i]) for i in range(4))
    assert_same(loss_sum(spec(head), outputs, targets), expected, outputs)


def test_the_loss_of_a_language_is_the_surprise_at_every_token_that_counts():
    outputs = torch.randn(4, 9, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (4, 9)).masked_fill(~MASK, IGNORE)
    places = [(row, place) for row, length in enumerate(LENGTHS) for place in range(length)]
    expected = sum(surprise(outputs[at], targets[at]) for at in places)
    loss = loss_sum(spec("language", 11), outputs, targets)
    assert_same(loss, expected, outputs)
    nothing = loss_sum(spec("language", 11), outputs, torch.full_like(targets, IGNORE))
    assert nothing.item() == 0, "and not 0 / 0"


@pytest.mark.parametrize("positions", [None, 1, 5])
def test_the_loss_of_numbers_is_their_mean_square_in_each_sample(positions):
    shape = (4,) if positions is None else (4, positions)
    outputs, targets = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    expected = torch.zeros((), dtype=torch.float64)
    for output, target in zip(outputs.reshape(4, -1), targets.reshape(4, -1), strict=True):
        squares = [(o - t) ** 2 for o, t in zip(output, target, strict=True)]
        expected = expected + sum(squares) / len(squares)
    assert_same(loss_sum(spec("regress", 1, positions), outputs, targets), expected, outputs)


EMPTY = {
    "classify": ((0, 3), (0,), None),
    "match": ((0, 3), (0,), None),
    "language": ((0, 9, 11), (0, 9), None),
    "regress": ((0,), (0,), None),
    "regress positions": ((0, 5), (0, 5), 5),
}


@pytest.mark.parametrize("name", EMPTY)
def test_the_loss_of_no_samples_is_0(name):
    shape, target_shape, positions = EMPTY[name]
    kind = spec(name.split()[0], shape[-1] if len(shape) > 1 else 1, positions)
    outputs = torch.zeros(shape, requires_grad=True)
    targets = torch.zeros(target_shape, dtype=torch.float32 if kind.head == "regress" else torch.long)
    loss = loss_sum(kind, outputs, targets)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, outputs)[0].shape == shape


@pytest.mark.parametrize("head", ["classify", "regress"])
@pytest.mark.parametrize(("given", "kept"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_losses_are_summed_in_float32_at_least(head, given, kept):
    outputs = torch.randn(4, 3, dtype=getattr(torch, given))
    targets = torch.randn(4, 3) if head == "regress" else torch.zeros(4, dtype=torch.long)
    assert loss_sum(spec(head, positions=3), outputs, targets).dtype == getattr(torch, kept)
