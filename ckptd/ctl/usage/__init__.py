"""How `ckptctl` is used: examples in its help, completion in shells, and answers that are shown again."""
