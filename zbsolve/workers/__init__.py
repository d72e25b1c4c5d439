"""Workers for independent tasks: processes of this machine, or a Dask cluster. Tasks and answers are lines of text."""
