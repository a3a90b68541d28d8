"""Texts as sequences of characters or bytes, without a loop over either."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SPECIALS = ("<pad>", "<unk>", "<eos>")
PAD, UNK, EOS = range(3)
UNICODE = 0x110000


class Encoded(NamedTuple):
    values: np.ndarray  # (total,) code points or bytes
    lengths: np.ndarray  # (N,)


def code_points(texts: Sequence[str]) -> Encoded:
    """The characters of all texts, one after another."""
    joined = "".join(texts)
    return Encoded(np.frombuffer(joined.encode("utf-32-le"), "<u4"), np.array([len(t) for t in texts], dtype=np.int64))


def utf8(texts: Sequence[str]) -> Encoded:
    """The bytes of all texts, one after another."""
    encoded = [text.encode() for text in texts]
    return Encoded(np.frombuffer(b"".join(encoded), np.uint8), np.array([len(t) for t in encoded], dtype=np.int64))


def frequent(counts: np.ndarray, min_count: int) -> list[str]:
    """A vocabulary: the special tokens, and the characters that occur ``min_count`` times, most frequent first."""
    kept = np.flatnonzero(counts >= max(min_count, 1))
    return [*SPECIALS, *(chr(c) for c in kept[np.argsort(-counts[kept], kind="stable")])]


def look_up(characters: np.ndarray, symbols: Sequence[str]) -> np.ndarray:
    """Token ids of characters; those that are not in the vocabulary are unknown."""
    dtype = np.uint8 if len(symbols) <= 256 else np.uint16 if len(symbols) <= 65536 else np.int32
    table = np.full(UNICODE, UNK, dtype=dtype)
    table[[ord(symbol) for symbol in symbols[len(SPECIALS) :]]] = np.arange(len(SPECIALS), len(symbols))
    return table[characters]


def shown(ids: np.ndarray, symbols: list[str]) -> str:
    """The text again; unknown characters as �."""
    return "".join("" if i in (PAD, EOS) else "�" if i == UNK else symbols[i] for i in ids.tolist())


def shown_bytes(ids: np.ndarray) -> str:
    """The text again, of ids that are bytes after the special tokens."""
    return bytes(i - len(SPECIALS) for i in ids.tolist() if i >= len(SPECIALS)).decode(errors="replace")
