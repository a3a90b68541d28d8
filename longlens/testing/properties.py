"""The properties that a mixer must have, each a function that returns a line about it, or raises ``Failed`` or
``DoesNotApply`` with the reason."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longlens.mixers.common import has_kernel
from longlens.mixers.registry import MAX_LENGTH, build_layer, layer_is_causal
from longlens.mixers.transformer import CausalAttention
from longlens.models.model import change_by_future
from longlens.testing.subject import Subject


class Failed(Exception):  # noqa: N818 (nothing is wrong with the program)
    """A layer does not have a property."""


class DoesNotApply(Exception):  # noqa: N818
    """A layer need not have a property."""


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


def _call(layer: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    try:
        return layer(x, mask=mask)
    except Exception as error:
        error.add_note(f"x {_shape(x)}, {x.dtype}{'' if mask is None else ', with a mask'}")
        raise


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _apart(x: Tensor, y: Tensor) -> float:
    """The largest difference; nan if there is none."""
    return (x - y).abs().max().item()


def _masks(length: int) -> Iterator[Tensor | None]:
    """None, and one for three sequences: a whole one, one of a single token, one of none."""
    yield None
    yield torch.arange(length) < torch.tensor([[length], [1], [0]])


def shape_and_dtype(subject: Subject) -> str:
    for dtype in (torch.float64, torch.float32):
        layer = subject.build(dtype)
        for length in (1, subject.length - 4, subject.length):
            x = subject.inputs(3, length, dtype)
            for mask in _masks(length):
                y = _call(layer, x, mask)
                _require(isinstance(y, Tensor), f"forward returns a {type(y).__name__}: return the outputs alone")
                _require(y.shape == x.shape, f"{_shape(x)} becomes {_shape(y)}: return the shape of x")
                _require(y.dtype == dtype, f"{dtype} becomes {y.dtype}: make tensors with dtype=x.dtype")
                _require(_finite(y), "some outputs are not finite")
    return f"{_shape(x)} in and out, float64 and float32"


def deterministic(subject: Subject) -> str:
    layer, x = subject.build(), subject.inputs(2)
    equal = torch.equal(_call(layer, x), _call(layer, x))
    _require(equal, "two evaluations differ: draw no random numbers in eval mode")
    return "two evaluations are equal"


def causality(subject: Subject) -> str:
    layer, traits = subject.build(), subject.preset.traits if subject.preset else None
    if not layer_is_causal(layer):
        raise DoesNotApply("it says that it sees both sides")
    # An FFT spreads rounding errors over the whole sequence, and sorting changes the order in which numbers are added.
    # No other layer may leak at all; one that does not say what it is made of gets the benefit of the doubt.
    rounding = 1e-10 if has_kernel(layer) or traits is None or traits.cost == "L log L" else 0.0
    largest = 0.0
    for mode in ("", " in training mode"):
        layer.train(bool(mode))
        change = change_by_future(layer, subject.d_model, subject.length, splits=range(1, subject.length))
        found = f"later inputs change an output by {change:.1g} of the largest{mode}"
        _require(change <= rounding, f"{found}: let it see the past alone, or say causal = False in the class")
        largest = max(largest, change)
    return f"largest change by later inputs: {largest:.1g}"


def both_sides(subject: Subject) -> str:
    layer = subject.build()
    if layer_is_causal(layer):
        raise DoesNotApply("it says that it is causal")
    change = _influence(subject, layer).triu(1).max().item()  # of an input on the outputs before it
    _require(change > 1e-6, "no output sees a later input, though the layer says that it is not causal")
    return f"largest change by a later input: {change:.1g}"


def past(subject: Subject) -> str:
    changes = _influence(subject, subject.build())
    itself, before = changes.diagonal(), changes.diagonal(-2)
    blind = int((itself <= 1e-6).sum())
    _require(blind == 0, f"{blind} of {len(itself)} outputs do not depend on their own token")
    seeing = int((before > 1e-9).sum())
    _require(seeing >= len(before) / 4, f"only {seeing} of {len(before)} outputs see the token two before")
    return f"{seeing} of {len(before)} outputs see the token two before"


@torch.no_grad()
def _influence(subject: Subject, layer: nn.Module) -> Tensor:
    """(L, L): how much output i changes with input j alone."""
    x = subject.inputs(1)
    changed = x + torch.eye(subject.length, dtype=x.dtype).unsqueeze(-1)  # (L, L, D): sequence j has another token j
    return (_call(layer, changed) - _call(layer, x)).abs().amax(-1).T


def padding(subject: Subject) -> str:
    note = ""
    largest = 0.0
    for training in (False, True):
        layer = subject.build().train(training)
        x = subject.inputs(2)
        if not torch.equal(_call(layer, x), _call(layer, x)):
            note = " (in eval mode: training is random)"
            continue
        lengths = (subject.length, 1, subject.length // 2, 0)
        x = subject.inputs(len(lengths))
        mask = torch.arange(subject.length) < torch.tensor(lengths)[:, None]
        together, ill = (_call(layer, torch.where(mask[..., None], x, filling), mask) for filling in (1e3, torch.nan))
        _require(_finite(together), "some outputs are not finite beside padding")
        _require(torch.equal(ill[mask], together[mask]), "what is in the padding reaches a token: fill it with 0 first")
        alone = torch.zeros_like(together)
        for row, length in enumerate(lengths):
            if length:
                alone[row, :length] = _call(layer, x[row : row + 1, :length])[0]
        weight = torch.randn_like(together) * mask[..., None]
        change = _apart(together * mask[..., None], alone)
        _require(change <= 1e-10, f"padding changes the output of a token by {change:.1g}: it must not see it")
        leaves = _leaves(layer)
        if not leaves:  # it has nothing to learn
            continue
        found = [torch.autograd.grad((y * weight).sum(), list(leaves.values())) for y in (ill, together, alone)]
        for name, from_ill, *pair in zip(leaves, *found, strict=True):
            reached = f"what is in the padding reaches the gradient of {name}: fill it with 0 first"
            _require(torch.equal(from_ill, pair[0]), reached)
            change = _apart(*pair)
            _require(change <= 1e-9, f"padding changes the gradient of {name} by {change:.1g}")
            largest = max(largest, change)
    return f"reaches no token; gradients change by {largest:.1g}{note}"


def _leaves(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def residual(subject: Subject) -> str:
    layer, x, stream = subject.build(), subject.inputs(2), subject.inputs(2)
    if not getattr(layer, "takes_residual", False):
        raise DoesNotApply("it takes none")
    own = _apart(layer(x, mask=None, residual=x), _call(layer, x))
    _require(own == 0, f"residual=x differs from none at all by {own:.1g}")
    middle = subject.length // 2
    changed = stream.clone()
    changed[:, middle] += 1
    change = (layer(x, mask=None, residual=changed) - layer(x, mask=None, residual=stream)).abs().amax((0, 2))
    _require(change[middle] > 1e-9, "the outputs do not depend on it: leave out takes_residual")
    change[middle] = 0
    _require(change.max() == 0, "an output depends on the residual of another token")
    return "of each token for itself, and x by default"


@torch.no_grad()
def steps(subject: Subject) -> str:
    layer, traits = subject.build(), subject.preset.traits if subject.preset else None
    if not hasattr(layer, "step"):
        _require(traits is None or traits.state is None, "its traits have a state, and it has no step")
        raise DoesNotApply("it has no step")
    step: Callable[..., tuple[Tensor, Any]] = layer.step  # pyright: ignore[reportAssignmentType]
    x = subject.inputs(2)
    if not layer_is_causal(layer):
        try:
            step(x[:, 0])
        except ValueError as error:
            _require("causal" in str(error), f"step must say that it needs a causal layer, and says: {error}")
            raise DoesNotApply("it sees both sides, and step says so") from None
        raise Failed("step must raise a ValueError that says that it needs a causal layer")
    _require(traits is None or traits.state is not None, "it has a step, and its traits have no state")
    state, outputs = None, []
    for t in range(subject.length):
        output, state = step(x[:, t], state)
        outputs.append(output)
    change = _apart(torch.stack(outputs, dim=1), _call(layer, x))
    _require(change <= 1e-8, f"outputs of step differ from those of forward by {change:.1g}")
    again = [step(x[:, 0], state)[0] for _ in range(2)]
    _require(torch.equal(*again), "a step changes the state that it is given: return a new one")
    if hasattr(layer, "prefill"):
        half = subject.length // 2
        first, state = layer.prefill(x[:, :half])  # pyright: ignore[reportCallIssue]
        following, _ = step(x[:, half], state)
        both = torch.cat([first, following.unsqueeze(1)], dim=1)
        away = _apart(both, _call(layer, x[:, : half + 1]))
        _require(away <= 1e-8, f"outputs of prefill and of a step after it differ from those of forward by {away:.1g}")
    return f"largest difference from forward: {change:.1g}"


def empty_input(subject: Subject) -> str:
    for batch, length in ((2, 0), (0, 5), (0, 0)):
        for mask in (None, torch.ones(batch, length, dtype=torch.bool)):
            layer, x = subject.build(torch.float32), subject.inputs(batch, length, torch.float32).requires_grad_()
            y = _call(layer, x, mask)
            _require(y.shape == x.shape, f"{_shape(x)} becomes {_shape(y)}")
            y.sum().backward()
            _require(x.grad is not None and x.grad.shape == x.shape, f"the gradient of {_shape(x)} is missing")
            for name, leaf in _leaves(layer).items():
                _require(leaf.grad is None or not leaf.grad.any(), f"{name} gets a gradient from no token")
    return "no sequence or no token in, the same out"


def half_precision(subject: Subject) -> str:
    layer, x = subject.build(torch.bfloat16), subject.inputs(2, dtype=torch.bfloat16).requires_grad_()
    y = _call(layer, x)
    _require(y.dtype == torch.bfloat16, f"bfloat16 becomes {y.dtype}: cast the result to x.dtype")
    _require(_finite(y), "some outputs in bfloat16 are not finite")
    y.float().square().sum().backward()
    for name, leaf in {"x": x, **_leaves(layer)}.items():
        if leaf.grad is None:
            raise Failed(f"{name} gets no gradient in bfloat16")
        _require(leaf.grad.dtype == torch.bfloat16, f"the gradient of {name} is in {leaf.grad.dtype}, not in bfloat16")
        _require(_finite(leaf.grad), f"the gradient of {name} in bfloat16 is not finite")
    wide = copy.deepcopy(layer).float()
    with torch.no_grad():
        expected = _call(wide, x.float())
        error = ((y.float() - expected).norm() / expected.norm()).item()
    far = f"bfloat16 is {100 * error:.1g} % from float32"
    _require(error < 0.2, f"{far}: compute sums and powers in float32")
    x = subject.inputs(2, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = _call(wide, x)
    _require(_finite(y), "some outputs under autocast are not finite")
    y.float().square().sum().backward()
    _require(x.grad is not None and _finite(x.grad), "the gradient of x under autocast is not finite")
    return f"{far}; autocast finite"


def gradients(subject: Subject) -> str:
    layer = subject.build()
    for length in (1, subject.length):
        for mask in _masks(length):
            x = subject.inputs(3, length).requires_grad_()
            leaves = {"x": x, **_leaves(layer)}
            found = torch.autograd.grad(_call(layer, x, mask).square().sum(), list(leaves.values()), allow_unused=True)
            for name, gradient in zip(leaves, found, strict=True):
                if gradient is None:
                    raise Failed(f"{name} gets no gradient: use it, or register it as a buffer")
                _require(_finite(gradient), f"the gradient of {name} is not finite")
    x, weight = subject.inputs(2).requires_grad_(), subject.inputs(2)
    leaves = [x, *_leaves(layer).values()]
    directions = [torch.randn_like(leaf) for leaf in leaves]
    found = torch.autograd.grad((_call(layer, x) * weight).sum(), leaves)
    slope = sum((gradient * direction).sum().item() for gradient, direction in zip(found, directions, strict=True))
    size = sum(gradient.square().sum().item() for gradient in found) ** 0.5
    values = []
    with torch.no_grad():
        for distance in (1e-6, -2e-6):  # there, and to the other side
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf.add_(direction, alpha=distance)
            values.append((_call(layer, x) * weight).sum().item())
    error = abs((values[0] - values[1]) / 2e-6 - slope) / max(size, 1e-300)
    _require(error <= 1e-5, f"they differ from a finite difference by {error:.1g} of their norm: mend backward")
    return f"all {len(leaves)} finite; {error:.1g} from a finite difference"


def parameters(subject: Subject) -> str:
    """In a block with a feedforward sub-layer, within a fifth of attention, or a note says why not."""
    ratios = []
    for width in (4 * subject.d_model, 16 * subject.d_model):
        with torch.device("meta"):
            layer = build_layer(subject.layer, width, subject.defaults, max_length=MAX_LENGTH, device="meta")
            attention = CausalAttention(width, 1)
        ours, plain = (sum(p.numel() for p in _leaves(part).values()) + 8 * width**2 for part in (layer, attention))
        ratios.append(ours / plain)
    shown = ", ".join(f"{100 * ratio:.0f} %" for ratio in ratios)
    detail = f"{shown} of attention, in a block (D = {4 * subject.d_model}, {width})"
    if all(0.8 < ratio < 1.2 for ratio in ratios):
        return detail
    note = subject.preset.size_note if subject.preset else None
    _require(note, f"{detail}: change its default sizes, or say why in size_note of @register")
    _require(all(1 / 7 < ratio < 7 for ratio in ratios), f"{detail}: too far, though {note}")
    return f"{detail}: {note}"


@torch.no_grad()
def state_dict(subject: Subject) -> str:
    layer, other, x = subject.build(), subject.build(seed=1), subject.inputs(2)
    for name, parameter in layer.named_parameters():
        scalar = f"the parameter {name} has no dimension, which FSDP refuses: give it the shape (1,)"
        _require(parameter.ndim > 0, scalar)
        _require(not parameter.is_complex(), f"the parameter {name} is complex: keep two real ones")
    for path, module in layer.named_modules():
        groups = getattr(module, "groups", None)
        members = [name for names in groups.values() for name in names] if isinstance(groups, dict) else []
        named = {kind: getattr(module, kind, ()) for kind in ("kernel_parameters", "no_decay")} | {"groups": members}
        for kind, names in named.items():
            for name in names:
                full = f"{path}.{name}".removeprefix(".")
                _require(full in dict(layer.named_parameters()), f"{kind} names {full!r}, which is no parameter")
    other.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()})
    equal = torch.equal(_call(layer, x), _call(other, x))
    _require(equal, "a layer with the same state dict has other outputs: keep what it draws in a parameter or buffer")
    return f"the same layer again from its {len(layer.state_dict())} entries"


@torch.no_grad()
def meta_device(subject: Subject) -> str:
    real, layer, x = subject.build(), subject.build(device="meta"), subject.inputs(2)
    for name, parameter in layer.named_parameters():
        _require(parameter.is_meta, f"{name} is on {parameter.device}: make it with the argument device")
    layer.load_state_dict(real.state_dict(), assign=True)
    _require(torch.equal(_call(layer, x), _call(real, x)), "built there and filled, it has other outputs")
    return "built there and filled, it is the same layer"


PROPERTIES: dict[str, Callable[[Subject], str]] = {
    function.__name__.replace("_", " "): function
    for function in (
        *(shape_and_dtype, deterministic, causality, both_sides, past, padding, residual, steps, empty_input),
        *(half_precision, gradients, parameters, state_dict, meta_device),
    )
}
