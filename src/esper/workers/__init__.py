"""Workers: jobs that run here, in processes or on a Ray cluster."""
