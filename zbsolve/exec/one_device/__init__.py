"""All ranks of a schedule in one process, in turns."""
