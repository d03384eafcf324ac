"""The moves of `egressd demo`, the actors that make them, and what counts what they sent.

Everything is made with real clients by one driver program, first without egressd and then in a sandbox. What must come of a
move is not known here: the verb asks the rules themselves and compares.
"""
