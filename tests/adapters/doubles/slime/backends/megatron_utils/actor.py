from .initialize import init  # noqa: F401  (by value)
