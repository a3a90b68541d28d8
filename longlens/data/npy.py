"""Arrays in .npy files: written piece by piece, and read with care, as a file may be damaged or not what it says."""

import math
import os
import struct
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longlens.errors import BadInput
from longlens.options import shorten

HEADER = 128  # bytes, with room for any length


class NpyWriter:
    """A .npy file that grows along its first axis; its header is written last.

    The header is spelled out here, as the checksums of a set must not depend on the version of numpy.
    """

    def __init__(self, path: Path, first: np.ndarray):
        self.file: BinaryIO = path.open("wb")
        self.file.write(bytes(HEADER))
        self.dtype = first.dtype
        self.tail = first.shape[1:]
        self.length = 0

    def append(self, piece: np.ndarray) -> None:
        if piece.dtype != self.dtype or piece.shape[1:] != self.tail:
            raise ValueError(f"a piece of {piece.dtype} {piece.shape[1:]} after pieces of {self.dtype} {self.tail}")
        self.file.write(np.ascontiguousarray(piece).data)
        self.length += len(piece)

    def close(self) -> list[int]:
        """Write the header, and bring the file to the disk. Returns its shape."""
        shape = (self.length, *self.tail)
        facts = repr({"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape})
        text = facts.encode().ljust(HEADER - 11) + b"\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return list(shape)


def map_npy(file: BinaryIO) -> np.ndarray:
    """The array of an opened .npy file, memory-mapped and read-only. BadInput if it is not one of plain values."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings(action="ignore"):  # of Python 2
            shape, is_fortran, dtype = read(file)
        if dtype.hasobject or dtype.itemsize == 0 or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"it has {dtype} {shape}")
    except Exception as error:  # numpy reads the header as Python, and what is written there may raise anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"it is not a .npy file of plain values ({shorten(first)})") from None
    start = file.tell()
    there = os.fstat(file.fileno()).st_size - start
    if math.prod(shape) * dtype.itemsize != there:
        raise BadInput(f"its header says {dtype} {shorten(shape)}, and {there:,} bytes follow, which is not that")
    return np.memmap(file, dtype, "r", start, shape, "F" if is_fortran else "C")
