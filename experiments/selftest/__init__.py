"""What the project promises of its reliability, tried on this machine and counted.

    __main__.py            the command
    chapters.py            all chapters, in their order

One file a chapter:

    resume.py              a run that was cut and goes on
    kills.py               signals at any moment
    disks.py               disks that are full, read-only, slow, failing or gone
    damage.py              damaged, foreign and hostile checkpoints
    damaged_runs.py        the other files of a run, damaged; the chapter is called `runs`
    numbers.py             NaN, infinities and losses far too high
    configs.py             configs that are wrong in any way
    data.py                text that is unreadable, changed or large
    properties.py          what holds of every MoE layer
    endurance.py           twenty thousand steps
    together.py            two at once
    offline.py             no network

What they need:

    case.py                what a chapter is, and a case of one; trying a case
    scene.py               a small corpus, and tiny runs in processes of their own or in this one
    same_run.py            when two runs came to the same
    rank_group.py          several ranks, which train what they are told to
    finished_run.py        a finished run, of which cases damage a copy
    checkpoint_damages.py  what is done to a checkpoint
    config_fields.py       every field of a config, and what it must not be given
    faults.py              numbers that break in one batch of a fit
    killed_inside.py       the training program, with a signal at the worst moment
    disturbed.py           the training program, with something done to its disk
"""
