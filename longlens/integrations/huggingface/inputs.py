"""From raw sequences to what a model takes, as transformers does it: a tokenizer for texts, and a feature extractor for
numbers. Both give what the codec of a run gives."""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoFeatureExtractor, BatchFeature, FeatureExtractionMixin, PreTrainedTokenizerFast

from longlens.data.codec import Codec
from longlens.errors import BadInput
from longlens.integrations.huggingface.models import LaSConfig
from longlens.tasks.base import Spec
from longlens.training.predict import encode_rows, pad_rows

ABSENT = "\0"  # in no vocabulary of words, as the name of what a text may not have
SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())  # at which str.split splits


def make_tokenizer(codec: Codec) -> PreTrainedTokenizerFast:
    """A tokenizer that gives the tokens of a codec of texts. Symbols that training has not met are the unknown one, as
    they were in the splits on which the model was evaluated; where there is none, they are an error.

    Ask it to pad and, where the codec cuts, to cut: ``tokenizer(texts, padding=True, truncation=True)``.
    """
    symbols, form = codec.symbols or [], codec.form
    named = symbols[: codec.specials]  # a text may have these words, and they mean nothing in it
    if form == "bytes":
        names = [*named, *(f"<0x{byte:02X}>" for byte in range(256))]
        vocabulary = {name: index for index, name in enumerate(names)}
        made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))  # no pair is joined, and no letter is known
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    elif form in ("characters", "words"):
        unknown = ABSENT if codec.unknown is None else symbols[codec.unknown]
        vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
        made = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
        if form == "words":
            pairs = [*codec.replace, *((name, name + ABSENT) for name in named)]
            made.normalizer = normalizers.Sequence([normalizers.Replace(old, new) for old, new in pairs])
            made.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{SPACES}]+"), "removed")
        else:
            made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            made.decoder = decoders.Fuse()
    else:
        raise BadInput(f"a tokenizer needs texts, and the inputs are {codec.wanted}")
    if codec.end is not None:
        end = symbols[codec.end]
        made.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, codec.end)])
    specials = {
        "pad_token": named[0] if named else None,
        "eos_token": None if codec.end is None else symbols[codec.end],
    }
    if codec.unknown is not None:
        specials["unk_token"] = symbols[codec.unknown]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=codec.max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "<pad>" in a text is five characters
        **{name: token for name, token in specials.items() if token is not None},
    )


class LaSFeatureExtractor(FeatureExtractionMixin):
    """Sequences of raw numbers, scaled as those of training were and padded together: ``model(**extractor(curves))``.

    Args:
        spec: What the model knows of its task.
        codec: What the run has kept of its data (``task.json``).
    """

    model_input_names: ClassVar[list[str]] = ["input_values", "input_ids", "attention_mask"]

    def __init__(self, spec: dict[str, Any] | None = None, codec: dict[str, Any] | None = None, **others: Any):
        super().__init__(**others)
        if spec is None or codec is None:
            raise BadInput("spec and codec must be given: those of the task.json of a run")
        self.spec, self.codec = spec, codec

    def make_codec(self) -> Codec:
        return Codec.make(Spec(**self.spec), self.codec)

    def __call__(self, sequences: Iterable[Any], **others: Any) -> BatchFeature:
        """Tensors of (L,) or (L, channels) numbers each, as they are in the files of the task."""
        if wrong := [name for name, value in others.items() if (name, value) != ("return_tensors", "pt")]:
            raise BadInput(f"the extractor takes sequences, and gives tensors of torch; got {wrong[0]}")
        codec = self.make_codec()
        rows = [row for _, row in encode_rows(codec, sequences)]
        if not rows:
            raise BadInput("sequences must have one at least, got none")
        padded, mask = pad_rows(rows, torch.device("cpu"))
        name = "input_values" if codec.inputs == "real" else "input_ids"
        return BatchFeature({name: padded, "attention_mask": mask.long()})

    def decode(self, logits: Any) -> list[str] | np.ndarray:
        """The names of the best classes, or numbers as the labels were."""
        return self.make_codec().decode(torch.as_tensor(logits).detach().cpu().numpy())


AutoFeatureExtractor.register(LaSConfig, LaSFeatureExtractor, exist_ok=True)
