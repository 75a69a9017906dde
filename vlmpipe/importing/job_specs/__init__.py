"""Job specs: their corrections, and what a run file takes from them."""
