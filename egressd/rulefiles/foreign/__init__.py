"""Allowlists of other programs, read into what a profile of ours can say, and what it cannot said line by line."""
