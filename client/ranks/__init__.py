"""How the ranks of a job agree, wait for each other, and notice that one is gone."""
