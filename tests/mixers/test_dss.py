import pytest
import torch

from longlens.errors import BadInput
from longlens.mixers.dss import DSS, dss_exp_modes, dss_kernel_reference, dss_softmax_kernel
from longlens.mixers.registry import create_mixer
from longlens.ops.exponentials import sum_of_exponentials
from longlens.ops.hippo import hippo_legs

VARIANTS = [
    {"variant": "exp"},
    {"variant": "exp", "separate_dt": False},
    {"variant": "softmax"},
    {"variant": "softmax", "separate_dt": False},
    {"variant": "softmax", "grows": True},
]


def layer(grows=False, **options):
    """A layer with large step sizes, that the constant against a division by 0 does not show."""
    torch.manual_seed(0)
    sizes = {"state_size": 5, "dt_min": 0.3, "dt_max": 0.9, "softmax_length": 31, "dtype": torch.float64}
    model = DSS(4, **sizes, **options)
    with torch.no_grad():
        if grows:
            model.real.copy_(torch.tensor([0.3, -0.5, 0.01, -0.01, 0.8]))
        if model.log_dt.shape[1] == 2:
            model.log_dt[:, 1] += torch.randn(4, dtype=torch.float64) / 5
    return model


def parts(model):
    """w, Λ and λ, by definition."""
    real = -model.real.exp() if model.variant == "exp" else model.real
    dt = model.log_dt.exp()
    scaled = torch.stack([torch.complex(dt[d, 0] * real, dt[d, -1] * model.imag) for d in range(4)])
    return torch.view_as_complex(model.weights), torch.complex(real, model.imag), scaled


def reference(model, length):
    return dss_kernel_reference(*parts(model), length, None if model.variant == "exp" else model.softmax_length)


@pytest.mark.parametrize("length", [1, 23, 31, 40])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_kernel_is_the_formula_with_its_gradients(options, length):
    """Also for a kernel that is shorter or longer than the softmax. The constant against a division by 0 moves it by
    less than the tolerance."""
    model = layer(**options)
    actual, expected = model.kernel(length), reference(model, length)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    leaves, weight = [model.log_dt, model.real, model.imag, model.weights], torch.randn_like(actual)
    for one, other in zip(
        torch.autograd.grad(actual, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_recurrence_is_the_convolution_with_its_gradients(options):
    model = layer(**options)
    x = torch.randn(2, 23, 4, dtype=torch.float64, requires_grad=True)
    state, outputs = None, []
    for t in range(23):
        y, state = model.step(x[:, t], state)
        outputs.append(y)
    stepped, whole = torch.stack(outputs, dim=1), model(x)
    torch.testing.assert_close(stepped, whole, rtol=0, atol=1e-9)
    leaves, weight = [x, *model.parameters()], torch.randn_like(whole)
    for one, other in zip(
        torch.autograd.grad(stepped, leaves, weight), torch.autograd.grad(whole, leaves, weight), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_softmax_is_one():
    """The exponentials of a mode sum to 1 over the length of the softmax: with weights Λ, so does each kernel."""
    model = layer(variant="softmax", grows=True)
    _, poles, scaled = parts(model)
    for n in range(5):
        weights = torch.zeros(4, 5, dtype=torch.complex128)
        weights[:, n] = poles[n]
        total = dss_softmax_kernel(weights, poles, scaled, 31, 31).sum(1)
        torch.testing.assert_close(total, torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-5)


def test_what_grows_fast_does_not_overflow():
    model = layer(variant="softmax").float()
    model.softmax_length = 5000
    with torch.no_grad():
        model.real.fill_(2.0)  # exp(2·0.3·5000) is no number
    x = torch.randn(1, 5000, 4)
    y = model(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    state = model.constants(), (torch.zeros(1, 4, 5, dtype=torch.complex64), 4990)
    assert model.step(x[:, 0], state)[0].isfinite().all()


def test_beyond_the_softmax_is_finite():
    model = layer(variant="softmax").float()
    model(torch.randn(1, 4000, 4)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_both_sides_have_weights_of_their_own():
    for variant in ("exp", "softmax"):
        model = layer(variant=variant, bidirectional=True)
        weights, poles, scaled = parts(model)
        for half, kernel in zip(weights.chunk(2), model.kernel(23).chunk(2), strict=True):
            if variant == "exp":
                expected = sum_of_exponentials(*dss_exp_modes(half, poles, scaled), 23)
            else:
                expected = dss_softmax_kernel(half, poles, scaled, 23, 31)
            torch.testing.assert_close(kernel, expected)


@pytest.mark.parametrize("variant", ["exp", "softmax"])
def test_it_begins_with_skew_hippo_and_is_stable(variant):
    model = DSS(8, variant=variant, state_size=8, dtype=torch.float64)
    _, poles, scaled = model.system()
    a, b = hippo_legs(16)
    expected = torch.linalg.eigvals(a + torch.outer(b, b) / 2)
    expected = expected[expected.imag > 0]
    expected = expected[expected.imag.argsort()]
    torch.testing.assert_close(poles, expected, rtol=1e-9, atol=1e-9)
    assert scaled.exp().abs().max() < 1
    assert torch.equal(model.log_dt[:, 0], model.log_dt[:, 1])


def test_the_length_of_the_softmax():
    assert create_mixer("dss", 8, max_length=77).softmax_length == 77
    assert create_mixer("dss", 8, max_length=77, softmax_length=50).softmax_length == 50
    assert create_mixer("dss", 8).softmax_length == 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "clip"}, "variant must be softmax or exp, got clip"),
        ({"state_size": 0}, "state_size must be a whole number of at least 1, got 0"),
        ({"softmax_length": 0}, "softmax_length must be a whole number of at least 1 or none, got 0"),
        ({"dt_max": 0.0}, r"dt_max must be a number above 0, got 0\.0"),
        ({"dt_min": 0.5}, r"dt_min must be at most dt_max, got dt_min=0\.5 and dt_max=0\.1"),
    ],
)
def test_errors(options, message):
    with pytest.raises(BadInput, match=message):
        DSS(4, **options)
