"""The control protocol: messages and their framing."""
