"""The bodies of the API, as pydantic models and nothing else."""
