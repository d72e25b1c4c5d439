"""Lower bounds in closed form that hold for every schedule, and the necessary arcs that all bounds rest on."""
