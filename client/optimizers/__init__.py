"""What an optimizer keeps and does, found by looking and by experiment."""
