"""One-sided transfers over registered memory, and the fabric that carries them over ZeroMQ."""
