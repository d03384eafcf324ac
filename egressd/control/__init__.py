"""Control: the trusted process that holds keys, rules and journal and starts the workers."""
