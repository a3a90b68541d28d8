"""Write RESULTS.md from the records in results/, its first table into README.md, and the pictures of studies whose runs
are all there: ``python tools/results.py``."""

import re
from pathlib import Path

from longlens.files import write_atomic
from longlens.paper.index import ARTIFACTS, find_artifact
from longlens.paper.records import Records
from longlens.paper.report import picture_of, summary, write_results
from longlens.paper.run import plan
from longlens.paper.study import Study
from longlens.training.config import Runtime

ROOT = Path(__file__).parents[1]
MARKS = r"(<!-- from RESULTS.md -->\n).*?(<!-- end -->)"


def written(root: Path = ROOT) -> dict[str, str]:
    """What the files should be."""
    records = Records(root / "results" / "mini")
    table = summary("mini", records).to_markdown()
    readme = (root / "README.md").read_text()
    readme, count = re.subn(MARKS, lambda match: f"{match[1]}\n{table}\n\n{match[2]}", readme, flags=re.DOTALL)
    assert count == 1, "README.md has one place for the table"
    return {"RESULTS.md": write_results("mini", records), "README.md": readme}


def draw(root: Path = ROOT) -> None:
    """The pictures that are made of records alone."""
    from longlens.paper.drawing import draw_study

    records = Records(root / "results" / "mini")
    for study in map(find_artifact, ARTIFACTS):
        if isinstance(study, Study) and study.draw is None and not plan(study.cells("mini"), "mini", records).missing:
            draw_study(study, "mini", records, Runtime(), picture_of(study, records.folder))


if __name__ == "__main__":
    draw()
    for name, text in written().items():
        write_atomic(ROOT / name, text)
