"""How `ckptctl` is used: the examples in its help, and answers that are shown again and again."""
