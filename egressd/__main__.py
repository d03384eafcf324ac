"""`python -m egressd`: the command line."""

from egressd.cli.main import main

main()
