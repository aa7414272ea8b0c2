"""The overlay: one block appended to a workspace's copy of verl's ``core_algos.py``, and its installer.

Modules
-------
``configuration``  the knobs, their off values and ranges, parsing and validation (standard library only)
``control``        state that lives in one training process: counters, entropy estimate, adaptive weights
``losses``         the parts of the policy loss, pure torch
``install``        render, append, inspect, check and revert the block (standard library only)

Importing this package, ``configuration``, ``control`` or ``install`` loads neither torch nor verl.
"""
