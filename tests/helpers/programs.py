"""Every program, by its module in `experiments`."""

PROGRAMS = (
    "train",
    "generate",
    "compare",
    "overhead",
    "report",
    "trace",
    "dashboard",
    "benchmark.__main__",
)
