"""Going on with a run that ended before its time.

    request.py      what `--resume` asks for: which run, and with which options
    identity.py     what has to stay the same
    checkpoints.py  the newest checkpoint that is good, and why others are not
    start.py        where the run goes on, and its folder brought back to there
    mending.py      its files, cut back and mended

`request.py` and `identity.py` import no torch.
"""
