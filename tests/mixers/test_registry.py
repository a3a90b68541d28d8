"""Mixers by name: those of the package, known without torch, and those of others."""

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from typing import Annotated

import pytest
import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import nn

import longlens.mixers
from longlens.errors import BadInput
from longlens.mixers import registry
from longlens.mixers.registry import (
    REGISTRY,
    build_layer,
    choose_mixer,
    create_mixer,
    find_mixer,
    layer_options,
    list_mixers,
    register,
)
from longlens.models.model import create_model
from longlens.options import Size
from longlens.registry import Registry
from longlens.tasks.base import Spec

SPEC = Spec("tokens", 11, 40, "classify", 3, "accuracy")
MODULES = sorted(set(REGISTRY.modules.values()))


@pytest.fixture
def forget(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    monkeypatch.setattr(REGISTRY, "homes", dict(REGISTRY.homes))


class Shift(nn.Module):
    """A layer of a user: a token gets some of the one before it.

    Args:
        amount: How much.
    """

    kernel_parameters = ("weight",)

    def __init__(self, d_model: int, amount: float = 0.5, max_length: int = 7, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((d_model,), amount, device=device, dtype=dtype))
        self.max_length = max_length

    def forward(self, x, mask=None):
        return F.pad(x, (0, 0, 1, 0))[:, : x.shape[1]] * self.weight


class Other(Shift):
    pass


def python(code, folder, **environment):
    """Run code in a process that finds the modules of a folder."""
    everything = os.environ | {"PYTHONPATH": str(folder), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=everything, check=False)


# What is known without an import


def test_names_and_options_are_known_without_torch(tmp_path):
    code = (
        "import sys\n"
        "from longlens.mixers.registry import choose_mixer, find_mixer, list_mixers\n"
        "for name in list_mixers(): find_mixer(name), choose_mixer(name)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(len(list_mixers()))"
    )
    result = python(code, tmp_path, LONGLENS_IMPORT="")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == len(REGISTRY.modules) >= 31


@pytest.mark.zoo
@pytest.mark.parametrize("module", MODULES)
def test_options_read_from_the_source_are_those_of_the_class(forget, module):
    import_module(module)
    names = [name for name, home in REGISTRY.modules.items() if home == module]
    imported = {name: REGISTRY.entries[name] for name in names}
    for name in names:
        del REGISTRY.entries[name]
    registry._load(module)
    for name, preset in imported.items():
        read = REGISTRY.entries[name]
        assert read is not preset
        assert read == preset
        assert list(read.options) == list(preset.options)
        assert read.layer is preset.layer
        fixed, known = set(preset.fixed), layer_options(preset.layer, name)
        assert set(read.options) | fixed == set(known)
        assert all(known[option].help == read.options[option].help for option in read.options)


@pytest.mark.zoo
@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_builds_with_its_defaults_on_any_device(name):
    mixer = choose_mixer(name)
    assert mixer.preset.summary
    assert all(parameter.is_meta for parameter in mixer.build(64, max_length=512, device="meta").parameters())
    layer = mixer.build(64, device="meta")
    assert isinstance(layer, mixer.preset.layer)
    x, mask = torch.empty(2, 40, 64, device="meta"), torch.empty(2, 40, dtype=torch.bool, device="meta")
    for tokens in (None, mask):  # a tensor that was made on another device is refused, in both directions
        layer.zero_grad()
        y = layer(x, mask=tokens)
        y.sum().backward()
        assert y.shape == x.shape
        assert all(parameter.grad.is_meta for parameter in layer.parameters() if parameter.requires_grad)


@pytest.mark.zoo
@pytest.mark.parametrize("name", list_mixers())
def test_a_layer_is_on_its_device_whatever_the_default_is(name):
    x = torch.randn(2, 40, 64)
    others = {"sgconv": {"init": "cosine"}}.get(name, {})
    with torch.device("meta"):
        layer = choose_mixer(name, **others).build(64, device="cpu")
        assert layer(x, mask=torch.ones(2, 40, dtype=torch.bool, device="cpu")).device.type == "cpu"


@pytest.mark.zoo
@pytest.mark.parametrize("name", list_mixers())
def test_the_options_of_a_mixer_make_it_again(name, small_options):
    mixer = choose_mixer(name, **small_options(name))
    assert choose_mixer(name, **mixer.options) == mixer
    assert list(mixer.options) == list(find_mixer(name).options)
    assert all(option.help for option in find_mixer(name).options.values())


def test_every_layer_can_be_imported_by_its_class():
    assert len(longlens.mixers._layers()) == len({find_mixer(name).layer_name for name in REGISTRY.modules}) >= 23
    for name in REGISTRY.modules:
        preset = find_mixer(name)
        layer = getattr(longlens.mixers, preset.layer_name)
        assert issubclass(layer, nn.Module)
        assert layer is preset.layer
        assert preset.layer_name in dir(longlens.mixers)
    from longlens.mixers import S4D, CausalAttention, LaSAttention, MegaAttention

    assert LaSAttention is longlens.LaSAttention
    for layer in (S4D, CausalAttention, MegaAttention):
        assert layer(16)(torch.randn(1, 5, 16)).shape == (1, 5, 16)
    with pytest.raises(AttributeError, match=r"module 'longlens.mixers' has no attribute 'S4E'; its layers are .*S4D"):
        longlens.mixers.S4E  # noqa: B018


# What a name means


def test_a_name_has_its_own_defaults_and_fixed_options():
    assert choose_mixer("las").options["chunk_size"] is None
    assert choose_mixer("las-chunk").options["chunk_size"] == 128
    assert "window" not in choose_mixer("l-attention").options
    assert find_mixer("l-attention").fixed["window"] is None
    assert create_mixer("l-attention", 16).window is None
    assert create_mixer("s4-bidirectional", 16, state_size=4).bidirectional
    for name, option in (("l-attention", "window"), ("s-attention", "max_rate"), ("s4", "bidirectional")):
        with pytest.raises(BadInput, match=f"mixer '{name}' has no option '{option}'"):
            choose_mixer(name, **{option: find_mixer(name).fixed[option]})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lass", {}, "unknown mixer 'lass'; did you mean 'las' or 'lssl'?"),
        ("qqq", {}, "unknown mixer 'qqq'; choose from alibi, alibi-smooth, bigbird"),
        ("las", {"windwo": 3}, "mixer 'las' has no option 'windwo'; did you mean 'window'?"),
        ("transformer", {"window": 3}, "mixer 'transformer' has no option 'window'; choose from heads, bidirectional"),
        ("las", {"num_heads": 4}, "mixer 'las' has no option 'num_heads'; did you mean 'heads'?"),
        ("las-chunk", {"chunk_size": None}, "chunk_size must be a whole number of at least 1, got None"),
        ("las", {"chunk_size": 0}, "chunk_size must be a whole number of at least 1 or none, got 0"),
        ("las", {"heads": "many"}, "heads must be a whole number of at least 1, got many"),
        ("las", {"heads": 2.5}, "heads must be a whole number of at least 1, got 2.5"),
        ("las", {"heads": True}, "heads must be a whole number of at least 1, got True"),
        ("las", {"heads": 2**40}, "got 1099511627776, which is too large"),
        ("las", {"max_rate": True}, "max_rate must be a number of at least 0, got True"),
        ("las", {"max_rate": float("nan")}, "max_rate must be a number of at least 0, got nan"),
        ("las", {"window": None}, "window must be an odd number of at least 1, got None"),
        ("las", {"window": 4}, "window must be an odd number of at least 1, got 4"),
        ("las", {"side": "left"}, "side must be past or centered, got left"),
        ("las", {"schedule": "linear"}, "schedule must be one of exp-uniform, positive, literal, got linear"),
        ("las", {"dropout": 1.0}, "dropout must be a number of at least 0 and below 1, got 1.0"),
        ("las", {"heads": 3}, "heads must divide the width of the layer, got heads=3 and a width of 16"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(name, options, message):
    with pytest.raises(BadInput) as caught:
        create_mixer(name, 16, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_of_files_get_the_types_of_the_signature():
    options = choose_mixer("las", heads=8.0, max_rate=1, bias=False, chunk_size="none", window="7").options
    chosen = [options[name] for name in ("heads", "max_rate", "bias", "chunk_size", "window")]
    assert chosen == [8, 1.0, False, None, 7]
    assert [type(value) for value in chosen] == [int, float, bool, type(None), int]


# Layers of others


def test_a_mixer_of_a_user_works_by_its_name(forget):
    assert register("shift")(Shift) is Shift
    assert list_mixers()[-1] == "shift"
    assert find_mixer("shift").summary == "A layer of a user: a token gets some of the one before it."
    assert find_mixer("shift").options["amount"].help == "How much."
    model = create_model(SPEC, "shift", depth=2, width=16, amount=0.25, dtype=torch.float64)
    assert model.mixer == choose_mixer("shift", amount=0.25)
    assert [block.mixer.max_length for block in model.blocks] == [40, 40], "a layer learns how long sequences can be"
    assert model(torch.randint(11, (2, 23))).shape == (2, 3)
    for block in model.blocks:
        torch.testing.assert_close(block.mixer.weight, torch.full((16,), 0.25, dtype=torch.float64))
    with pytest.raises(
        BadInput, match="neither the model nor mixer 'shift' has an option 'amuont'; did you mean 'amount'"
    ):
        create_model(SPEC, "shift", amuont=0.25)


def test_a_registered_layer_checks_its_arguments(forget):
    class Checked(Shift):
        def __init__(self, d_model: Size, taps: Annotated[int, Ge(2)] = 3):
            super().__init__(d_model)
            self.taps = taps

    assert register("checked")(Checked) is Checked
    register("checked-five", taps=5)(Checked)
    assert Checked(4, 4.0).taps == 4
    assert choose_mixer("checked-five").options == {"taps": 5}
    for arguments in ((4, 1), (0,), ("wide",)):
        with pytest.raises(BadInput, match="must be a whole number"):
            Checked(*arguments)


def test_an_option_without_a_type_has_that_of_its_default(forget):
    class Untyped(Shift):
        def __init__(self, d_model, flag=True, taps=3, rate=0.5, kind="a", sizes=(1, 2)):
            super().__init__(d_model)

    register("untyped")(Untyped)
    typed = {"flag": "false", "taps": "4", "rate": "2", "kind": "b", "sizes": ["3", "4", "5"]}
    found = {"flag": False, "taps": 4, "rate": 2.0, "kind": "b", "sizes": (3, 4, 5)}
    assert choose_mixer("untyped", **typed).options == found
    with pytest.raises(BadInput, match="taps must be a whole number, got abc"):
        choose_mixer("untyped", taps="abc")


def test_a_registered_layer_shows_its_arguments_unless_it_has_words_of_its_own(forget):
    class Silent(Shift):
        pass

    class Spoken(Shift):
        def extra_repr(self):
            return "my words"

    class Heir(Spoken):
        pass

    for layer, said in ((Silent, "d_model=4, amount=0.5, max_length=7"), (Spoken, "my words"), (Heir, "my words")):
        assert repr(register(layer.__name__.lower())(layer)(4)) == f"{layer.__name__}({said})"


def test_a_layer_that_is_not_registered_can_be_built():
    layer = build_layer(Shift, 16, {"amount": 2.0}, max_length=9, dtype=torch.float64)
    assert (layer.max_length, layer.weight.dtype, layer.weight[0].item()) == (9, torch.float64, 2.0)
    assert build_layer(longlens.LaSAttention, 16, {"heads": 2}).num_heads == 2


def test_device_and_dtype_are_named_arguments_and_others_are_refused():
    shown = inspect.signature(longlens.LaSAttention)
    assert list(shown.parameters)[-2:] == ["device", "dtype"]
    assert "Annotated" not in str(shown), "types are those that people read"
    for given, meant in (("windwo", "window"), ("heads", "num_heads"), ("devcie", "device")):
        said = f"LaSAttention: got an unexpected keyword argument '{given}'; did you mean '{meant}'?"
        with pytest.raises(TypeError, match=re.escape(said)):
            longlens.LaSAttention(16, 4, **{given: 3})
    with pytest.raises(TypeError, match="unexpected keyword argument 'devcie'"):
        choose_mixer("las").build(16, devcie="meta")
    with pytest.raises(TypeError, match="LaSAttention: missing a required argument: 'embed_dim'"):
        longlens.LaSAttention()


def test_what_is_no_mixer_is_refused_with_a_sentence(forget):
    class Needy(Shift):
        def __init__(self, d_model, order: int):
            super().__init__(d_model)

    class Untyped(Shift):
        def __init__(self, d_model, order=None):
            super().__init__(d_model)

    class Blind(Shift):
        def forward(self, x):
            return x

    class Nameless(Shift):
        def __init__(self, *, order: int = 3):
            super().__init__(order)

    for layer, options, message in (
        (Needy, {}, "mixer 'new' has no default for its option 'order': give it one"),
        (Blind, {}, r"mixer 'new': Blind.forward must accept a mask: forward\(self, x, \*, mask=None\)"),
        (Nameless, {}, "mixer 'new': the first parameter of Nameless must be its width, d_model"),
        (len, {}, "mixer 'new' must be a class, a torch.nn.Module, got the builtin_function_or_method"),
        (nn.Identity, {}, "mixer 'new': the first parameter of Identity must be its width, d_model"),
        (Untyped, {}, r"mixer 'new' has no type for its option 'order': write one, as in order: int \| None = None"),
        (Shift, {"amuont": 1.0}, "mixer 'new' chooses 'amuont', and Shift has no such option"),
        (Shift, {"fixed": {"amuont": 1.0}}, "mixer 'new' chooses 'amuont', and Shift has no such option"),
    ):
        with pytest.raises(BadInput, match=message):
            register("new", **options)(layer)
        assert "new" not in list_mixers()


def test_a_taken_name_is_refused(forget):
    with pytest.raises(BadInput, match="there is a mixer 'las' already"):
        register("las")(Shift)
    assert find_mixer("las").layer is longlens.LaSAttention
    register("shift")(Shift)
    with pytest.raises(BadInput, match="there is a mixer 'shift' already: choose another name"):
        register("shift")(Other)
    assert register("shift")(Shift) is Shift, "the same class again is no clash: a notebook runs a cell twice"


def test_names_of_the_package_are_taken_before_their_module_is_imported():
    things = Registry("thing", "longlens.mixers")
    assert "las" in things.names()
    assert not things.entries
    with pytest.raises(BadInput, match="there is a thing 'las' already: choose another name"):
        things.add("las", object(), "elsewhere")


LAYER = """
import torch
from torch import nn
from longlens.mixers import S4D, register

@register("mine")
class Mine(nn.Module):
    '''A layer of mine.'''

    def __init__(self, d_model: int, factor: float = 2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((d_model,), factor))

    def forward(self, x, *, mask=None):
        return x * self.weight

@register("my-s4d", output="linear")
class MyS4D(S4D):
    pass
"""
ASK = (
    "from longlens.mixers.registry import create_mixer, find_mixer, list_mixers\n"
    "print(list_mixers()[-2:], find_mixer('mine').summary, create_mixer('mine', 3, factor=3).weight.sum().item(),\n"
    "      create_mixer('my-s4d', 8, state_size=4).output)"
)
ANSWER = "['mine', 'my-s4d'] A layer of mine. 9.0 linear\n"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "module", "module of a package", "entry point", "entry point of a name"])
def test_a_layer_from_outside(tmp_path, way):
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text(LAYER)
    (tmp_path / "layers_of_mine.py").write_text(LAYER)
    named = {
        "file": str(tmp_path / "layers_of_mine.py"),
        "module": "layers_of_mine",
        "module of a package": "theirs.layers",
    }
    if way.startswith("entry"):
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        value = "theirs.layers" if way == "entry point" else "theirs.layers:Mine"
        (info / "entry_points.txt").write_text(f"[longlens]\nmine = {value}\n")
    result = python(ASK, tmp_path, LONGLENS_IMPORT=named.get(way, ""))
    assert (result.stdout, result.stderr) == (ANSWER, "")


@pytest.mark.slow
def test_two_files_of_one_name(tmp_path):
    for folder, name in (("one", "Mine"), ("two", "Yours")):
        (tmp_path / folder).mkdir()
        text = LAYER.replace("Mine", name).replace('"mine"', f'"{name.lower()}"').replace("my-s4d", f"{folder}-s4d")
        (tmp_path / folder / "layer.py").write_text(text)
    files = ",".join(str(tmp_path / folder / "layer.py") for folder in ("one", "two"))
    code = (
        "from longlens.mixers.registry import create_mixer\n"
        "print([type(create_mixer(name, 4)).__name__ for name in ('mine', 'yours')])"
    )
    assert python(code, tmp_path, LONGLENS_IMPORT=files).stdout == "['Mine', 'Yours']\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("{folder}/none.py", "LONGLENS_IMPORT names {folder}/none.py, and there is no such file"),
        ("none", "LONGLENS_IMPORT names none, and there is no such module"),
        ("none.layers", "LONGLENS_IMPORT names none.layers, and there is no such module"),
        ("taken", "taken: there is a mixer 'las' already: choose another name"),
        ("{folder}/taken.py", "{folder}/taken.py: there is a mixer 'las' already: choose another name"),
    ],
)
def test_what_cannot_be_imported_is_said_in_a_line(tmp_path, named, said):
    (tmp_path / "taken.py").write_text(LAYER.replace('"mine"', '"las"'))
    ask = "from longlens.cli import main; main(['list', 'mixers'])"
    result = python(ask, tmp_path, LONGLENS_IMPORT=named.format(folder=tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"longlens: {said.format(folder=tmp_path)}\n"


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["create_mixer('las', 8)", "create_task('listops')", "list_mixers()"])
def test_a_name_that_is_taken_is_refused_before_it_is_used(tmp_path, ask):
    (tmp_path / "taken.py").write_text(LAYER.replace('"mine"', '"las"'))
    result = python(f"from longlens import *; {ask}", tmp_path, LONGLENS_IMPORT="taken")
    assert result.stderr.endswith("BadInput: taken: there is a mixer 'las' already: choose another name\n")


@pytest.mark.slow
def test_a_package_that_is_being_imported_may_use_a_layer_of_ours(tmp_path):
    """Its entry point is not imported for that: it needs what is not there yet."""
    files = {
        "theirs/__init__.py": "from theirs.base import Base",
        "theirs/base.py": "from longlens.mixers import S4D\nclass Base(S4D): pass",
        "theirs/layers.py": "from longlens.mixers import register\nfrom theirs import Base\nregister('mine')(Base)",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = "import theirs; from longlens import create_mixer; print(type(create_mixer('mine', 8)).__name__)"
    result = python(code, tmp_path, LONGLENS_IMPORT="theirs.layers")
    assert (result.stdout, result.stderr) == ("Base\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("named", ["buggy", "{folder}/buggy.py"])
@pytest.mark.parametrize("bug", ["raise ValueError('my bug')", "import nothing_that_exists"])
def test_a_bug_in_a_layer_keeps_its_traceback(tmp_path, named, bug):
    (tmp_path / "buggy.py").write_text(f"def find():\n    {bug}\n\nfind()\n")
    ask = "from longlens.cli import main; main(['list', 'mixers'])"
    named = named.format(folder=tmp_path)
    result = python(ask, tmp_path, LONGLENS_IMPORT=named)
    assert result.returncode == 1
    first, second, *_ = result.stderr.splitlines()
    assert first == f"longlens: LONGLENS_IMPORT names {named}, which raises an error when it is imported:"
    assert second.startswith("Traceback")
    assert f'{tmp_path}/buggy.py", line 2, in find' in result.stderr
    assert result.stderr.splitlines()[-1] in (
        "ValueError: my bug",
        "ModuleNotFoundError: No module named 'nothing_that_exists'",
    )
