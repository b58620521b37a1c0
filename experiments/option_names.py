"""What was meant by the name of an option that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from experiments.option_tree import Option, members_of

ALSO_CALLED = {
    "bs": "batch_size",
    "clip": "gradient_clip_val",
    "dataset": "corpus",
    "device": "accelerator",
    "dtype": "precision",
    "epochs": "max_steps",
    "experts": "num_experts",
    "gpus": "devices",
    "grad_accum": "accumulate_grad_batches",
    "heads": "num_heads",
    "hidden_size": "d_model",
    "iters": "max_steps",
    "layers": "num_layers",
    "lr": "learning_rate",
    "max_epochs": "max_steps",
    "output": "output_dir",
    "steps": "max_steps",
    "top_k": "k",
    "warmup": "warmup_fraction",
    "wd": "weight_decay",
}
"""What other programs and papers call an option -> the last part of its path here."""

MAX_NAMED = 3
"""Of more options than this that might be meant, the first are named."""


def same_name(typed: str, tree: Option, prefix: str = "") -> str:
    """`"; did you mean 'optimizer.learning_rate'?"` for `trainer.learning_rate`, or for `lr`.

    The empty string where no option of the chosen types is called that.

    Args:
        typed: the path that is no option.
        prefix: before each path in the answer.
    """
    return _ask(_same_name(typed, [option.path for option in tree.everything()]), prefix)


def did_you_mean_option(typed: str, tree: Option, prefix: str = "") -> str:
    """The same where an option of another type is called that, or one that looks like it."""
    here = [option.path for option in tree.everything()]
    found = (
        _same_name(typed, here)
        or _same_name(typed, _of_other_types(tree))
        or _similar_name(typed, here)
    )
    return _ask(found, prefix)


def belongs_to_another_type(typed: str, tree: Option) -> str:
    """Which types of its section know the last part of this path; the empty string where none does."""
    path, _, name = typed.rpartition(".")
    section = tree.find(path) if path else None
    if section is None or section.family is None:
        return ""
    members = members_of(section.family)
    types = [
        type_ for member in members if name in member.known_keys() for type_ in members[member]
    ]
    if not types:
        return ""
    chosen = section.value["type"] if isinstance(section.value, Mapping) else section.value
    named = " or ".join(f"'{type_}'" for type_ in types[:MAX_NAMED])
    return f"unknown with {path}.type '{chosen}'; it belongs to type {named}: add --{path}.type {types[0]}"


def _ask(paths: Sequence[str], prefix: str) -> str:
    named = " or ".join(f"'{prefix}{path}'" for path in paths[:MAX_NAMED])
    return f"; did you mean {named}?" if named else ""


def _same_name(typed: str, paths: Iterable[str]) -> list[str]:
    """The paths that end as `typed` does: those that have most of it, and of them the shortest first."""
    *above, name = typed.replace("-", "_").split(".")
    names = (name, ALSO_CALLED.get(name))
    found = [path for path in dict.fromkeys(paths) if path.rpartition(".")[2] in names]
    common = {path: _num_common(above, path.split(".")[:-1]) for path in found}
    most = max(common.values(), default=0)
    return sorted((p for p in found if common[p] == most), key=lambda path: path.count("."))


def _similar_name(typed: str, paths: Sequence[str]) -> list[str]:
    above, _, name = typed.replace("-", "_").rpartition(".")
    names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    near = difflib.get_close_matches(name, names, n=1)
    return _same_name(f"{above}.{near[0]}", paths) if near else []


def _num_common(above: Sequence[str], of_path: Sequence[str]) -> int:
    """How many parts of a path, from its end, are the same."""
    count = 0
    for one, other in zip(reversed(above), reversed(of_path), strict=False):
        if one != other:
            break
        count += 1
    return count


def _of_other_types(tree: Option) -> list[str]:
    """The options of the types that are not chosen, where they would stand."""
    return [
        option.path
        for section in tree.everything()
        if section.family is not None
        for member in members_of(section.family)
        for option in section.options_of(member)
    ]
