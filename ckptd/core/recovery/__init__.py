"""Recovery plans: the iteration at which a job resumes, and the sources of each rank's snapshots."""
