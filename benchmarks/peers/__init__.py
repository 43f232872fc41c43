"""Merge the same checkpoints with unshard and with every other tool, and compare what it takes.

    make bench-peers
    make bench-peers PEERS="cells --size 0.5b --ranks 4 --rounds 1"

`environments` installs the tools, `checkpoints` writes the `cells` that they merge, `contenders`
says how each is called, `measure` runs them in turns, and `growth` runs unshard alone on more and
more. Both add to results.json, and `report` and `charts` make the documents from it.
"""
