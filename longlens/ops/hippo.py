"""The HiPPO-LegS matrix (Gu et al. 2020), with which a state holds the whole past as Legendre coefficients.

    x'(t) = A·x(t) + B·u(t),   A[n, k] = -√(2n+1)·√(2k+1) for n > k, -(n+1) for n = k, 0 for n < k,   B[n] = √(2n+1)

A is normal up to a matrix of rank one (Gu, Goel & Ré 2022): A = S - ½·I - P·Pᵀ, S skew-symmetric and P[n] = √(n+½).
"""

import torch
from torch import Tensor


def hippo_legs(
    n: int, *, device: torch.device | str | None = "cpu", dtype: torch.dtype | None = torch.float64
) -> tuple[Tensor, Tensor]:
    """The matrix A (n, n) and the input vector B (n,), by default in float64 on the CPU."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    order = torch.arange(n, device=device, dtype=dtype)
    root = torch.sqrt(2 * order + 1)
    return -torch.tril(torch.outer(root, root), diagonal=-1) - torch.diag(order + 1), root


def dplr_legs(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in the basis where it is diagonal plus low rank: Λ, P, B' (n/2,) and V (n, n/2), complex128 on the CPU,

        A = V·Λ·V* + c.c. - p·pᵀ,   p = V·P + c.c.,   B = V·B' + c.c. = √2·p,   Λ = diag(-½ + i·ω)

    Eigenvalues come in conjugate pairs ("c.c."), of which this is the half with positive ω, in ascending order. The
    free phase of each eigenvector is the one that makes its P and B' real and positive.
    """
    if n < 2 or n % 2:
        raise ValueError(f"n must be an even number of at least 2, for conjugate pairs, got {n}")
    a, b = hippo_legs(n)
    low_rank = b * 0.5**0.5
    skew = a + torch.outer(low_rank, low_rank) + 0.5 * torch.eye(n, dtype=a.dtype, device="cpu")
    frequencies, vectors = torch.linalg.eigh(-1j * skew)  # Hermitian, hence orthonormal eigenvectors
    frequencies, vectors = frequencies[n // 2 :], vectors[:, n // 2 :]
    phases = vectors.mH @ low_rank.to(vectors.dtype)
    p = phases.abs()
    vectors = vectors * (phases / p)
    return torch.complex(torch.full_like(frequencies, -0.5), frequencies), p + 0j, 2**0.5 * p + 0j, vectors


def clip_inputs(b: Tensor, vectors: Tensor) -> Tensor:
    """B' of ``dplr_legs`` with an imaginary part of at most 2, in the official code's phases, in which the
    first entry of an eigenvector is real (as LAPACK returns it) and those of B' that are large almost imaginary."""
    phases = vectors[0] / vectors[0].abs()
    turned = phases * b
    return phases.conj() * torch.complex(turned.real, turned.imag.clamp(-2, 2))
