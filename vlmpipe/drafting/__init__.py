"""Run files drafted from data: what a folder holds, and the run file that fits it."""
