"""The trained model as a snapshot sees it: operators, names, replicated and sharded tensors, layouts."""
