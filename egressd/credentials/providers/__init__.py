"""Sources of credentials, one file each, imported only where credentials.yaml names one."""
