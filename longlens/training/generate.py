"""The text that a language model writes after a prompt, piece by piece."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from longlens.data.codec import Codec, Reader
from longlens.errors import BadInput
from longlens.models.config import Writing
from longlens.models.decode import Decoder, write
from longlens.models.model import Model
from longlens.options import LARGEST


class Continuation:
    """What follows a prompt, written while it is read: ``for piece in continuation``. It begins anew for each loop."""

    def __init__(self, model: Model, codec: Codec, prompt: Any, writing: Writing):
        if codec.head != "language":
            raise BadInput(
                f"generate needs a language model, as those of text8, enwik8 and WikiText are, and this one is made to "
                f"{codec.head}: use predict"
            )
        if not len(prompt):
            raise BadInput("prompt must have at least one symbol to go on from, got none")
        self.model, self.codec, self.writing = model, codec, writing
        self.tokens: list[int] = replace(codec, max_length=LARGEST).encode(prompt, "prompt").tolist()
        self.decoder()  # which refuses what cannot be, now and not in the first turn of a loop

    def decoder(self) -> Decoder:
        return Decoder(self.model, context=self.writing.context)

    @property
    def prompt(self) -> str:
        """As the model reads it: words that it does not know are <unk>."""
        return Reader(self.codec).read(self.tokens)

    @property
    def notes(self) -> list[str]:
        """What to know before it begins."""
        decoder, found = self.decoder(), []
        if not decoder.cached:
            name = self.model.mixer.name
            found.append(f"{name} has no step: it reads the whole text again for each token, which is slow")
        length, trained = len(self.tokens) + self.writing.tokens, self.model.spec.max_length
        if min(length, decoder.context) > trained:
            found.append(f"the model was trained on at most {trained:,} tokens: after more it may write worse")
        if length > decoder.context:
            given = "in training" if self.writing.context is None else "asked for"
            found.append(
                f"the model sees at most {decoder.context:,} tokens, as {given}: when there are more, it starts again "
                "with the last half of them"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        reader = Reader(self.codec)
        reader.read(self.tokens)
        for token in write(self.decoder(), self.tokens, self.writing):
            if piece := reader.read([token]):
                yield piece
        if piece := reader.end():
            yield piece
