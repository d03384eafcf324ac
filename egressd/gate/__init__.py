"""The worker: one unprivileged process that parses hostile bytes and carries them where the law allows."""
