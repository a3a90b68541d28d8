"""What the report page has of the paper: records as runs, tables beside ours, pictures, attention maps."""

import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from longlens.errors import LongLensError
from longlens.files import check_out, write_atomic
from longlens.paper.index import ARTIFACTS, Computed, find_artifact
from longlens.paper.records import Records
from longlens.paper.report import picture_of, study_sheets, summary
from longlens.paper.run import MISSING, verdict_of
from longlens.paper.study import Scale
from longlens.reports.page.entries import Entry, Watch, is_sound, without_repeats
from longlens.reports.page.render import Artifact, Figure, Still, draw_changing, render_page
from longlens.reports.page.samples import inlined, show_samples
from longlens.tasks.base import Task

MAPPED = ("transformer", "l-attention", "s-attention", "las")  # layers whose weights can be drawn
LONGEST = 1024  # tokens of a sample whose map is drawn


def record_entries(results: Path | None) -> list[Entry]:
    """The records of all scales as runs, as far as they can be read."""
    entries: list[Entry] = []
    if results is None:
        return entries
    for records in map(Records, sorted(path for path in results.glob("*") if path.is_dir())):
        for record in records.found.values():
            path, state = record.path, "finished" if record.result else "failed"
            files, made = [(path.name, path.stat().st_size)], [record.environment]
            metrics = [line for line in record.metrics if is_sound(line)]
            note, data = record.error or "", record.data or ""
            entries.append(Entry(str(path), state, record.config, record.result, metrics, made, files, note, data))
    return entries


def write_page(
    out: Path, places: Iterable[Path], results: Path | None = None, scale: Scale = "mini", *, maps: bool = True
) -> str:
    """Write the page of some runs, and return the line that says where it is."""
    check_out(out)
    entries = without_repeats([*Watch(places).look(), *record_entries(results)])
    still = still_parts(results, scale, entries, maps=maps)
    write_atomic(out, render_page(still, draw_changing(entries)))
    return f"{len(entries):,} run{'' if len(entries) == 1 else 's'} on one page: {out}"


def still_parts(results: Path | None, scale: Scale, entries: Iterable[Entry], *, maps: bool) -> Still:
    """All that does not change while runs train."""
    entries = [*entries]
    tasks: list[Task] = [entry.config.task for entry in entries if entry.config is not None]
    figures = [*_attention(entries)] if maps else []
    if results is None or not results.is_dir():
        return Still(figures=figures, samples=show_samples(tasks))
    records = Records(results / scale)
    known = [_artifact(name, scale, records) for name in ARTIFACTS]
    known.sort(key=lambda artifact: artifact.verdict == MISSING)  # what is known comes first
    pictures = [picture for name in ARTIFACTS for picture in _picture(name, records)]
    return Still(
        summary=summary(scale, records), artifacts=known, figures=[*figures, *pictures], samples=show_samples(tasks)
    )


def _artifact(name: str, scale: Scale, records: Records) -> Artifact:
    artifact = find_artifact(name)
    about = f"{name}: {artifact.title}", artifact.claim, artifact.place
    verdict = verdict_of(artifact, scale, records)
    if isinstance(artifact, Computed):
        found = artifact.recorded(records.folder.parent)
        return Artifact(*about, verdict, found.sentences if found else [])
    return Artifact(*about, verdict, [artifact.note] if artifact.note else [], study_sheets(artifact, scale, records))


def _picture(name: str, records: Records) -> Iterator[Figure]:
    artifact = find_artifact(name)
    path = picture_of(artifact, records.folder)
    if path.is_file():
        yield Figure(f"{artifact.title}.", f"{artifact.place}. {artifact.claim}", inlined(path.read_bytes()))


def _attention(entries: Iterable[Entry]) -> Iterator[Figure]:
    """Maps of the first test sample of the first task whose data and models are there: a picture for each layer."""
    chosen: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.config.training.seed if entry.config else 0):
        first = next(iter(chosen.values()), entry).config
        if _has_map(entry) and entry.config and first and entry.config.task.title == first.task.title:
            chosen.setdefault(entry.config.mixer.name, entry)
    for mixer in sorted(chosen):
        with suppress(LongLensError, OSError):  # its files may be gone or damaged
            yield _draw_maps(chosen[mixer])


def _has_map(entry: Entry) -> bool:
    """Whether its weights can be drawn: a finished run, of one of our attention layers, with its model and data."""
    config = entry.config
    if entry.state != "finished" or config is None or config.mixer.name not in MAPPED:
        return False
    if config.mixer.options.get("bidirectional") or not (Path(entry.place) / "checkpoints").is_dir():
        return False
    try:
        return config.task.is_prepared() and config.task.head != "match" and config.task.spec.max_length <= LONGEST
    except (LongLensError, OSError):
        return False


def _draw_maps(entry: Entry) -> Figure:
    from matplotlib.figure import Figure as Drawing

    from longlens.reports.attention import EXPLAINED, attention_maps, draw_map, sample_inputs
    from longlens.training.evaluate import load_model

    assert entry.config is not None
    config = entry.config
    maps = attention_maps(load_model(Path(entry.place)), sample_inputs(config.task, "test", 0))
    drawing = Drawing(figsize=(2.6 * len(maps), 2.9), layout="constrained")
    for number, (axes, weights) in enumerate(zip(drawing.subplots(1, len(maps), squeeze=False)[0], maps, strict=True)):
        draw_map(axes, weights.mean(axis=0))
        axes.set_title(f"layer {number}", fontsize=9)
    drawing.supxlabel("key", fontsize=9)
    drawing.supylabel("query", fontsize=9)
    written = io.BytesIO()
    drawing.savefig(written, format="png", dpi=110)
    text = f"{config.task.title}, seed {config.training.seed}: a test sample, the mean over heads, {EXPLAINED}."
    return Figure(f"Attention of {config.mixer.name}.", text, inlined(written.getvalue()), is_small=len(maps) < 3)
