"""Every program, by its module in `experiments`."""

PROGRAMS = (
    "train",
    "generate",
    "evaluate",
    "compare",
    "sweep",
    "study_page",
    "overhead",
    "report",
    "trace",
    "inspect",
    "convert",
    "dashboard",
    "benchmark.__main__",
)
