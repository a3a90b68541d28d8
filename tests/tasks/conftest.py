"""A cache folder of its own for each test, and the real data of ../shared where it is."""

from support.data import home, real_data, real_home  # noqa: F401
