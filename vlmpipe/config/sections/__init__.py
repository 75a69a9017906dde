"""The sections of a run file that vlmpipe itself reads, one module each."""
