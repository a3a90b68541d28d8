"""BatchNorm without padding, against torch's on the tokens alone."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from longlens.models.block import BatchNorm, LayerNorm, RMSNorm

MASK = torch.arange(9) < torch.tensor([[9], [4], [0], [1]])  # (4, 9)


def pair(width=6, dtype=torch.float64):
    """Ours and torch's, with the same weights that are not 1 and 0."""
    ours, torchs = BatchNorm(width).to(dtype), nn.BatchNorm1d(width, dtype=dtype)
    for norm in (ours, torchs):
        torch.manual_seed(1)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return ours, torchs


def inputs(*shape, requires_grad=True):
    return (torch.randn(*shape, dtype=torch.float64) * 3 + 2).requires_grad_(requires_grad)


@pytest.mark.parametrize("masked", [True, False])
def test_it_is_the_batch_norm_of_torch_on_the_tokens(masked):
    """Outputs, gradients and running statistics, over three steps and then in evaluation."""
    ours, torchs = pair()
    mask = MASK if masked else torch.ones_like(MASK)
    for step in range(4):
        if step == 3:
            ours.eval(), torchs.eval()
        x = inputs(4, 9, 6)
        actual, expected = ours(x, mask if masked else None)[mask], torchs(x[mask])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        grad = torch.randn_like(expected)
        grads = [
            torch.autograd.grad(output, (x, norm.weight, norm.bias), grad)
            for output, norm in ((actual, ours), (expected, torchs))
        ]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
        assert grads[0][0][~mask].count_nonzero() == 0
        torch.testing.assert_close(ours.running_mean, torchs.running_mean, rtol=0, atol=1e-13)
        torch.testing.assert_close(ours.running_var, torchs.running_var, rtol=0, atol=1e-13)


def test_a_mask_of_tokens_only_is_no_mask():
    (ours, _), (other, _) = pair(), pair()
    x = inputs(3, 7, 6)
    torch.testing.assert_close(ours(x, torch.ones(3, 7, dtype=torch.bool)), other(x), rtol=0, atol=1e-13)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(other.named_buffers()), rtol=0, atol=1e-13)


@pytest.mark.parametrize("training", [True, False])
def test_the_contents_of_padding_do_not_matter(training):
    x, (ours, _), (other, _) = inputs(4, 9, 6, requires_grad=False), pair(), pair()
    garbage = torch.where(MASK.unsqueeze(-1), x, 1e6 * torch.randn_like(x))
    outputs = [norm.train(training)(given, MASK)[MASK] for norm, given in ((ours, x), (other, garbage))]
    assert torch.equal(*outputs)
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_bfloat16_goes_in_and_out_and_is_computed_in_float32(masked, training):
    ours, torchs = pair(dtype=torch.float32)
    ours.train(training), torchs.train(training)
    mask = MASK if masked else torch.ones_like(MASK)
    x = inputs(4, 9, 6, requires_grad=False).bfloat16()
    output = ours(x, mask if masked else None)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output[mask].float(), torchs(x[mask].float()), rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_var, torchs.running_var, rtol=1e-5, atol=1e-5)


def test_a_large_mean_does_not_spoil_the_variance():
    """The mean of squares minus the square of the mean would be off by 100 % here."""
    norm, x = BatchNorm(6), torch.randn(4, 9, 6) * 0.1 + 1000
    norm(x, MASK)
    expected = 0.9 + 0.1 * x[MASK].double().var(dim=0)
    torch.testing.assert_close(norm.running_var.double(), expected, rtol=0, atol=1e-6)


def test_where_all_is_padding_statistics_stay_and_nothing_grows():
    norm, x = BatchNorm(6).double(), inputs(2, 9, 6)
    norm(inputs(2, 9, 6))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    output = norm(x, torch.zeros(2, 9, dtype=torch.bool))
    assert output.abs().max() <= x.abs().max()
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
    gradients = torch.autograd.grad(0 * output.sum(), (x, norm.weight, norm.bias))
    assert all(gradient.count_nonzero() == 0 for gradient in gradients)


def test_a_single_token_becomes_the_bias():
    (norm, _), mask = pair(), torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 0] = True
    output = norm(inputs(2, 9, 6), mask)
    torch.testing.assert_close(output[1, 0], norm.bias, rtol=0, atol=1e-10)
    assert norm.running_var.isfinite().all()


def test_layer_norm_is_that_of_torch_and_ignores_the_mask():
    norm, x = LayerNorm(6, dtype=torch.float64), inputs(4, 9, 6)
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x, MASK), expected, rtol=0, atol=1e-13)
    assert torch.equal(norm(x, MASK), norm(x))


# The tokens of two processes: some padding, none at all, and one process with nothing but padding.
CASES = {
    "padded": torch.arange(9) < torch.tensor([[9], [4], [2], [7]]),
    "full": torch.ones(4, 9, dtype=torch.bool),
    "nothing": torch.arange(9) < torch.tensor([[9], [4], [0], [0]]),
}


def case(name):
    """Inputs, mask and the gradient of the outputs, of both processes."""
    torch.manual_seed(2)
    mask = CASES[name]
    return inputs(4, 9, 6), mask, torch.randn(4, 9, 6, dtype=torch.float64) * mask.unsqueeze(-1)


def worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mine, results = slice(2 * rank, 2 * rank + 2), {}
    for name in CASES:
        (norm, _), (x, mask, grad) = pair(), case(name)
        output = norm(x[mine], None if name == "full" else mask[mine])
        gradients = torch.autograd.grad(output, (x, norm.weight, norm.bias), grad[mine])
        results[name] = [output.detach(), *gradients, norm.running_mean, norm.running_var]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_statistics_and_gradients_of_one(tmp_path):
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    shares = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in CASES:
        (_, norm), (x, mask, grad) = pair(), case(name)
        expected = norm(x[mask])
        gradients = torch.autograd.grad(expected, (x, norm.weight, norm.bias), grad[mask])
        first, second = (share[name] for share in shares)
        close = {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(torch.cat([first[0], second[0]])[mask], expected, **close)
        for i, gradient in enumerate(gradients, start=1):  # each process has its share of them
            torch.testing.assert_close(first[i] + second[i], gradient, **close)
        for share in (first, second):
            torch.testing.assert_close(share[4:], [norm.running_mean, norm.running_var], **close)


@pytest.mark.parametrize("gains", [1, 6])
def test_rms_norm_and_scale_norm_divide_by_the_size_of_a_token(gains):
    """g·x / (‖x‖/√D), with D numbers g or one."""
    norm, x = RMSNorm(gains).double(), inputs(4, 9, 6)
    torch.nn.init.normal_(norm.weight)
    expected = norm.weight * x / ((x.norm(dim=-1, keepdim=True) / 6**0.5).square() + 1e-6).sqrt()
    torch.testing.assert_close(norm(x, MASK), expected, rtol=0, atol=1e-13)
    grad = torch.randn_like(expected)
    grads = [torch.autograd.grad(output, (x, norm.weight), grad) for output in (norm(x), expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
