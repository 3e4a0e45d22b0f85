"""What an optimizer keeps and does, found by inspection and by experiment."""
