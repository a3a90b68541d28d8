"""Whether outputs of a layer depend on later inputs: found by changing them."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

ROUNDING = 1e-4  # of an FFT in float32: a larger change by later inputs is no rounding


def claims_causal(layer: nn.Module) -> bool:
    """What a layer says of itself: no output depends on later inputs."""
    return bool(getattr(layer, "causal", not getattr(layer, "bidirectional", False)))


def change_by_future(
    layer: nn.Module, d_model: int, length: int = 32, *, splits: Iterable[int] | None = None, seed: int = 0
) -> float:
    """The largest change of an output when all later inputs are others, as a multiple of the largest output.

    It is 0 for a causal layer, but for the rounding of an FFT or of a sort (at most ``ROUNDING`` in float32), and nan
    for one whose outputs are no numbers: a layer is causal if ``change <= ROUNDING``. It is called in the mode in which
    it is, training or evaluation; the layer and the random numbers of the program stay as they are.

    Args:
        layer: a mixer of width ``d_model``, not on the meta device.
        d_model: its width D.
        length: length of the sequences, at least 2.
        splits: positions from which on the inputs change; by default three of them, which needs four calls.
        seed: of the inputs, and of what the layer draws.
    """
    layer = copy.deepcopy(layer)  # a call in training mode may change its buffers
    first = next(layer.parameters(), torch.empty(0))
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(2, length, d_model, generator=generator).to(first.device, first.dtype)

    def outputs(x: Tensor) -> Tensor:
        torch.manual_seed(seed)  # the same dropout for all inputs
        return layer(x, mask=None)

    changes = []
    with torch.random.fork_rng([first.device] if first.is_cuda else []), torch.no_grad():
        x = draw()
        before = outputs(x)
        for split in dict.fromkeys((1, length // 2, length - 1)) if splits is None else splits:
            after = outputs(torch.cat([x[:, :split], 3 * draw()[:, split:]], dim=1))
            changes.append((after - before)[:, :split].abs().max())
    largest = before.abs().max().clamp_min(torch.finfo(before.dtype).tiny)
    return (torch.stack(changes).max() / largest).item()
