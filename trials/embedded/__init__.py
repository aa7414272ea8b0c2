"""The embedded workspace: the user's task in miniature, small enough to train on a laptop's CPU."""
