"""`egressd verify`, its inside half: the probes that try the boundary from within a sandbox.

It is sent into the sandbox as one program (`bundle`) and runs there on whatever Python 3 the sandbox has: standard library
alone, nothing newer than Python 3.8. No probe changes anything that it could not change back: where a boundary does not
hold, the probe meets the operator's own machine.
"""
