"""Tokens behind tokens, without a copy of all of them for each one: the keys and values of a text that grows."""

import threading

import torch
from torch import Tensor

_TAKING = threading.Lock()


def grow(past: Tensor, new: Tensor) -> Tensor:
    """``torch.cat([past, new], dim=-2)``: (..., n, d) and (..., m, d) -> (..., n + m, d).

    In decoding, where no gradient is wanted, the result is the begin of a tensor with room for as many tokens again,
    into which the next ones are written. ``past`` stays as it is: room is taken only once, by the first that goes on
    from it, and whoever else does so gets a copy.
    """
    alike = past.dtype == new.dtype and _around(past) == _around(new)  # otherwise torch.cat promotes, or refuses
    other_mode = torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    if other_mode or not alike:
        return torch.cat([past, new], dim=-2)
    length = past.shape[-2] + new.shape[-2]
    room = past._base
    with _TAKING:  # or two threads could take the same room
        if room is not None and _is_free(room, past, length):
            room.filled = length  # pyright: ignore[reportAttributeAccessIssue]
        else:
            room = None
    if room is None:
        room = past.new_empty(*past.shape[:-2], 2 * length, past.shape[-1])
        room[..., : past.shape[-2], :] = past
        room.filled = length  # pyright: ignore[reportAttributeAccessIssue]
    room[..., past.shape[-2] : length, :] = new
    return room[..., :length, :]


def _is_free(room: Tensor, past: Tensor, length: int) -> bool:
    """Whether ``past`` is all that was written into a tensor of ours so far, and so many tokens fit into it."""
    begins = past.data_ptr() == room.data_ptr() and past.stride() == room.stride()
    fits = room.ndim == past.ndim and _around(room) == _around(past) and length <= room.shape[-2]
    return getattr(room, "filled", None) == past.shape[-2] and begins and fits


def _around(x: Tensor) -> tuple[int, ...]:
    """The shape without the number of tokens."""
    return (*x.shape[:-2], x.shape[-1])
