"""What training depends on and no snapshot has: it is found in the first steps, and named."""
