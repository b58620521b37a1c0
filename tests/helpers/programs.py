"""Every program, by its module in `experiments`."""

PROGRAMS = (
    "train",
    "generate",
    "compare",
    "sweep",
    "overhead",
    "report",
    "trace",
    "inspect",
    "dashboard",
    "benchmark.__main__",
)
