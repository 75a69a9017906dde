"""A training program's checkpoints: found by their form, copied under the commit protocol from every node, resumed."""
