"""Random numbers that are the same bytes on every machine, with every version of numpy.

numpy promises this of its bit generators, not of what is made from them (``standard_normal`` may change between
versions, and ``log`` differs in the last bit between processors). So everything here is made of raw bits and of the
operations that IEEE 754 defines exactly: + − × ÷ √.
"""

import hashlib
import math

import numpy as np

Shape = int | tuple[int, ...]


class Stream:
    """A stream of random numbers for a key: ``Stream("listops", seed, "train", block)``.

    Streams with different keys are independent, so that work can be cut into blocks and shared among processes without
    any effect on the result.
    """

    def __init__(self, *key: str | int):
        digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
        self._bits = np.random.Philox(key=int.from_bytes(digest, "little"))

    def raw(self, shape: Shape) -> np.ndarray:
        """64 random bits each, uint64."""
        return self._bits.random_raw(math.prod(_as_tuple(shape))).reshape(shape)

    def uniform(self, shape: Shape, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """Real numbers in [low, high), float64."""
        return low + (high - low) * ((self.raw(shape) >> np.uint64(11)) * 2.0**-53)

    def integers(self, high: int, shape: Shape) -> np.ndarray:
        """Whole numbers 0 … high − 1, int64. The bias is below high / 2³²."""
        return ((self.raw(shape) >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """0 … count − 1 in random order, int64."""
        return np.argsort(self.raw(count), kind="stable")


def _as_tuple(shape: Shape) -> tuple[int, ...]:
    return shape if isinstance(shape, tuple) else (shape,)


def normal_of_bits(bits: np.ndarray) -> np.ndarray:
    """Standard normal numbers from 64 random bits each: Φ⁻¹ of the uniform number in the middle of its cell.

    Φ⁻¹ is Acklam's rational approximation, relative error 1.2e-9: one function of p − ½ in the middle, one of
    √(−2 log p) in the tails.
    """
    p = ((bits >> np.uint64(12)) + 0.5) * 2.0**-52  # never 0, never 1
    q = p - 0.5
    r = q * q
    result = q * _polynomial(_MIDDLE, r) / _polynomial(_MIDDLE_BELOW, r)
    low, high = p < _TAIL, p > 1 - _TAIL
    for tail, sign in ((low, 1.0), (high, -1.0)):
        t = np.sqrt(-2 * _log(p[tail] if sign > 0 else 1 - p[tail]))
        result[tail] = sign * _polynomial(_TAILS, t) / _polynomial(_TAILS_BELOW, t)
    return result


_TAIL = 0.02425
_MIDDLE = (-3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02, 1.383577518672690e02,
           -3.066479806614716e01, 2.506628277459239e00)  # fmt: skip
_MIDDLE_BELOW = (-5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02, 6.680131188771972e01,
                 -1.328068155288572e01, 1.0)  # fmt: skip
_TAILS = (-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00, -2.549732539343734e00,
          4.374664141464968e00, 2.938163982698783e00)  # fmt: skip
_TAILS_BELOW = (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0)


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def _log(x: np.ndarray) -> np.ndarray:
    """The logarithm of positive numbers in exact operations: x = m·2ᵉ, log m = 2·artanh((m − 1) / (m + 1))."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, 2 * mantissa, mantissa)  # in [√½, √2), so |s| < 0.172
    exponent = exponent - small
    s = (mantissa - 1) / (mantissa + 1)
    square, series = s * s, np.zeros_like(s)
    for power in range(23, 0, -2):
        series = series * square + 1.0 / power
    return exponent * 0.6931471805599453 + 2 * s * series
