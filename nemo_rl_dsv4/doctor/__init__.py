"""Whether machines are fit for a run.

`node` says what a node is, `gpus` what its vendor's tools print, `rules` what is wrong; `cluster` asks every node of a
Ray cluster.
"""
