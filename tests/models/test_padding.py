"""Padding changes nothing for the tokens, in any model; a batch of nothing else is harmless."""

import copy

import pytest
import torch

from longlens.data.datasets import IGNORE, Batch
from longlens.mixers.registry import list_mixers
from longlens.models.model import create_model, loss_sum
from longlens.tasks.base import Spec

LENGTHS = torch.tensor([25, 9, 1, 17])
MASK = torch.arange(25) < LENGTHS.unsqueeze(-1)
SPECS = {
    "classify": Spec("tokens", 11, 25, "classify", 3, "accuracy"),
    "match": Spec("tokens", 11, 25, "match", 3, "accuracy"),
    "regress": Spec("real", 3, 25, "regress", 1, "r2"),
    "language": Spec("tokens", 11, 25, "language", 11, "bits_per_byte"),
}


SOME = ("las", "las-chunk", "las-bidirectional", "s4d", "mega", "lstm")  # of each kind; tests/mixers has all of them


@pytest.fixture
def build(small_options):
    def make(name, head="classify", *, depth=2, dtype=torch.float64, **options):
        options = small_options(name, **options)
        return create_model(SPECS[head], name, depth=depth, width=16, dtype=dtype, **options)

    return make


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def refill(tokens):
    """The same tokens with others in the padding."""
    return torch.where(MASK, tokens, torch.randint(11, tokens.shape))


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_samples_of_a_padded_batch_are_as_if_alone(build, name, prenorm, training, pooling):
    model = build(name, prenorm=prenorm, pooling=pooling).train(training)
    tokens = torch.randint(11, (4, 25))
    together = model(tokens, MASK)
    alone = torch.cat([model(row[None, :length]) for row, length in zip(tokens, LENGTHS.tolist(), strict=True)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-11)
    sums = [gradients(model, outputs.square().sum()) for outputs in (together, alone)]
    torch.testing.assert_close(*sums, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_what_is_in_the_padding_does_not_matter(build, name, prenorm, norm, training):
    """Outputs, gradients and running statistics."""
    model = build(name, prenorm=prenorm, norm=norm).train(training)
    tokens, other = torch.randint(11, (4, 25)), copy.deepcopy(model)
    results = []
    for one, given in ((model, tokens), (other, refill(tokens))):
        outputs = one(given, MASK)
        results.append((outputs, gradients(one, outputs.square().sum()), dict(one.named_buffers())))
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_with_batch_norm_more_padding_changes_nothing(build, name, prenorm):
    """In training, where samples are not alone, and in evaluation, where they are."""
    model = build(name, prenorm=prenorm, norm="batch")
    tokens, other = torch.randint(11, (4, 17)), copy.deepcopy(model)
    mask = torch.arange(17) < torch.tensor([[17], [9], [1], [16]])
    longer, longer_mask = torch.randint(11, (5, 25)), torch.zeros(5, 25, dtype=torch.bool)
    longer[:4, :17], longer_mask[:4, :17] = tokens, mask
    results = []
    for one, given, given_mask in ((model, tokens, mask), (other, longer, longer_mask)):
        outputs = one(given, given_mask)[:4]
        results.append((outputs, gradients(one, outputs.square().sum()), one.state_dict()))
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)
    model.eval()
    alone = torch.cat([model(row[None, :length]) for row, length in zip(tokens, (17, 9, 1, 16), strict=True)])
    torch.testing.assert_close(model(tokens, mask), alone, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_mixers())
def test_no_mixer_hears_padding(build, name):
    model = build(name, norm="batch", depth=1)
    tokens = torch.randint(11, (4, 25))
    outputs = model(tokens, MASK)
    torch.testing.assert_close(outputs, model(refill(tokens), MASK), rtol=0, atol=1e-10)
    model.eval()
    alone = torch.cat([model(row[None, :length]) for row, length in zip(tokens, LENGTHS.tolist(), strict=True)])
    torch.testing.assert_close(model(tokens, MASK), alone, rtol=0, atol=1e-10)
    assert_harmless(build(name, depth=2, dtype=torch.float32), batch_of("classify").padding_like())


def test_pairs_of_unequal_length_are_as_if_alone(build):
    model = build("las", "match")
    tokens, lengths = torch.randint(11, (2, 2, 25)), LENGTHS.view(2, 2)
    together = model(tokens, MASK.view(2, 2, 25))
    alone = []
    for pair, (first, second) in zip(tokens, lengths.tolist(), strict=True):
        longest = max(first, second)
        mask = torch.arange(longest) < torch.tensor([[[first], [second]]])
        alone.append(model(pair[None, :, :longest], mask))
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-11)


def test_real_inputs_may_have_anything_in_the_padding(build):
    model, x = build("las", "regress"), torch.randn(4, 25, 3, dtype=torch.float64)
    other = torch.where(MASK.unsqueeze(-1), x, 1e3 * torch.randn_like(x))
    torch.testing.assert_close(model(x, MASK), model(other, MASK), rtol=0, atol=1e-11)


def test_the_loss_of_a_padded_language_batch_is_that_of_its_samples(build):
    model, tokens = build("las", "language"), torch.randint(11, (4, 25))
    targets = torch.randint(11, (4, 25)).masked_fill(~MASK, IGNORE)
    together = loss_sum(SPECS["language"], model(tokens, MASK), targets)
    alone = sum(
        loss_sum(SPECS["language"], model(tokens[i : i + 1, :n]), targets[i : i + 1, :n])
        for i, n in enumerate(LENGTHS.tolist())
    )
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients(model, together), gradients(model, alone), rtol=0, atol=1e-10)


def batch_of(head):
    spec, pairs = SPECS[head], (2,) if head == "match" else ()
    inputs = torch.randn(2, 25, 3) if spec.inputs == "real" else torch.randint(11, (2, *pairs, 25))
    targets = {"regress": torch.randn(2), "language": torch.randint(11, (2, 25))}.get(head, torch.zeros(2).long())
    return Batch(inputs, torch.full((2, *pairs), 25), targets, torch.arange(2), 2)


def assert_harmless(model, batch, autocast=False):
    """Finite outputs, and gradients that are 0 once the loss is multiplied by 0; nothing is remembered."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(batch.inputs, batch.mask)
    assert outputs.isfinite().all()
    (0 * outputs.sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or (parameter.grad == 0).all(), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_nothing_but_padding_is_harmless(build, name, prenorm, norm, training):
    """For a process that has no samples; in float32 and deep, so that what grows from block to block would show."""
    model = build(name, prenorm=prenorm, norm=norm, depth=8, dtype=torch.float32).train(training)
    nothing = batch_of("classify").padding_like()
    assert not nothing.mask.any()
    assert_harmless(model, nothing)


@pytest.mark.parametrize("head", SPECS)
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("autocast", [True, False])
def test_nothing_but_padding_is_harmless_to_every_head(build, head, pooling, autocast):
    for norm in ("layer",) if head == "language" else ("layer", "batch"):
        model = build("las", head, norm=norm, pooling=pooling, dtype=torch.float32)
        assert_harmless(model, batch_of(head).padding_like(), autocast)
