"""From where a job resumes, and from whom each rank gets its snapshots."""
