"""egressd: the only route out of a sandbox."""
