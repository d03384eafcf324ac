"""A small internet in network namespaces of its own: origins, DNS, an attacker, a metadata endpoint.

`egressd demo` and the end-to-end tests stand in it. Nothing in it reaches the machine's own network.
"""

from egressd.lab.lab import Lab, LabError, clean_env
from egressd.lab.sightings import Flow, Hit, SeenQuery, SeenRequest

__all__ = ["Flow", "Hit", "Lab", "LabError", "SeenQuery", "SeenRequest", "clean_env"]
