"""HTTP/2 by an engine of our own: `frames` and `link` speak it, `heads` reads it; `requests` judge each stream, `responses`
answer it, `lanes` end it, and `traffic` moves what waits.

Why not mitmproxy's HTTP/2 layers: they have no back-pressure (a slow reader of 400 MB took 507 MB), and stand on hyper-h2.
Why not hyper-h2 itself: it ends the connection for a wrong length in one message and for one stream too many, and once it has
read or written a GOAWAY it can send nothing more, which cuts what an origin that drains is still delivering; it has no measure
against floods (a test keeps these facts). Around it a second reader of frames would be needed that sees more than it does.
hpack, on which both stand, does the compression; hyper-h2 is the peer that the tests hold us against, at both ends. Everything
that judges (binding, decision, refusal, exchange, addon) is what HTTP/1 has.
"""
