"""One training run as a process: script, guard, log, checkpoints, and Ray Tune's view of it."""
