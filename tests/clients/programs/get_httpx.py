import sys

import httpx

sys.stdout.write(httpx.get(sys.argv[1], timeout=30).raise_for_status().text)
