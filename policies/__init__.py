"""Data only: ``*.toml`` (knobs, bounds, rules) and ``*.md`` (what the owner tells the model)."""
