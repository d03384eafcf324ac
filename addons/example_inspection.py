"""An example of a site's own inspection: no request may carry what looks like somebody's access key in its URL or fields.

Use it as `inspect: {addons: [/etc/egressd/inspection.py]}` in egressd.yaml; addons/README.md says what an addon may do. The
keys that egressd attaches itself go on after this, so they are never seen here.
"""

import re

from mitmproxy import http

LOOKS_LIKE_A_KEY = re.compile(
    rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    rb"|\bgh[pousr]_[0-9A-Za-z]{36}\b"  # GitHub
    rb"|\bxox[abprs]-[0-9A-Za-z-]{20,}"  # Slack
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
EXPECTED = frozenset({b"authorization", b"x-api-key"})
"""Where a client's own key belongs; the rules say which hosts it can reach."""


class NoKeys:
    """Refuses; changes nothing."""

    name = "no-keys"

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Look at the target and at every field in which no key belongs."""
        data = flow.request.data
        values = [value for field, value in data.headers.fields if field.lower() not in EXPECTED]
        if any(LOOKS_LIKE_A_KEY.search(text) for text in (data.path, *values)):
            flow.response = http.Response.make(403)  # that it is set refuses; egressd writes its own page

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Say in a field of its own that somebody looked."""
        assert flow.response is not None
        flow.response.headers["x-inspected-by"] = "no-keys"


addons = [NoKeys()]
