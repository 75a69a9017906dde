"""Features that a run file may ask for: each is a room here and a line in `trainer/hooks/table.py`."""
