"""The law: pure functions from rules and attempts to decisions."""
