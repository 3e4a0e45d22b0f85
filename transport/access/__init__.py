"""Who may connect, and stay connected."""
