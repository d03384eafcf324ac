"""Approvals: what sandboxes ask people for, what people say, and what follows of it. Control alone gives grants."""
