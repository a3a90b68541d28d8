"""From raw sequences to what a model takes, and from its outputs to names: all that a run keeps of its data.

A task describes it (``Task.codec``), the folder of a run holds the description (``task.json``), and a ``Codec`` is made
of it alone, where the data is no longer there. No torch here.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from longlens.data.values import Record, read_array, read_cells
from longlens.errors import BadInput
from longlens.options import shorten

EOS = "<eos>"  # the word behind each line of a language of words
MOST_NAMED = 8  # classes or symbols that an error lists

Form = Literal["real", "values", "characters", "bytes", "words", "tokens"]
Encoded = np.ndarray  # (L,) int64 tokens or (L, C) float32 numbers


class SpecLike(Protocol):
    """What a codec has to know of a task: ``longlens.tasks.base.Spec``."""

    @property
    def inputs(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def head(self) -> str: ...


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Codec:
    """How raw sequences are written, and what outputs are called.

    - real: numbers (L,) or (L, C), from which ``mean`` is taken and which are divided by ``deviation``; of a picture,
      its pixels row by row, which are then put into ``order``.
    - values: whole numbers (L,), each of which is a symbol.
    - characters, bytes, words: texts. Where a text is expected, the numbers of tokens will do as well.
    - tokens: the numbers of tokens, and nothing else.
    """

    form: Form
    inputs: Literal["tokens", "real"]
    size: int  # of the vocabulary, or the number of channels
    max_length: int
    head: str
    symbols: list[str] | None = None  # of the tokens
    specials: int = 0  # symbols at the begin of the list that stand for nothing written
    unknown: int | None = None  # the token of what has none
    knows_unknown: bool = False  # whether that token was met in training, so that it means something
    end: int | None = None  # the token behind each sequence
    cut: bool = False  # whether longer sequences are cut to max_length, as those of training were
    replace: list[tuple[str, str]] = field(default_factory=list)  # in a text, before it is split into words
    mean: list[float] | None = None  # of each channel
    deviation: list[float] | None = None
    order: list[int] | None = None  # (L,) which value comes when
    classes: list[str] | None = None
    label_mean: float = 0.0  # of numbers to be predicted
    label_deviation: float = 1.0
    layout: dict[str, Any] | None = None  # of the files: see longlens.data.readers

    @property
    def channels(self) -> list[str]:
        """The names of the columns that are channels; none where columns are steps of time, or have no names."""
        layout = self.layout or {}
        return list(layout["columns"]) if layout.get("group_column") else []

    @classmethod
    def make(cls, spec: SpecLike, description: dict[str, Any]) -> "Codec":
        """The codec of what ``Task.codec`` returned, perhaps long ago."""
        known = {"inputs": spec.inputs, "size": spec.size, "max_length": spec.max_length, "head": spec.head}
        try:
            return TypeAdapter(cls).validate_python(description | known)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, problem["loc"]))
            raise BadInput(f"{name or 'it'} of the codec cannot be read: {problem['msg'].lower()}") from None

    def for_encoded(self) -> "Codec":
        """For inputs that are encoded already, as those of a split are."""
        form: Form = "real" if self.inputs == "real" else "tokens"
        return replace(self, form=form, mean=None, deviation=None, order=None)

    @property
    def is_text(self) -> bool:
        return self.form in ("characters", "bytes", "words")

    @property
    def wanted(self) -> str:
        """What a sequence must be, for error sentences."""
        if self.inputs == "real":
            channels = "" if self.size == 1 else f" in {self.size} channels, (length, {self.size})"
            return f"a sequence of finite numbers{channels}"
        if self.form == "values":
            return "a sequence of whole numbers"
        return f"a sequence of token numbers from 0 to {self.size - 1}{', or a text' if self.is_text else ''}"

    def encode(self, sequence: Any, place: str, *, like_a_split: bool = False) -> Encoded:
        """The sequence as the model takes it. BadInput, which begins with ``place``, if it does not fit.

        With ``like_a_split``, symbols that were not met in training are the unknown one, as they were in the splits on
        which the model was evaluated; otherwise they are refused, unless training met unknown ones, too.
        """
        if isinstance(sequence, str):
            tokens = self._read_text(sequence, place, like_a_split)
            if self.end is not None:
                return np.append(self._check_length(tokens, place, room=1), self.end)
            return self._check_length(tokens, place)
        array = self._read_array(sequence, place)
        if self.inputs == "real":
            return self._check_length(self._scale(array, place), place)
        tokens = self._find_values(array, place, like_a_split) if self.form == "values" else self._ids(array, place)
        return self._check_length(tokens, place)

    def _check_length(self, encoded: Encoded, place: str, room: int = 0) -> Encoded:
        if not len(encoded):
            raise BadInput(f"{place} must be a sequence of at least one value, got an empty one")
        longest = self.max_length - room
        if self.cut:
            return encoded[:longest]
        if len(encoded) > longest:
            raise BadInput(
                f"{place} must have at most {longest:,} values, as the longest sequence of training, "
                f"got {len(encoded):,}: cut it, or train with longer ones"
            )
        if self.order is not None and len(encoded) != len(self.order):
            raise BadInput(f"{place} must have {len(self.order):,} values, got {len(encoded):,}")
        return encoded if self.order is None else encoded[self.order]

    def _read_array(self, sequence: Any, place: str) -> np.ndarray:
        """(L,) or (L, C) numbers."""
        try:
            array = np.asarray(sequence)
        except (TypeError, ValueError, OverflowError):  # lists of different sizes
            array = np.empty((), dtype=object)
        if array.shape == (0,):
            raise BadInput(f"{place} must be {self.wanted}, got an empty one")
        if array.dtype.kind not in "biuf" or array.ndim not in (1, 2):
            given = f"an array of shape {array.shape}" if array.dtype.kind in "biuf" else shorten(sequence)
            raise BadInput(f"{place} must be {self.wanted}, got {given}")
        return array

    def _scale(self, array: np.ndarray, place: str) -> np.ndarray:
        array = array[:, None] if array.ndim == 1 else array
        if array.shape[1] != self.size:
            raise BadInput(f"{place} must be {self.wanted}, got {array.shape[1]} channels")
        mean, deviation = self.mean or [0.0] * self.size, self.deviation or [1.0] * self.size
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is refused in the next lines
            scaled = ((array.astype(np.float64) - mean) / deviation).astype(np.float32)
        bad = ~np.isfinite(scaled).all(axis=1)
        if bad.any():
            position = int(bad.argmax())
            given = array[position].tolist()
            shown = given[0] if len(given) == 1 else given
            raise BadInput(f"{place} must be {self.wanted}, got {shown} at position {position + 1}")
        return scaled

    def _ids(self, array: np.ndarray, place: str) -> np.ndarray:
        """The numbers of tokens, checked."""
        if array.ndim != 1 or not (array == np.floor(array)).all():
            raise BadInput(f"{place} must be {self.wanted}, got an array of {array.dtype} {array.shape}")
        if array.min() < 0 or array.max() >= self.size:
            raise BadInput(f"{place} must have tokens from 0 to {self.size - 1}, got {array.min()} to {array.max()}")
        return array.astype(np.int64)

    def _find_values(self, array: np.ndarray, place: str, like_a_split: bool) -> np.ndarray:
        """The tokens of whole numbers."""
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 1:
            raise BadInput(f"{place} must be {self.wanted}, got {array.shape[1]} channels")
        whole = np.isfinite(array) & (array == np.floor(array))
        if not whole.all():
            raise BadInput(f"{place} must be {self.wanted}, got {array[~whole][0]}")
        return self._find([str(int(value)) for value in array.tolist()], place, like_a_split)

    def _read_text(self, text: str, place: str, like_a_split: bool) -> np.ndarray:
        if not self.is_text:
            raise BadInput(f"{place} must be {self.wanted}, got the text {shorten(text)!r}")
        if self.form == "bytes":
            return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8).astype(np.int64) + self.specials
        for old, new in self.replace:
            text = text.replace(old, new)
        return self._find(text.split() if self.form == "words" else list(text), place, like_a_split)

    @cached_property
    def _places(self) -> dict[str, int]:
        symbols = self.symbols or []
        return {symbol: index for index, symbol in enumerate(symbols) if index >= self.specials}

    def _find(self, symbols: Sequence[str], place: str, like_a_split: bool) -> np.ndarray:
        """The places of symbols in the vocabulary."""
        found = [self._places.get(symbol) for symbol in symbols]
        if None in found:
            if self.unknown is None or not (self.knows_unknown or like_a_split):
                position = found.index(None)
                raise BadInput(
                    f"{place} must have symbols of the training set, got {shorten(symbols[position])!r} at position "
                    f"{position + 1}; {self._listed(list(self._places))}"
                )
            found = [self.unknown if token is None else token for token in found]
        return np.array(found, dtype=np.int64)

    @staticmethod
    def _listed(names: Sequence[str]) -> str:
        shown = " ".join(map(shorten, names[:MOST_NAMED]))
        return f"it had {shown}" + (f" … ({len(names):,} in all)" if len(names) > MOST_NAMED else "")

    def encode_label(self, label: Any, place: str) -> int | float:
        """The number of a class, or a scaled number, as the targets of a split."""
        if self.head == "regress":
            if isinstance(label, str):
                raise BadInput(f"{place}: the label must be a number, got {shorten(label)!r}")
            return (float(label) - self.label_mean) / self.label_deviation
        name = class_name(label)
        if name not in self._classes:
            raise BadInput(
                f"{place}: the label must be one of the classes of training, got {shorten(label)!r}; "
                f"{self._listed(list(self._classes))}"
            )
        return self._classes[name]

    @cached_property
    def _classes(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.classes or [])}

    @property
    def names(self) -> list[str] | None:
        """The names of all outputs: classes, or the symbols of a language; None if they are numbers."""
        return self.symbols if self.head == "language" else self.classes

    def name(self, output: int) -> str:
        """The name of an output; its number if it has none."""
        names = self.names or []
        return names[output] if output < len(names) else str(output)

    def decode(self, outputs: np.ndarray) -> list[str] | np.ndarray:
        """What outputs mean. (N, K) scores or probabilities: the names of the largest; numbers: without scaling."""
        if self.head == "regress":
            return np.asarray(outputs, dtype=np.float64) * self.label_deviation + self.label_mean
        return [self.name(int(index)) for index in np.asarray(outputs).argmax(axis=-1)]

    def shown(self, encoded: Encoded) -> list[str]:
        """The symbol of each token."""
        return [str(token) if self.symbols is None else self.symbols[token] for token in encoded.tolist()]

    def unscale(self, encoded: Encoded) -> np.ndarray:
        """(L, C) real numbers as they were given."""
        return encoded * np.array(self.deviation or [1.0]) + np.array(self.mean or [0.0])


class Reader:
    """The text of tokens that come one by one: ``reader.read([7, 8])`` is what they add to it. Bytes that are no
    character yet wait for the next ones; ``end`` is what is left of them."""

    def __init__(self, codec: Codec):
        self.codec = codec
        self.bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self.at_start = True  # of a line, where no space separates a word from the one before it

    def read(self, tokens: Iterable[int]) -> str:
        if self.codec.form == "bytes":
            return self.bytes.decode(bytes(token - self.codec.specials for token in tokens))
        symbols = [self.codec.name(token) for token in tokens]
        return "".join(symbols if self.codec.form == "characters" else map(self._separate, symbols))

    def _separate(self, word: str) -> str:
        space = "" if self.at_start or word == EOS else " "
        self.at_start = word == EOS
        return "\n" if word == EOS else space + word

    def end(self) -> str:
        return self.bytes.decode(b"", final=True)


def class_name(label: Any) -> str:
    """The name of a class as it was read: 1 and 1.0 are the same one."""
    if isinstance(label, bool):
        return str(label).lower()
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def line_records(lines: Iterable[str], name: str, codec: Codec) -> Iterator[Record]:
    """A sequence in each line: a text, or numbers with spaces, commas or semicolons between them, or a list of JSON,
    which may have channels. Blank lines are left out. ``name`` says in an error where the lines are from."""
    found = False
    try:
        for number, line in enumerate(lines, start=1):
            text, place = line.rstrip("\r\n"), f"{name}, line {number}"
            if not text.strip():
                continue
            found = True
            yield Record(place, text if codec.is_text else _read_numbers(text.strip(), place), None)
    except UnicodeError as error:
        raise BadInput(f"{name} is not a text in UTF-8: {error}; save it as UTF-8") from None
    if not found:
        raise BadInput(f"{name} has no sequences; it must have one at least")


def _read_numbers(text: str, place: str) -> np.ndarray:
    if not text.startswith("["):
        return read_cells(re.split(r"[\s,;]+", text), place)
    try:
        return read_array(json.loads(text), place)
    except RecursionError:
        raise BadInput(f"{place} must be a list of numbers, got something that is nested too deeply") from None
    except ValueError as error:
        raise BadInput(f"{place} must be a list of numbers, got what cannot be read: {error}") from None
