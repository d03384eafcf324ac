"""TLS ended by the worker: the hello is judged first, then a leaf is minted and the stream opened."""
