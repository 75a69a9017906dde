"""Who reads and writes what: one table, from which grants, pages and the doctor's questions are made."""
