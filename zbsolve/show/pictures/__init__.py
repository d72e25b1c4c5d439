"""Still pictures of schedules, their memory, comparisons and frontiers: drawings, written as SVG, PDF or PNG."""
