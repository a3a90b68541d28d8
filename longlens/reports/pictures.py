"""What all pictures share: where they may be written, and how."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from longlens.errors import BadInput
from longlens.files import check_out, write_atomic

ENDINGS = (".png", ".pdf", ".svg")


def check_picture(out: Path) -> None:
    """Refuse what is no place for a picture, before it is drawn. Its folder is made."""
    if out.suffix.lower() not in ENDINGS:
        raise BadInput(f"out must end in .png, .pdf or .svg, got {out}")
    check_out(out)


def save_picture(figure: Figure, out: Path) -> None:
    """Write a picture; the ending decides the format."""
    written = io.BytesIO()
    figure.savefig(written, format=out.suffix.lower().removeprefix("."), dpi=150)
    write_atomic(out, written.getvalue())
