"""Jobs on this machine: replicas as processes, restarts, fault injection."""
