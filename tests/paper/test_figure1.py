import pytest
import torch

from longlens.cli import main
from longlens.mixers.registry import create_mixer
from longlens.paper import figure1 as kernels
from longlens.paper.figure1 import draw_kernels, initial_kernels

SMALL = {"length": 33, "width": 8, "channels": 3, "seed": 0}


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """Draws without writing: what would have been written is looked at instead."""
    written = []
    monkeypatch.setattr(kernels, "save_picture", lambda figure, path: written.append(figure))

    def draw(*mixers, **options):
        draw_kernels(out=tmp_path / "kernels.png", mixers=mixers, **SMALL | options)
        return written[-1]

    return draw


def curve(axes):
    """The kernel itself, among the lines that mark 0."""
    return max((line.get_xydata() for line in axes.lines), key=len)


def kernel_of(name, channel, **options):
    torch.manual_seed(0)
    layer = create_mixer(name, 8, max_length=33, dtype=torch.float64, **options).eval()
    return layer.kernel(33).detach()[channel]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".png", ".pdf", ".svg"])
def test_a_picture_is_written_with_the_folders_on_the_way(tmp_path, ending):
    path = tmp_path / "new" / f"kernels{ending}"
    assert draw_kernels(out=path, mixers=("sgconv",), **SMALL) == f"written to {path}"
    assert path.read_bytes()[:5] == {".png": b"\x89PNG\r", ".pdf": b"%PDF-", ".svg": b"<?xml"}[ending]


def test_a_row_for_each_mixer_and_a_column_for_each_channel(figure):
    drawn = figure("sgconv", "hyena")
    assert len(drawn.axes) == 6
    assert [axes.get_ylabel().split("\n")[0] for axes in drawn.axes] == ["sgconv", "", "", "hyena", "", ""]
    assert [axes.get_title() for axes in drawn.axes[:3]] == ["channel 0", "channel 4", "channel 7"]
    assert "max" in drawn.get_suptitle(), "that each is relative to its largest is said"


def test_channels_are_named_once_where_rows_have_the_same(figure):
    """GSS has a kernel for each of width / 4 channels."""
    titles = [axes.get_title() for axes in figure("sgconv", "hyena", "gss", channels=2).axes]
    assert titles == ["channel 0", "channel 7", "", "", "channel 0", "channel 1"]


def test_each_kernel_is_drawn_relative_to_its_largest_weight(figure):
    for axes, channel in zip(figure("hyena").axes, (0, 4, 7), strict=True):
        steps, values = curve(axes).T
        kernel = kernel_of("hyena", channel)
        assert steps.tolist() == list(range(33))
        torch.testing.assert_close(torch.tensor(values), kernel / kernel.abs().max())


def test_weights_of_later_inputs_are_left_of_0(figure):
    """Position -1 is the first weight of the second half, position 0 the first of the first."""
    steps, values = curve(figure("sgconv", channels=1).axes[0]).T
    back, later = kernel_of("sgconv", 0), kernel_of("sgconv", 8)
    assert steps.tolist() == list(range(-33, 33))
    largest = max(back.abs().max(), later.abs().max())
    torch.testing.assert_close(torch.tensor(values), torch.cat([later.flip(0), back]) / largest)


def test_a_row_ends_where_nothing_is_seen_any_more(figure, monkeypatch):
    steps = torch.arange(1000)
    monkeypatch.setattr(kernels, "initial_kernels", lambda *_, **__: (steps, torch.exp(-steps / 100).expand(8, -1)))
    (axes,) = figure("hyena", channels=1).axes
    left, right = axes.get_xlim()
    assert left == 0
    assert right == pytest.approx(1.1 * 460), "exp(-4.6) is 1 %"
    assert axes.get_ylabel() == "hyena\n0 to 506"


def test_a_kernel_of_zeros_is_drawn(figure, monkeypatch):
    monkeypatch.setattr(kernels, "initial_kernels", lambda *_, **__: (torch.arange(33), torch.zeros(8, 33)))
    assert (curve(figure("hyena").axes[0])[:, 1] == 0).all()


def test_the_seed_decides_and_nothing_else_is_touched():
    state = torch.get_rng_state()
    first, again, other = (initial_kernels("sgconv", length=33, width=8, seed=seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "kernels.txt"], "out must end in .png, .pdf or .svg, got kernels.txt"),
        (["--out", "folder.png"], "out must be a file, and folder.png is a folder"),
        (["--mixers"], "mixers must name at least one mixer, got none"),
        (["--mixers", "sgcomv"], "unknown mixer 'sgcomv'; did you mean 'sgconv'?"),
        (["--mixers", "hyena", "las"], "mixer 'las' has no kernel to draw; those that have one are dlr, dss, gss,"),
        (["--length", "1"], "--length must be a whole number of at least 2, got 1"),
        (["--channels", "0"], "--channels must be a whole number from 1 to 12, got 0"),
        (["--channels", "1000"], "--channels must be a whole number from 1 to 12, got 1000"),
        (["--width", "0"], "--width must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["figures", "kernels", *arguments])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"longlens: {message}")
    assert len(said.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"], "nothing half-written"
