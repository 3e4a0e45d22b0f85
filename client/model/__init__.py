"""What is trained, as a snapshot sees it: operators, names, optimizers, replicated and sharded tensors."""
