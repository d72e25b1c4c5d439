"""Models as the planner sees them: by shape, or as a profile measured them."""
