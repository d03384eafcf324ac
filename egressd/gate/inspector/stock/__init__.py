"""What a stock mitmproxy needs to be told, and has to be kept from: all of `addons/egress.py` that is not a hook.

mitmproxy's switches can open, skip or rewrite requests behind an addon's back, so all that could is held at one value
(`options`); and it lacks ways to say some things, so they are said here. Nothing of this is used by the engine.
"""
