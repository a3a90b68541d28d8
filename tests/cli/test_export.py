"""``longlens export``: a folder that others can use, with the outputs of the run, whole or not at all."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from longlens import create_model, create_task, list_mixers, load_run, train
from longlens.errors import BadInput
from longlens.integrations import torch_export
from longlens.tasks.base import Spec
from longlens.training.predict import pad_rows

RANDOM = np.random.default_rng(0)
CURVES = [RANDOM.normal(50, 9, size=(length, 2)).round(2).tolist() for length in RANDOM.integers(4, 20, size=48)]
TEXTS = ["".join(RANDOM.choice(list("abc de|é"), size=length)) for length in RANDOM.integers(2, 20, size=48)]
PAPERS = "".join(f'"{i % 2}.0"\t"{i}"\t"{i}"\t"{text}"\t"{text[::-1]}"\n' for i, text in enumerate(TEXTS))
AAN = [f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")]


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """``run_of("listops")``: a run of two steps, made once, whose data is gone."""
    folder, made = tmp_path_factory.mktemp("exported"), {}

    def write(name, inputs, labels):
        rows = ({"input": i, "label": n} for i, n in zip(inputs, labels, strict=True))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return create_task("files", path=str(folder / f"{name}.jsonl"))

    def stand_in(name, files, content, **options):
        (folder / name).mkdir()
        for file in files:
            (folder / name / file).write_text(content)
        task = create_task(name, stand_in=True, max_length=16, **options)
        task.prepare(folder / name)
        return task

    tasks = {
        "listops": lambda: create_task("listops", sizes=(32, 8, 8), min_length=4, max_length=32),
        "classes": lambda: write("classes", CURVES, ["walk", "run", "sit down"] * 16),
        "numbers": lambda: write("numbers", CURVES, (1000 + RANDOM.normal(0, 5, size=48)).tolist()),
        "texts": lambda: write("texts", TEXTS, ["x", "y"] * 24),
        "symbols": lambda: write("symbols", [[int(v) for v, _ in curve] for curve in CURVES], ["x", "y"] * 24),
        "select": lambda: create_task("atomic-select", sizes=(32, 8, 8), max_length=16, marked=4),
        "language": lambda: stand_in("text8", ["text8"], "the cat sat on the mat and " * 200),
        "pairs": lambda: stand_in("retrieval", AAN, PAPERS, min_count=1),
    }

    def run(name, mixer="las"):
        if (name, mixer) not in made:
            with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
                patch.setenv("LONGLENS_HOME", str(folder / "home"))
                how = {"recipe": "smoke", "steps": 2, "threads": 1, "runs": str(folder / "runs")}
                made[name, mixer] = train(tasks[name](), mixer, **how).folder
                shutil.rmtree(folder / "home", ignore_errors=True)  # of some tasks there is nothing
        return load_run(made[name, mixer])

    return run


def raw_inputs(name):
    """Sequences as they are in files."""
    if name == "listops":
        return ["[MAX 3 4 [MIN 2 3 ] ]", "7", "[SM 1 2 3 ]"]
    if name == "language":
        return ["the cat", "a mat and the cat"[:16], "on"]
    inputs = {"texts": TEXTS, "symbols": [[int(v) for v, _ in curve] for curve in CURVES]}.get(name, CURVES)
    return inputs[:5]


@torch.no_grad()
def outputs_of(run, raw):
    """What the run's own model gives for them, padded together."""
    rows = [run.codec.encode(sequence, "input") for sequence in raw]
    padded, mask = pad_rows(rows, torch.device("cpu"))
    return padded, mask, run.model()(padded, mask)


CASES = ["listops", "classes", "numbers", "texts", "symbols", "language"]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_transformers_gives_the_outputs_of_the_run(name, run_of, longlens, here):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    run, raw = run_of(name), raw_inputs(name)
    said = longlens("export", run.folder, "out")
    assert (said.code, said.err) == (0, "")
    assert "written to out: README.md, config.json, " in said.words
    text = name in ("listops", "texts", "language")
    kind = "AutoModelForCausalLM" if name == "language" else "AutoModelForSequenceClassification"
    model = getattr(transformers, kind).from_pretrained("out")
    _, mask, wanted = outputs_of(run, raw)
    if text:
        tokenizer = transformers.AutoTokenizer.from_pretrained("out")
        if name == "language":  # which has no symbol for padding
            found = [model(**tokenizer(row, return_tensors="pt")).logits[0] for row in raw]
            found, wanted = torch.cat(found), torch.cat([row[tokens] for row, tokens in zip(wanted, mask, strict=True)])
        else:
            found = model(**tokenizer(raw, padding=True, return_tensors="pt")).logits
    else:
        extractor = transformers.AutoFeatureExtractor.from_pretrained("out")
        found = model(**extractor(raw)).logits
        answers = np.ravel(extractor.decode(found))
        if name == "numbers":
            np.testing.assert_allclose(answers, run.predict(raw), rtol=1e-5)
        else:
            assert answers.tolist() == run.predict(raw, names=True).tolist()
    torch.testing.assert_close(found, wanted.view_as(found), atol=1e-6, rtol=1e-5)
    if name == "classes":
        assert model.config.id2label == {0: "run", 1: "sit down", 2: "walk"}
        assert model.config.scaling["mean"] == run.codec.mean
    if name == "numbers":
        assert model.config.scaling["label_mean"] == run.codec.label_mean
    assert sorted(path.name for path in here.iterdir()) == ["out"]


@torch.no_grad()
def test_numbers_at_several_positions(run_of, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    run, values = run_of("select"), torch.randn(2, 24, 4)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run.export(tmp_path / "out"))
    found = model(input_values=values).logits
    torch.testing.assert_close(found, run.model()(values), atol=1e-6, rtol=1e-5)
    assert found.shape == (2, 4)


def test_the_card_says_what_the_records_say(run_of, longlens, here):
    pytest.importorskip("transformers", reason="transformers is not installed")
    run = run_of("texts")
    longlens("export", run.folder, "deep/er/my model")
    longlens("export", run.folder, "transformers", "--to", "torch-export")
    assert "\nlibrary_name: torch\n" in (here / "transformers/README.md").read_text(), "whatever the folder is called"
    card = (here / "deep/er/my model/README.md").read_text()
    result = run.result
    for words in (
        "library_name: transformers\n",
        "# las on files",
        f"| parameters | {result['parameters']:,} |",
        "| training | 2 steps of ",
        f"accuracy {100 * result['test']:.1f} % of {result['test_samples']} samples",
        "torch " + torch.__version__,
        'AutoTokenizer.from_pretrained("my model"), AutoModelForSequenceClassification.from_pretrained("my model")',
        json.dumps(run.config.to_json(), indent=1),
    ):
        assert words in card
    code = card.partition("```python\n")[2].partition("```")[0]
    run_code = code.replace('"my model"', '"deep/er/my model"').replace("a text", "abc")
    values = {}
    exec(run_code, values)
    assert values["logits"].shape == (1, 2)


ELSEWHERE = """
import sys
sys.modules["longlens"] = None  # an import of it fails
import torch
inputs, mask = torch.load("inputs.pt")
outputs = torch.export.load("out/model.pt2").module()(inputs, mask)
assert not any(name.startswith("longlens.") for name in sys.modules)
torch.save(outputs, "outputs.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mixer"), [("listops", "las"), ("classes", "s4d")])
def test_a_program_needs_torch_alone(name, mixer, run_of, longlens, here):
    run = run_of(name, mixer)
    said = longlens("export", run.folder, "out", "--to", "torch-export")
    assert (said.code, said.err) == (0, "")
    about = json.loads((here / "out/model.json").read_text())
    inputs, mask, _ = outputs_of(run, raw_inputs(name))
    missing = max(0, about["length"]["shortest"] - mask.shape[-1])
    inputs = torch.nn.functional.pad(inputs, (0, 0) * (inputs.ndim > mask.ndim) + (0, missing))
    mask = torch.nn.functional.pad(mask, (0, missing))
    torch.save((inputs, mask), here / "inputs.pt")
    subprocess.run([sys.executable, "-I", "-c", ELSEWHERE], cwd=here, check=True)
    with torch.no_grad():
        wanted = run.model()(inputs, mask)
    torch.testing.assert_close(torch.load(here / "outputs.pt"), wanted, atol=1e-5, rtol=1e-5)
    assert about["labels"] == run.codec.names
    assert about["codec"] == json.loads(json.dumps(run.description))
    assert about["length"]["shortest"] == (run.spec.max_length if mixer == "s4d" else run.spec.max_length // 2)
    assert "torch.export.load" in (here / "out/README.md").read_text()


# Whose programs are open in the length; those of all others have one length, to which sequences are padded.
OPEN = {
    *("transformer", "l-attention", "s-attention", "las", "las-bidirectional", "alibi", "alibi-smooth"),
    *("luna", "performer"),
}
LENGTH = 26


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("name", list_mixers())
@torch.no_grad()
def test_every_mixer_can_be_a_program(name, small_options):
    spec = Spec("tokens", 7, LENGTH, "classify", 3, "accuracy")
    model = create_model(spec, name, depth=1, width=16, **small_options(name)).eval()
    if name in OPEN:
        found = torch_export.export_model(model)
        assert (found.shortest, found.longest) == (13, LENGTH)
    else:  # export_model tries an open length before it, in vain
        program = torch_export._export(model, torch_export._example(model, 3, LENGTH), LENGTH, LENGTH)
        found = torch_export.Program(program, LENGTH, LENGTH)
    program = found.program.module()
    for batch, length in ((1, LENGTH), (5, found.shortest), (2, (LENGTH + found.shortest) // 2)):
        inputs = torch.randint(7, (batch, LENGTH))
        inputs[:, length:] = 0
        mask = torch.arange(LENGTH) < torch.randint(1, length + 1, (batch, 1))
        given = slice(None, length)
        wanted = model(inputs[:, given], mask[:, given])
        given = given if name in OPEN else slice(None)
        torch.testing.assert_close(program(inputs[:, given], mask[:, given]), wanted, atol=1e-5, rtol=1e-5)


def test_a_program_of_pairs(run_of):
    model = run_of("pairs").model()
    program = torch_export.export_model(model).program.module()
    tokens = torch.randint(model.spec.size, (5, 2, 11))
    mask = torch.arange(11) < torch.randint(1, 12, (5, 2, 1))
    with torch.no_grad():
        torch.testing.assert_close(program(tokens, mask), model(tokens, mask), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_a_program_is_said_in_a_sentence(run_of):
    class Peeks(torch.nn.Module):
        def forward(self, x, mask=None):
            return x if x.sum() > 0 else -x  # what no program can do

    model = run_of("listops").model()
    model.blocks[0].mixer = Peeks()
    with pytest.raises(BadInput, match=r"^mixer 'las' cannot be a program of torch.export: .{20,200}$"):
        torch_export.export_model(model)


def test_a_folder_with_files_stays_as_it_is(run_of, longlens, here):
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = run_of("listops").folder
    (here / "full").mkdir()
    (here / "full" / "mine").write_text("mine")
    (here / "file").write_text("mine")
    for to in ("hf", "torch-export"):
        said = longlens("export", folder, "full", "--to", to)
        assert (said.code, said.out) == (2, "")
        assert "full has files: choose another one, or delete it" in said.err
    assert "is a file or a link" in longlens("export", folder, "file").err
    assert (here / "full" / "mine").read_text() == (here / "file").read_text() == "mine"
    (here / "empty").mkdir()
    assert longlens("export", folder, "empty").code == 0
    assert (here / "empty" / "config.json").exists()


def test_nothing_is_half_written(run_of, longlens, here, monkeypatch):
    def stopped(run, checkpoint, folder, name):
        (folder / "model.pt2").write_text("half of it")
        assert folder.parent == here
        raise KeyboardInterrupt

    monkeypatch.setattr(torch_export, "write", stopped)
    assert longlens("export", run_of("listops").folder, "out", "--to", "torch-export").code == 130
    assert list(here.iterdir()) == []


def test_what_cannot_be_exported_is_said(run_of, longlens, here, monkeypatch):
    run = run_of("listops")
    assert "mixer" not in longlens("export", "nothing", "out").err
    assert "must be hf or torch-export, got onnx" in longlens("export", run.folder, "out", "--to", "onnx").err
    said = longlens("export", run.folder, "out", "--checkpoint", 9)
    assert "checkpoint must be one of best, last, 2, got 9" in said.err
    shutil.copytree(run.folder, here / "stopped")
    (here / "stopped" / "result.json").unlink()
    assert "stopped must be a finished run, and it has no result yet" in longlens("export", "stopped", "out").err
    if "transformers" in sys.modules:
        pairs = longlens("export", run_of("pairs").folder, "out")
        assert "takes single sequences, and retrieval has pairs: use --to torch-export" in pairs.err
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = longlens("export", run.folder, "out")
    assert (said.code, said.err) == (2, "longlens: transformers is not installed: pip install 'longlens[hf]'\n")
    assert not (here / "out").exists()
