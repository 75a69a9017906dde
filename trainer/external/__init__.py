"""Runs a training program of the user's own (`train.trainer`) and judges what it leaves."""
