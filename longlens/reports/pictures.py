"""What all pictures share: where they may be written, and how."""

from pathlib import Path

from matplotlib.figure import Figure


def check_picture(path: Path) -> None:
    """Refuse an ending that is not one of a picture."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"out must end in .png, .pdf or .svg, got {path}")


def save_picture(figure: Figure, path: Path) -> None:
    """Write it, with the folders on the way; the ending decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
