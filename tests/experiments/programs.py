"""Every program, by its module in `experiments`."""

PROGRAMS = (
    "train",
    "generate",
    "compare",
    "overhead",
    "report.__main__",
    "trace.__main__",
    "dashboard.__main__",
    "benchmark.__main__",
    "selftest.__main__",
)
