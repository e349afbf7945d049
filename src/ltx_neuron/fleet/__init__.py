"""Many chips on many machines: Ray runs replicas of the engine; a durable queue stores the jobs."""
