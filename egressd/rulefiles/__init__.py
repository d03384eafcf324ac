"""YAML files → policy: strict reading, every problem with its place, the files' own tests, explanations."""
