import sys

import requests

response = requests.get(sys.argv[1], timeout=30)
response.raise_for_status()
sys.stdout.write(response.text)
