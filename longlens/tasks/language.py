"""Language modeling: text8 and enwik8 by bytes, WikiText by words.

text8 and enwik8 (Mahoney) are cut at 90 and 95 of their 100 million bytes, as everybody does. The words of WikiText
(Merity et al. 2017) are those of its training set, and every line ends with ``<eos>``.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import md5, sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from longlens.data.codec import EOS, Codec, Reader
from longlens.data.datasets import SPLITS, Metric, Samples, SplitName, Windows
from longlens.data.sources import Remote, Source, official
from longlens.data.store import Details, Writer
from longlens.errors import BadInput
from longlens.tasks.base import Head, Length, Spec, StoredTask, register

TEXT8_SYMBOLS = (" ", *"abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True, kw_only=True)
class LanguageTask(StoredTask):
    """Predict the next token.

    Args:
        max_length: Tokens in a window of the text; windows do not overlap.
    """

    max_length: Length = 512

    aliases: ClassVar[Mapping[str, str]] = {"context": "max_length"}
    head: ClassVar[Head] = "language"
    archive: ClassVar[Remote]
    symbols: ClassVar[int]  # of the vocabulary

    @property
    def spec(self) -> Spec:
        return Spec("tokens", self.symbols, self.max_length, self.head, self.symbols, self.metric)

    def load(self, name: SplitName, epoch: int) -> Windows:
        return Windows(self.prepared.array(name, "tokens"), self.max_length)

    def decode(self, ids: np.ndarray) -> str:
        reader = Reader(Codec.make(self.spec, self.codec()))
        return reader.read(ids.tolist()) + reader.end()

    def render(self, samples: Samples, row: int) -> str:
        length = samples.lengths[row]
        following = self.decode(samples.targets[row, length - 1 : length])
        return f"{self.decode(samples.inputs[row, :length])}\n→ {following!r}"


@dataclass(frozen=True, kw_only=True)
class _Bytes(LanguageTask):
    """Predict the next byte of 100 million.

    Args:
        stand_in: Accept a shorter file, such as a prefix; everything made from it says so.
    """

    stand_in: bool = False

    metric: ClassVar[Metric] = "bits_per_byte"
    size: ClassVar[int] = 100_000_000
    md5: ClassVar[str]
    first_million: ClassVar[str]  # the checksum of so many bytes, by which a prefix is known

    def identity(self) -> dict[str, Any]:
        return {"data": self.name, "version": 1, "stand_in": self.stand_in}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        if source is None and self.stand_in:
            raise BadInput(f"a prefix of {self.name} is your own: run '{self.import_command()}', where DIR has it")
        found = official(source, self.archive, self.import_command())
        data, place = found.read(self.name, limit=self.size), f"{self.name} in {found.path}"
        whole = len(data) == self.size
        if not whole and not self.stand_in:
            wanted = f"the official one has {self.size:,}, in {self.archive.urls[0]}"
            raise BadInput(f"{place} has {len(data):,} bytes; {wanted}. Or accept it as a prefix, by --stand-in")
        if whole and not self.stand_in and md5(data).hexdigest() != self.md5:
            raise BadInput(f"{place} is damaged: download it again from {self.archive.urls[0]}")
        tokens = self.encode(np.frombuffer(data, np.uint8))
        parts = np.split(tokens, [len(tokens) * 90 // 100, len(tokens) * 95 // 100])
        for split, part in zip(SPLITS, parts, strict=True):
            if len(part) < 2:
                raise BadInput(f"{place} has {len(data):,} bytes: too few for three splits")
            writer.append(split, tokens=part)
        sizes = dict(zip(SPLITS, map(len, parts), strict=True))
        details: Details = {"sizes": sizes, "source": str(source or self.archive.urls[0])}
        if self.stand_in:
            beginning = sha256(data[:1_000_000]).hexdigest() == self.first_million
            details["stand_in"] = f"{'prefix' if beginning else 'stand-in'} of {len(data):,} bytes"
        return details

    def encode(self, data: np.ndarray) -> np.ndarray:
        """Bytes as tokens."""
        return data


@register("text8")
class Text8(_Bytes):
    summary: ClassVar[str] = "the next letter of Wikipedia, cleaned to 27 symbols"
    origin: ClassVar[str] = "download, 31 MB"
    symbols: ClassVar[int] = len(TEXT8_SYMBOLS)
    archive: ClassVar[Remote] = Remote(
        "text8.zip", ("http://mattmahoney.net/dc/text8.zip",), "md5:f26f94c5209bc6159618bad4a559ff81"
    )
    md5: ClassVar[str] = "3bea1919949baf155f99411df5fada7e"
    first_million: ClassVar[str] = "a29a713419313a2c4f0f38d3907938156a7c088a69c7c30542410124651ab5b2"

    def vocabulary(self) -> list[str]:
        return list(TEXT8_SYMBOLS)

    def codec(self) -> dict[str, Any]:
        return {"form": "characters", "symbols": self.vocabulary()}

    def encode(self, data: np.ndarray) -> np.ndarray:
        table = np.full(256, 255, dtype=np.uint8)
        table[[ord(symbol) for symbol in TEXT8_SYMBOLS]] = np.arange(len(TEXT8_SYMBOLS))
        tokens = table[data]
        if (tokens == 255).any():
            raise BadInput(f"text8 has only a to z and spaces; this file has the byte {data[tokens == 255][0]}")
        return tokens


@register("enwik8")
class Enwik8(_Bytes):
    summary: ClassVar[str] = "the next byte of Wikipedia"
    origin: ClassVar[str] = "download, 36 MB"
    symbols: ClassVar[int] = 256
    archive: ClassVar[Remote] = Remote(
        "enwik8.zip",
        ("http://mattmahoney.net/dc/enwik8.zip",),
        "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    )
    md5: ClassVar[str] = "a1fa5ffddb56f4953e226637dabbb36a"
    first_million: ClassVar[str] = "369b688978f649681136198fb96db14c1616756260c55fb4b65e9bc049552cad"

    def vocabulary(self) -> list[str]:
        return [f"<{byte:02x}>" for byte in range(256)]

    def codec(self) -> dict[str, Any]:
        return {"form": "bytes", "symbols": self.vocabulary()}


@dataclass(frozen=True, kw_only=True)
class _WikiText(LanguageTask):
    metric: ClassVar[Metric] = "perplexity"
    sizes: ClassVar[dict[str, int]]

    def identity(self) -> dict[str, Any]:
        return {"data": self.name, "version": 1}

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        found = official(source, self.archive, self.import_command())
        counts = Counter(self._words(found, "train"))
        counts[EOS] = counts.pop(EOS)  # after words that are as frequent
        if len(counts) != self.symbols:
            raise BadInput(f"the training set in {found.path} must have {self.symbols:,} words, got {len(counts):,}")
        ids = {word: index for index, (word, _) in enumerate(counts.most_common())}
        unknown = ids.get("<unk>", 0)
        for split in SPLITS:
            tokens = np.fromiter((ids.get(word, unknown) for word in self._words(found, split)), dtype=np.int32)
            writer.append(split, tokens=tokens)
        writer.append("train", words=np.frombuffer("\n".join(ids).encode(), np.uint8))
        return {"sizes": self.sizes, "source": str(source or self.archive.urls[0])}

    def _words(self, source: Source, split: SplitName) -> Iterator[str]:
        """The words of a split, as many as there must be."""
        file, size = f"wiki.{split}.tokens", self.sizes[split]
        count = 0
        for line in source.lines(f"{self.name}/{file}", file):
            words = [*line.split(), EOS]
            count += len(words)
            if count > size:
                break
            yield from words
        if count != size:
            given = f"more than {size:,}" if count > size else f"{count:,}"
            raise BadInput(f"{file} in {source.path} must have the {size:,} tokens of {self.name}, got {given}")

    def vocabulary(self) -> list[str]:
        """All words, most frequent first."""
        return self.prepared.array("train", "words").tobytes().decode().split("\n")

    def codec(self) -> dict[str, Any]:
        words = self.vocabulary()
        unknown = words.index("<unk>") if "<unk>" in words else None
        lines = {"replace": [("\n", f" {EOS} ")]}
        return {"form": "words", "symbols": words, "unknown": unknown, "knows_unknown": unknown is not None, **lines}


def _wikitext(name: Literal["wikitext-2", "wikitext-103"], md5: str) -> Remote:
    addresses = ("https://wikitext.smerity.com/", "https://s3.amazonaws.com/research.metamind.io/wikitext/")
    return Remote(f"{name}-v1.zip", tuple(f"{address}{name}-v1.zip" for address in addresses), f"md5:{md5}")


@register("wikitext-103")
class WikiText103(_WikiText):
    summary: ClassVar[str] = "the next word of Wikipedia's good articles, 103 million"
    origin: ClassVar[str] = "download, 190 MB"
    archive: ClassVar[Remote] = _wikitext("wikitext-103", "9ddaacaf6af0710eda8c456decff7832")
    sizes: ClassVar[dict[str, int]] = {"train": 103_227_021, "valid": 217_646, "test": 245_569}
    symbols: ClassVar[int] = 267_735


@register("wikitext-2")
class WikiText2(_WikiText):
    summary: ClassVar[str] = "the next word of Wikipedia's good articles, 2 million"
    origin: ClassVar[str] = "download, 4 MB"
    archive: ClassVar[Remote] = _wikitext("wikitext-2", "542ccefacc6c27f945fb54453812b3cd")
    sizes: ClassVar[dict[str, int]] = {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    symbols: ClassVar[int] = 33_278
