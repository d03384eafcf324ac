"""Credentials that the sandbox never holds: the broker and its sources in control; attaching, signing and masking in a worker."""
