"""The race of a space's layouts: which is searched next, and for how long."""
