"""The process from which trainers are forked: what it imports ahead, and how a host talks to it."""
