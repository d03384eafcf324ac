"""The journal: one JSON record for every attempt, and one when it ends."""
