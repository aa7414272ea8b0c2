"""The story: what a run does, from workspace to submission."""
