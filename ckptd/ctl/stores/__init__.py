"""Commands about checkpoints in object storage: which store, and what is read, checked and changed there."""
