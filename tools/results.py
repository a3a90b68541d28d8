"""Write RESULTS.md from the records in results/, and its first table into README.md: ``python tools/results.py``."""

import re
from pathlib import Path

from longlens.files import write_atomic
from longlens.paper.records import Records
from longlens.paper.report import summary, write_results

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


if __name__ == "__main__":
    for name, text in written().items():
        write_atomic(ROOT / name, text)
