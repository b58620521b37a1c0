"""What the project promises of its reliability, tried on this machine and counted.

    __main__.py  the command
    case.py      what a chapter is, and a case of one; running them
    scene.py     a small corpus, tiny runs in processes of their own, and when two runs are equal
    disturbed.py the training program, with something done to its disk on the way

One file a chapter, in the order of docs/reliability.md; `chapters.py` lists them.
"""
