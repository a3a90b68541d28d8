"""Layers with one bug each, which ``longlens.testing`` must find; ``Mean`` and ``Dropout`` have none."""

import torch
from torch import nn


class Mean(nn.Module):
    """The mean of all tokens so far, projected: the layer from which the others here derive, each with a bug."""

    def __init__(self, d_model: int, device=None, dtype=None):
        super().__init__()
        self.inner = nn.Linear(d_model, 3 * d_model, device=device, dtype=dtype)
        self.outer = nn.Linear(3 * d_model, d_model, device=device, dtype=dtype)

    def forward(self, x, *, mask=None):
        x = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.project(x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None])

    def project(self, x):
        return self.outer(torch.tanh(self.inner(x)))

    def step(self, x, state=None):
        total, count = (torch.zeros_like(x), 0) if state is None else state
        total, count = total + x, count + 1
        return self.project(x + total / count), (total, count)


class Future(Mean):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) + x.flip(1)


class FutureInTraining(Mean):
    def forward(self, x, *, mask=None):
        y = super().forward(x, mask=mask)
        return y - y.mean(1, keepdim=True) if self.training else y


class SaysBoth(Mean):
    causal = False


class Leaky(Mean):
    causal = False

    def forward(self, x, *, mask=None):
        return self.project(x + x.mean(1, keepdim=True))


class KeepsNan(Mean):
    causal = False

    def forward(self, x, *, mask=None):
        return self.project(x + (x if mask is None else x * mask.unsqueeze(-1)).sum(1, keepdim=True))


class CountsPadding(Mean):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) / x.shape[1]


class Forgetful(Mean):
    def step(self, x, state=None):
        return super().step(x, None)


class InPlace(Mean):
    def step(self, x, state=None):
        total, count = ([torch.zeros_like(x)], [0]) if state is None else state
        total[0], count[0] = total[0] + x, count[0] + 1
        return self.project(x + total[0] / count[0]), (total, count)


class Unused(Mean):
    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.scale = nn.Parameter(torch.ones(1))


class WrongBackward(Mean):
    def forward(self, x, *, mask=None):
        y = super().forward(x, mask=mask)
        return y + 2 * (y - y.detach())


class Wide(Mean):
    def project(self, x):
        return self.inner(x)


class Tuple(Mean):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask), None


class Single(Mean):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask).float()


class NoHalf(Mean):
    def forward(self, x, *, mask=None):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("no kernel for bfloat16\nand a second line")
        return super().forward(x, mask=mask)


class Noisy(Mean):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) + torch.rand(())


class Blind(Mean):
    def forward(self, x, *, mask=None):
        return self.project(x)


class NoEmpty(Mean):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) + 0 * x.amax()


class Small(Mean):
    def __init__(self, d_model: int):
        nn.Module.__init__(self)
        self.inner = self.outer = nn.Linear(d_model, d_model)


class Scalar(Mean):
    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.scale = nn.Parameter(torch.ones(()))

    def project(self, x):
        return self.scale * super().project(x)


class Misnamed(Mean):
    no_decay = ("inner.weihgt",)


class Drawn(Mean):
    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.shift = torch.randn(1).item()

    def project(self, x):
        return super().project(x + self.shift)


class OnCpu(Mean):
    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.shift = nn.Parameter(torch.zeros(d_model, device="cpu"))

    def project(self, x):
        return super().project(x + self.shift)


class Still(Mean):
    """It learns nothing."""

    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.requires_grad_(False)


class Dropout(Mean):
    """Nothing is wrong with it: in training it is random."""

    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.dropout = nn.Dropout(0.5)

    def project(self, x):
        return super().project(self.dropout(x))


class BatchStatistics(Mean):
    """A sequence changes the others of its batch, so that two processes differ from one."""

    def forward(self, x, *, mask=None):
        y = super().forward(x, mask=mask)
        return y - y[:, :1].mean(0) if self.training else y
