"""What may vary: typed search spaces in YAML, and presets named after their papers."""
