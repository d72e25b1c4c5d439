"""Where independent tasks run: in processes of this machine, or on a Dask cluster. Tasks and answers are lines of text."""
