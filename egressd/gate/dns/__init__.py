"""DNS: what a sandbox may ask and is told (gatekeeper), and how a name is resolved for a dial (upstream)."""
