import sys
import urllib.request

sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())
