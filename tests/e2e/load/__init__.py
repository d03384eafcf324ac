"""The load of `test_mixed`: a program of its own, run inside a sandbox by whatever Python is there."""
