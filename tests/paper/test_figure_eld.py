import pytest

from longlens.paper import figure_eld as eld
from longlens.paper.figure_eld import draw_eld


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """Draws without writing: what would have been written is looked at instead."""
    written = []
    monkeypatch.setattr(eld, "save_picture", lambda figure, path: written.append(figure))

    def draw(**options):
        draw_eld(out=tmp_path / "eld.png", **options)
        return [axes for axes in written[-1].get_axes() if axes.get_label() != "<colorbar>"]

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".png", ".PDF", ".svg"])
def test_a_picture_is_written_with_the_folders_on_the_way(tmp_path, ending):
    path = tmp_path / "new" / f"eld{ending}"
    assert draw_eld(out=path, length=64) == f"written to {path}"
    assert path.read_bytes()[:4] == {".png": b"\x89PNG", ".PDF": b"%PDF", ".svg": b"<?xm"}[ending]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_curves_are_those_of_the_formula(figure):
    distance, kept = figure(heads=2, max_rate=0.01, length=1000)[0].lines[1].get_data()
    assert (distance[0], distance[-1]) == (1, 1000)
    assert kept.tolist() == pytest.approx([2.718281828 ** (-0.01 * (n - 1)) for n in distance.tolist()])


def test_many_heads_are_drawn_in_part(figure):
    """A legend of 1,000 lines and as many matrices would say nothing."""
    panels = figure(heads=1000)
    assert [line.get_label() for line in panels[0].lines][-1].startswith("head 999, ")
    assert len(panels[0].lines) == 8
    assert [axes.get_title().partition(":")[0] for axes in panels[3:]] == ["head 0", "head 333", "head 666", "head 999"]


def test_weights_have_plain_ticks(figure):
    axes = figure()[2]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1/8", "1/4", "1/2", "1", "2", "4", "8"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["score 2", "score 0", "score −2"]


def test_long_sequences_need_no_memory(figure):
    assert len(figure(length=2**31 - 1)[0].lines[0].get_xdata()) <= 512
