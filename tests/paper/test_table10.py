"""Traits are those of the paper's Table 10, and what can be measured is measured."""

import ast
import io
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from longlens.mixers.registry import create_mixer, find_mixer, layer_is_causal, list_mixers, seen_sides
from longlens.paper import table10 as traits
from longlens.paper.table10 import Measured, measure_traits, response, traits_tables

# Table 10: decays, regularized, unique initialization, stable, gated, complex, normalized, non-recurrent.
TABLE_10 = {
    "lssl": "YNYNNNNY",
    "s4": "YNYYNYNY",
    "dss": "YNNYNYNY",
    "gss": "YNNYYNNY",
    "mega": "YNYYYNNY",
    "s5": "YNNYNYNN",
    "sgconv": "YYYNNNNN",
    "dlr": "YNNYNYNY",
    "h3": "YNYYYYNY",
    "long-conv": "YYYNNNNY",
    "lru": "YNYYNYYN",
    "tnn": "YNNNNNNY",
}


@pytest.mark.parametrize("name", TABLE_10)
def test_the_layers_of_the_paper_have_its_traits(name):
    found = find_mixer(name).traits
    values = [getattr(found, column) for column in traits.COLUMNS] + [not found.recurrent]
    assert "".join("NY"[value] for value in values) == TABLE_10[name]


@pytest.mark.parametrize("name", list_mixers())
def test_only_layers_that_can_be_causal_have_a_state(name):
    assert find_mixer(name).traits.state is None or seen_sides(name) in ("causal", "either")


def test_the_sides_that_are_read_are_those_of_the_layers():
    """What the source says, without torch, is what a layer says when it is built."""
    code = "import sys; from longlens.mixers.registry import *; print({n: seen_sides(n) for n in list_mixers()})"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = ast.literal_eval(done.stdout)
    assert set(found.values()) == {"causal", "both", "either"}
    for name, sides in found.items():
        if sides != "either":
            assert layer_is_causal(create_mixer(name, 64, device="meta")) == (sides == "causal"), name


class Kernel(nn.Module):
    """A layer of which only the kernel is looked at."""

    def __init__(self, taps):
        super().__init__()
        self.taps = taps

    def kernel(self, length):
        return self.taps[:, :length]


def measured(monkeypatch, taps):
    made = SimpleNamespace(options={}, build=lambda width, max_length: Kernel(taps))
    monkeypatch.setattr(traits, "choose_mixer", lambda name: made)
    return measure_traits("any", length=taps.shape[1], width=taps.shape[0])


def test_an_exponential_has_its_rate(monkeypatch):
    found = measured(monkeypatch, torch.exp(-0.01 * torch.arange(1024.0)).expand(8, -1))
    assert found.rate == pytest.approx(0.01, rel=1e-3)
    assert found.far == pytest.approx(math.exp(-7.68), rel=1e-3)
    assert found.roughness == pytest.approx(0.01, rel=0.01)
    assert found.decays


def test_noise_is_rough_and_does_not_decay(monkeypatch):
    torch.manual_seed(0)
    found = measured(monkeypatch, torch.randn(64, 1024))
    assert found.far == pytest.approx(1.0, abs=0.05)
    assert found.roughness == pytest.approx(math.sqrt(2), abs=0.02)
    assert not found.decays


class Echo(nn.Module):
    """y_t = Σ 0.9^n x_{t-n}, without saying so."""

    def forward(self, x, mask=None):
        outputs = [x[:, 0]]
        for t in range(1, x.shape[1]):
            outputs.append(0.9 * outputs[-1] + x[:, t])
        return torch.stack(outputs, dim=1)


def test_layers_without_a_kernel_are_measured_by_their_derivative():
    weights = response(Echo(), 32, 4)
    shape = weights / weights[:, :1]
    torch.testing.assert_close(shape, (0.9 ** torch.arange(32.0)).expand_as(shape), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in TABLE_10 if name not in ("dlr", "long-conv")])
def test_most_successful_layers_of_the_paper_decay(name):
    """The claim of Appendix E, at initialization and over 1,024 tokens."""
    assert measure_traits(name).decays


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "l-attention", "las"])
def test_attention_does_not_decay_at_initialization(name):
    """Nor does that of LaS: its scores decay, and far weights tend to the uniform one, not to 0."""
    assert measure_traits(name).far > 0.75


def test_long_conv_does_not_decay_at_the_start_of_its_authors():
    assert 0.9 < measure_traits("long-conv").far < 1.1


def test_dlr_decays_only_over_longer_distances():
    """Its published initialization forgets so slowly that the claim does not hold over 1,024 tokens."""
    assert 0.5 < measure_traits("dlr", length=1024).far < 0.9
    assert measure_traits("dlr", length=8192, width=16).decays


def test_a_state_is_counted():
    found = measure_traits("lstm", length=16, width=8)
    assert found.state is not None
    assert found.state > 0
    assert measure_traits("linformer", length=16, width=8).state is None


def test_too_short_is_refused():
    with pytest.raises(ValueError, match="length must be at least 16, got 3"):
        measure_traits("las", length=3)


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal(monkeypatch, width):
    """No name, heading or number is cut or broken over lines."""
    found = Measured(far=1.6e-05, rate=-2.0e-04, roughness=1.44, state=16_384)
    monkeypatch.setattr(traits, "measure_traits", lambda *_, **__: found)
    console = Console(file=io.StringIO(), width=width)
    console.print(*traits_tables(1024, 64), sep="\n")
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for name in list_mixers():
        assert shown.count(f"│ {name} ") == 3
    headings = {part.strip() for part in shown.split("┃")}
    assert headings >= {*traits.COLUMNS.values(), "non-rec.", "far/near", "rate", "rough", "sides", "state", "after 16"}
    assert "-2.0e-04 │" in shown
    assert "16,384 │" in shown
