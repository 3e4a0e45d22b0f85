"""What goes to storage, and when."""
