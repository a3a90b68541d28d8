"""A run as a folder that ``from_pretrained`` reads."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers.utils import logging

from longlens.data.codec import Codec
from longlens.errors import BadInput
from longlens.integrations.huggingface.inputs import LaSFeatureExtractor, make_tokenizer
from longlens.integrations.huggingface.models import LaSConfig, LaSForCausalLM, LaSForSequenceClassification
from longlens.models.model import Model
from longlens.tasks.base import Spec
from longlens.training.saved import Run

CODE = """
```python
import longlens.integrations.huggingface  # so that the Auto classes know it: pip install 'longlens[hf]'
from transformers import {model}, {encoder}

encoder, model = {encoder}.from_pretrained("{name}"), {model}.from_pretrained("{name}")
{call}
```

{note}
"""


def write(run: Run, checkpoint: str, folder: Path, name: str) -> str:
    """Write the files; return how they are used, from a folder that is called ``name``."""
    spec, codec = run.spec, run.codec
    if spec.head == "match":
        raise BadInput(
            f"a model of transformers takes single sequences, and {run.config.task.name} has pairs: "
            "use --to torch-export, or load_run(folder).predict"
        )
    trained = run.model(checkpoint)
    kind = LaSForCausalLM if spec.head == "language" else LaSForSequenceClassification
    model = kind(make_config(trained, spec, codec))
    model.model.load_state_dict(trained.state_dict())
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.eval().save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    if codec.is_text:
        make_tokenizer(codec).save_pretrained(folder)
    else:
        LaSFeatureExtractor(asdict(spec), run.description).save_pretrained(folder)
    return _usage(kind.__name__.replace("LaS", "AutoModel"), codec, name)


def make_config(model: Model, spec: Spec, codec: Codec) -> LaSConfig:
    """The config that makes the model of a run again."""
    labels: dict[str, Any] = {}
    if spec.head == "classify":
        labels["id2label"] = {index: codec.name(index) for index in range(spec.outputs)}
        labels["label2id"] = {label: index for index, label in labels["id2label"].items()}
        labels["problem_type"] = "single_label_classification" if spec.outputs > 1 else None
    elif spec.head == "regress":
        labels = {"num_labels": spec.positions or 1, "problem_type": "regression"}
    names = ("mean", "deviation", "label_mean", "label_deviation")
    scaling = (
        {name: getattr(codec, name) for name in names} if spec.inputs == "real" or spec.head == "regress" else None
    )
    return LaSConfig(
        vocab_size=spec.size if spec.inputs == "tokens" else 1,
        channels=spec.size if spec.inputs == "real" else None,
        max_position_embeddings=spec.max_length,
        shape=None if spec.shape is None else list(spec.shape),
        target_positions=spec.positions,
        mixer=model.mixer.name,
        mixer_options=dict(model.mixer.options),
        model_options=model.config.values(),
        scaling=scaling,
        **labels,
    )


def _usage(model: str, codec: Codec, name: str) -> str:
    cut = ", truncation=True" if codec.cut else ""
    if codec.is_text and codec.head == "language":
        call = 'tokens = model.generate(**encoder("a text", return_tensors="pt"), max_new_tokens=50)'
        note = "`encoder.decode(tokens[0])` is the text. Each new token runs the window again: there is no cache."
    elif codec.is_text:
        padding = ", padding=True" if codec.specials else ""
        call = f'logits = model(**encoder(["a text"]{padding}{cut}, return_tensors="pt")).logits'
        note = "Names of the classes are in `model.config.id2label`."
    else:
        call = f"logits = model(**encoder([sequence])).logits  # {codec.wanted}, as in the files of training"
        note = "`encoder.decode(logits)` gives names of classes, or numbers as the labels were."
    encoder = "AutoTokenizer" if codec.is_text else "AutoFeatureExtractor"
    return CODE.format(model=model, encoder=encoder, name=name, call=call, note=note)
