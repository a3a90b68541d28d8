from support.data import home, real_data  # noqa: F401 (fixtures)
