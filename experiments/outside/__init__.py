"""Code from outside the package: classes that a `type` names in somebody's own file or module.

    tags.py       the parts of a config that come from outside, and its options with such types rewritten
    recorded.py   a run's copy of that code, `code/`, and what is known of where it came from, `code.json`
    trust.py      whose code a run's folder may run
    contract.py   each part tried once before training: shapes, types, and whether it sees the future

All but `contract.py` import no torch.
"""
