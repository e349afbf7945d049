"""Many chips on many machines: Ray runs replicas, the queue owns the jobs."""
