"""What a policy would cost a job that is described by numbers, and which one to take. Pure."""
