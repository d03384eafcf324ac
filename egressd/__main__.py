"""`python -m egressd`: the command line."""

from egressd.cli.entry import main

main()
