"""What all pictures share: where they may be written, and how."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from longlens.errors import BadInput
from longlens.files import check_out, write_atomic


def check_picture(out: Path) -> None:
    """Refuse what is no place for a picture, before it is drawn. Its folder is made."""
    if out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise BadInput(f"out must end in .png, .pdf or .svg, got {out}")
    check_out(out)


def save_picture(figure: Figure, out: Path) -> str:
    """Write a picture, and return the line that says so; the ending decides the format."""
    written = io.BytesIO()
    figure.savefig(written, format=out.suffix.lower().removeprefix("."), dpi=150)
    write_atomic(out, written.getvalue())
    return f"written to {out}"
