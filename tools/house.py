"""Figures about the house: what a command runs and imports, and how often an option of a layer is declared.

    python tools/house.py [FOLDER OF A CHECKOUT]

It runs ``longlens train listops --mixer las --recipe smoke`` for three steps in a temporary folder.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRACE = """
import collections, json, os, sys
package = os.path.realpath(sys.argv[1]) + os.sep
files, calls = set(), collections.Counter()
def is_import(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
def look(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package) and not is_import(frame):
        files.add(code.co_filename)
        calls[code.co_name] += 1
from longlens.cli import main
sys.setprofile(look)
try:
    main("train listops --mixer las --recipe smoke --steps 3 --threads 1".split())
finally:
    sys.setprofile(None)
imported = [m for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").startswith(package)]
found = {"files run": len(files), "files imported": len(imported)}
found |= {name: calls[name] for name in ("create_task", "load_recipe", "fingerprint")}
print("\\n" + json.dumps(found))
"""


def trace(root: Path) -> dict[str, int]:
    """Files of ours whose functions run, and that are imported, when a model is trained in one process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"LONGLENS_HOME": f"{folder}/home", "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", TRACE, str(root / "longlens")]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def help_time(root: Path) -> dict[str, object]:
    """The best of five times to a help screen, and whether torch was imported for it."""
    code = "import sys\nfrom longlens.cli import main\ntry:\n    main(sys.argv[1:])\n"
    code += "finally:\n    print('torch' in sys.modules)"
    seconds, last = [], ""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(root), "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as on most machines: modules are compiled once
        for _ in range(6):
            start = time.perf_counter()
            command = [sys.executable, "-c", code, "train", "listops", "--help"]
            last = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
            seconds.append(time.perf_counter() - start)
    return {"train listops --help, seconds": round(min(seconds), 2), "with torch": last.split()[-1]}


def options_declared_twice(root: Path) -> dict[str, int]:
    """Options of layers that are a parameter of a layer and a field of a class in the same file as well."""
    twice = options = 0
    for path in (root / "longlens" / "mixers").glob("*.py"):
        classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        parameters: set[str] = set()
        declared: list[str] = []
        for node in classes:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    parameters |= {argument.arg for argument in (*part.args.args, *part.args.kwonlyargs)}
                elif isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation):
                    decorators = " ".join(map(ast.unparse, node.decorator_list))
                    declared += [ast.unparse(part.target)] if "register(" in decorators else []
        options += len(parameters - {"self", "d_model", "embed_dim", "device", "dtype", "max_length"})
        twice += sum(name in parameters for name in declared)
    return {"options of layers": options, "declared twice": twice}


def lines(root: Path) -> dict[str, object]:
    counts = {path: len(path.read_text().splitlines()) for path in (root / "longlens").rglob("*.py")}
    longest = max(counts, key=lambda path: counts[path])
    skips = sum(path.read_text().count("# fmt: skip") for path in counts)
    found = {"lines of Python": sum(counts.values()), "# fmt: skip": skips}
    return found | {"longest file": f"{longest.relative_to(root)}, {counts[longest]} lines"}


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    for figures in (lines(root), options_declared_twice(root), help_time(root), trace(root)):
        for name, value in figures.items():
            print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
