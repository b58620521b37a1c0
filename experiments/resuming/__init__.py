"""Going on with a run that ended before its time.

    request.py      what `--resume` asks for: which run, and with which options
    identity.py     what a checkpoint says of its run, and what of it has to stay the same
    run_record.py   what the run has written down of itself, by which its checkpoints are told from others
    checkpoints.py  the newest checkpoint that is good, and why others are not
    start.py        where the run goes on, and its folder brought back to there
    repair.py       its files, cut back and repaired

What is checked of a checkpoint before anything is touched:

    weights.py          the weights, and whether they are of this run
    training_state.py   all else that training goes on from: step, loops, and the two below
    optimizer_state.py  moments and step counts
    callback_states.py  what callbacks and the step guard remember
    value_checks.py     single values: types, shapes, finite numbers

`request.py`, `identity.py` and `run_record.py` import no torch.
"""
