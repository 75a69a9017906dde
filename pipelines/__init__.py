"""What is compiled and submitted: the run file, the graph, its targets, the planner and the command line."""
