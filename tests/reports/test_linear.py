from longlens.reports import linear
from longlens.reports.linear import draw_linear


def test_no_error_is_above_its_bound(monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(linear, "save_picture", lambda figure, path: written.append(figure))
    draw_linear(out=tmp_path / "linear.png", length=2100, rates=(0.03,), size=0.5)
    bound, error, chosen, *_ = written[0].get_axes()[0].lines
    bounds, errors = bound.get_ydata().tolist(), error.get_ydata().tolist()
    assert all(mine <= most for mine, most in zip(errors, bounds, strict=True))
    assert errors[0] > 1e-8, "there is an error to be seen"
    assert errors[-1] < errors[0] / 100
    assert 0 < chosen.get_ydata()[0] <= 1e-3
