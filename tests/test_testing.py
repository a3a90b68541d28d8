"""``check_mixer`` and ``longlens check`` find what is wrong with a layer, and say it in a line."""

import os
import re
import subprocess
import sys

import pytest
import torch
from support import broken_layers as layers
from support.broken_layers import Dropout, Future, FutureInTraining, Mean, SaysBoth, Wide
from torch import nn

from longlens.cli import main, show
from longlens.cli.check import check as check_command
from longlens.cli.output import Failed
from longlens.errors import BadInput
from longlens.mixers.registry import REGISTRY, choose_mixer, find_mixer, layer_is_causal, register
from longlens.models.model import ROUNDING, change_by_future
from longlens.testing import (
    TWO_PROCESSES,
    Check,
    check_mixer,
    check_properties,
    check_property,
    check_two_processes,
    find_subject,
)
from longlens.testing.properties import PROPERTIES

BUGS = [
    (layers.Future, "causality", "later inputs change an output by"),
    (
        layers.FutureInTraining,
        "causality",
        "of the largest in training mode: let it see the past alone, or say causal = False",
    ),
    (layers.SaysBoth, "both sides", "no output sees a later input, though the layer says that it is not causal"),
    (layers.SaysBoth, "steps", "step must raise a ValueError that says that it needs a causal layer"),
    (layers.Leaky, "padding", "what is in the padding reaches a token: fill it with 0 first"),
    (layers.KeepsNan, "padding", "what is in the padding reaches a token: fill it with 0 first"),
    (layers.CountsPadding, "padding", "padding changes the output of a token by .*: it must not see it"),
    (layers.Forgetful, "steps", "outputs of step differ from those of forward by"),
    (layers.InPlace, "steps", "a step changes the state that it is given: return a new one"),
    (layers.Unused, "gradients", "scale gets no gradient: use it, or register it as a buffer"),
    (layers.WrongBackward, "gradients", "they differ from a finite difference by .* of their norm: mend backward"),
    (layers.Wide, "shape and dtype", r"\(3, 1, 16\) becomes \(3, 1, 48\): return the shape of x"),
    (layers.Tuple, "shape and dtype", "forward returns a tuple: return the outputs alone"),
    (layers.Single, "shape and dtype", r"torch.float64 becomes torch.float32: make tensors with dtype=x.dtype"),
    (
        layers.NoHalf,
        "half precision",
        r"RuntimeError at broken_layers.py:\d+, in forward: no kernel for bfloat16 and a second",
    ),
    (layers.Noisy, "deterministic", "two evaluations differ: draw no random numbers in eval mode"),
    (layers.Blind, "past", "only 0 of 25 outputs see the token two before"),
    (layers.NoEmpty, "empty input", r"RuntimeError at .* in forward: .* \(x \(2, 0, 16\), torch.float32\)"),
    (
        layers.Small,
        "parameters",
        r"75 %, 75 % of attention, in a block \(D = 64, 256\): change its default sizes, or say why in",
    ),
    (
        layers.Scalar,
        "state dict",
        r"the parameter scale has no dimension, which FSDP refuses: give it the shape \(1,\)",
    ),
    (layers.Misnamed, "state dict", "no_decay names 'inner.weihgt', which is no parameter"),
    (layers.Drawn, "state dict", "has other outputs: keep what it draws in a parameter or buffer"),
    (layers.OnCpu, "meta device", "shift is on cpu: make it with the argument device"),
]


def test_a_good_layer_keeps_everything():
    for layer in (Mean, Dropout):
        checks = check_properties(find_subject(layer))
        assert [check.name for check in checks] == list(PROPERTIES)
        assert {check.name: check.detail for check in checks if check.passed is False} == {}
        assert [check.name for check in checks if check.passed is None] == ["both sides", "residual"]
        assert all(check.detail and not check.traceback for check in checks)
    assert "(in eval mode: training is random)" in check_property(find_subject(Dropout), "padding").detail


@pytest.mark.parametrize(("layer", "name", "detail"), BUGS, ids=lambda given: getattr(given, "__name__", None))
def test_a_bug_is_found(layer, name, detail):
    check = check_property(find_subject(layer), name)
    assert check.passed is False
    assert re.search(detail, check.detail), check.detail
    assert "\n" not in check.detail
    assert bool(check.traceback) == ("Error at" in check.detail)


def test_without_the_first_property_the_others_are_not_looked_at():
    checks = check_mixer(Wide)
    assert [check.name for check in checks] == [*PROPERTIES, TWO_PROCESSES]
    assert checks[0].passed is False
    assert {check.passed for check in checks[1:]} == {None}
    assert checks[1].detail == "not checked: first mend shape and dtype"


def test_a_layer_that_cannot_be_built_says_where():
    class Broken(Mean):
        def __init__(self, d_model: int):
            raise KeyError("no such thing")

    check = check_mixer(Broken, processes=False)[0]
    assert check.passed is False
    assert check.detail.startswith("KeyError at test_testing.py:")
    assert "in __init__: 'no such thing'" in check.detail
    assert 'raise KeyError("no such thing")' in check.traceback


def test_names_mixers_and_classes():
    """A name has small options, where nobody chose others; a class need not be registered."""
    assert find_subject("las-chunk").options["chunk_size"] == 7
    assert find_subject("las").options["chunk_size"] is None, "it can have chunks, but is not about them"
    assert find_subject("las-chunk", chunk_size=5).options["chunk_size"] == 5
    assert find_subject(choose_mixer("las-chunk", chunk_size=5)).options["chunk_size"] == 5
    assert find_subject(choose_mixer("reformer")).options["bucket_size"] == 4
    chosen = find_subject(find_mixer("linformer").layer)
    assert (chosen.options["projected"], chosen.preset.name) == (9, "linformer")
    assert check_property(chosen, "parameters").passed, "it is found by its class, with its size_note"
    assert find_subject(find_mixer("las").layer).options["heads"] == 4, "which has no default there"
    assert find_subject(Mean).preset is None
    with pytest.raises(BadInput, match="mixer must be a name, a Mixer or a class of layers, got Linear"):
        find_subject(nn.Linear(3, 3))
    with pytest.raises(BadInput, match="layer Mean has no option 'heads'"):
        find_subject(Mean, heads=3)
    with pytest.raises(BadInput, match="length must be at least 8, got 7"):
        find_subject(Mean, length=7)


def test_a_small_value_that_a_layer_does_not_take_is_left_alone():
    class Powers(Mean):
        def __init__(self, d_model: int, heads: int = 2, memory: bool = True):
            super().__init__(d_model)
            if heads != 2:
                raise ValueError("heads must be 2")

    assert find_subject(Powers).options == {"heads": 2, "memory": True}


def test_the_random_numbers_of_the_program_stay_as_they_are():
    torch.manual_seed(3)
    expected = torch.rand(3)
    layer = Dropout(8)
    torch.manual_seed(3)
    change_by_future(layer, 8)
    check_mixer("las", processes=False)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("training", [False, True])
def test_the_probe(training):
    for layer in (Mean(8), Dropout(8)):
        layer.train(training)
        assert change_by_future(layer, 8) == 0
        assert layer_is_causal(layer)
        assert layer.training is training
    assert change_by_future(Future(8), 8) > 0.1 > ROUNDING
    assert change_by_future(Future(8).double(), 8, length=5, splits=[4]) > 0.1
    assert (change_by_future(FutureInTraining(8).train(training), 8) > ROUNDING) is training
    assert not layer_is_causal(SaysBoth(8))
    broken = Mean(8)
    nn.init.constant_(broken.outer.bias, torch.nan)
    assert not change_by_future(broken, 8) <= ROUNDING
    convolution = find_mixer("s4d").layer(8)
    assert 0 <= change_by_future(convolution, 8, 200) < ROUNDING / 10


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes():
    checks = check_two_processes([find_subject(layer) for layer in (layers.BatchStatistics, layers.Unused, Dropout)])
    assert [check.name for check in checks] == [TWO_PROCESSES] * 3
    assert [check.passed for check in checks] == [False, False, True]
    assert "with DDP differs from one process by" in checks[0].detail
    assert "RuntimeError" in checks[1].detail


def test_what_another_process_cannot_make_does_not_apply():
    class Local(Mean):
        pass

    in_a_notebook = type("InANotebook", (Mean,), {"__module__": "no_file", "__qualname__": "InANotebook"})
    found = check_two_processes([find_subject(layer) for layer in (Local, in_a_notebook, layers.Still)])
    assert [(check.passed, check.detail) for check in found] == [
        (None, "another process cannot make Local: define the class outside of functions"),
        (None, "another process cannot make InANotebook: put the class into a file"),
        (None, "it has no parameters"),
    ]


# The command


def checked(layers, **options):
    """As the command line prints it; the last line."""
    try:
        printed = check_command(layers, **options)
    except Failed as failed:
        show(failed.printed)
        raise
    show(printed)
    return printed[-1]


def rows(text):
    """The result of each property."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return {name: result for name, result, _ in cells if name}


def test_the_command_has_a_line_for_each_property(capsys):
    said = checked(("las",), processes=False)
    shown = capsys.readouterr().out
    assert said == "it keeps everything"
    results = rows(shown)
    assert list(results) == [*PROPERTIES, TWO_PROCESSES]
    assert {name for name, result in results.items() if result == "–"} == {"both sides", "residual", TWO_PROCESSES}
    assert set(results.values()) == {"ok", "–"}


def test_the_command_checks_both_sides_of_a_layer_that_has_them(capsys):
    assert checked(("s4d", "las"), processes=False) == "3 of 3 layers keep everything"
    shown = capsys.readouterr().out
    assert [line.strip() for line in shown.splitlines() if line.startswith(("s4d", "las"))] == [
        "s4d (bidirectional=False)",
        "s4d (bidirectional=True)",
        "las",
    ]
    checked(("s4d",), options=("bidirectional=yes", "state-size=4"), processes=False)
    assert capsys.readouterr().out.startswith("s4d (bidirectional=True, state_size=4)")


FAILED = ["causality", "padding", "half precision", "parameters"]
LAYERS = """
import torch
from torch import nn
from longlens.mixers import register

@register("good", size_note="it is as small as can be, for a test")
class Good(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x, *, mask=None):
        x = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.linear(x) + x.cumsum(1)

@register("future")
class Future(Good):
    def forward(self, x, *, mask=None):
        if x.dtype == torch.bfloat16:
            raise TypeError("not in bfloat16")
        return super().forward(x, mask=mask) + x.mean(1, keepdim=True)
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_the_command_for_layers_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(LAYERS)
    command = [sys.executable, "-m", "longlens", "check", "good", "future", "--traceback"]
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "80", "LONGLENS_IMPORT": "mine.py"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert found.returncode == 1, found.stderr
    good, bad = (rows(part) for part in re.split(r"^future", found.stdout, flags=re.MULTILINE))
    assert "FAILED" not in good.values()
    assert good[TWO_PROCESSES] == good["parameters"] == good["causality"] == bad[TWO_PROCESSES] == "ok"
    assert {name for name, result in bad.items() if result == "FAILED"} == set(FAILED)
    assert "TypeError at mine.py:20, in forward: not in" in found.stdout
    assert 'mine.py", line 20, in forward' in found.stdout
    assert found.stdout.splitlines()[-1] == f"1 of 2 layers failed: future ({', '.join(FAILED)})"


def test_a_failure_without_traceback(monkeypatch, capsys):
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    register("no-half", size_note="it is larger than attention, for a test")(layers.NoHalf)
    with pytest.raises(SystemExit) as stopped:
        checked(("no-half",), processes=False)
    shown = capsys.readouterr().out
    assert stopped.value.code == 1
    assert {name for name, result in rows(shown).items() if result == "FAILED"} == {"half precision"}
    assert "Traceback" not in shown
    *_, first, second = shown.splitlines()
    assert first == "1 of 1 layers failed: no-half (half precision)"
    assert second == "--traceback shows where a layer raised an error"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lass"], "unknown mixer 'lass'; did you mean 'las' or 'lssl'?"),
        (["las", "--options", "heads"], "--options must be NAME=VALUE, got heads"),
        (["las", "--options", "head=4"], "mixer 'las' has no option 'head'; did you mean 'heads'?"),
        (["las", "--options", "heads=0"], "heads must be a whole number of at least 1, got 0"),
        (["las", "--length", "5"], "length must be at least 8, got 5"),
        (["las", "--width", "0"], "--width must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["check", *arguments])
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert said.err.startswith(f"longlens: {message}")
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_a_check_is_plain_data():
    check = Check("causality", True, "0")
    assert (check.name, check.passed, check.detail, check.traceback) == ("causality", True, "0", "")


class Gated(Mean):
    """u ⊙ (h - residual)"""

    takes_residual = True

    def forward(self, x, *, mask=None, residual=None):
        return self.gate(super().forward(x, mask=mask), x if residual is None else residual)

    def gate(self, y, residual):
        return y - residual / 2

    def step(self, x, state=None):
        y, state = super().step(x, state)
        return self.gate(y, x), state


class DeafGate(Gated):
    def gate(self, y, residual):
        return y


class WideGate(Gated):
    def gate(self, y, residual):
        return y - residual.cumsum(1) if y.ndim == 3 else y


class OtherGate(Gated):
    def forward(self, x, *, mask=None, residual=None):
        return super().forward(x, mask=mask, residual=torch.zeros_like(x) if residual is None else residual)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Gated, None),
        (DeafGate, "the outputs do not depend on it: leave out takes_residual"),
        (WideGate, "an output depends on the residual of another token"),
        (OtherGate, "residual=x differs from none at all by"),
    ],
)
def test_the_residual_of_a_layer_is_that_of_each_token(layer, message):
    check = check_property(find_subject(layer), "residual")
    assert check.passed is (message is None)
    assert (message or "x by default") in check.detail


def test_a_group_must_name_parameters():
    check = check_property(find_subject(type("Wrong", (Mean,), {"groups": {"fast": ("outer.wieght",)}})), "state dict")
    assert check.detail == "groups names 'outer.wieght', which is no parameter"
