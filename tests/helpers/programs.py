"""Every program, by its module."""

PROGRAMS = (
    "moe_ffn.cli.train",
    "moe_ffn.cli.generate",
    "moe_ffn.cli.evaluate",
    "moe_ffn.cli.compare",
    "moe_ffn.cli.sweep",
    "moe_ffn.cli.study_page",
    "experiments.overhead",
    "moe_ffn.cli.report",
    "moe_ffn.cli.trace",
    "moe_ffn.cli.inspect",
    "moe_ffn.cli.convert",
    "moe_ffn.cli.dashboard",
    "experiments.benchmark.__main__",
)


def python_words(program: str) -> list[str]:
    """Return the words after `python` that run the program of a module."""
    return ["-m", *program.replace("moe_ffn.cli.", "moe_ffn.cli ").split()]
