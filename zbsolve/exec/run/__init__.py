"""A whole job: ranks are started, train a model by name, and leave a trace."""
