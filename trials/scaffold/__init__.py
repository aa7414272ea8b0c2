"""The scripts of a scaffolded workspace, templates that `agent/scaffold.py` fills in."""
