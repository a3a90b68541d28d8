"""A cache folder of its own for each test."""

from support.data import home  # noqa: F401
