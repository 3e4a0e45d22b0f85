"""What goes over sockets: the control messages and their framing. Knows nothing of the rest."""
