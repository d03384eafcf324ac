"""The command line: one file for each verb, each loaded only when it is called."""
