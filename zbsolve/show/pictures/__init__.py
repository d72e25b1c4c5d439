"""Still pictures for papers and slides: schedules, their memory, comparisons and frontiers. Each is a drawing, which is
written as SVG, PDF or PNG."""
