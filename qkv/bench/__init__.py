"""What `qkv bench` runs: measurements through qkv.KVManager and qkv.ops, next to baselines in the same process.

rows.py     the row that every measurement writes      timing.py     interleaved rounds, medians, straight lines
reading.py  how fast this machine reads bytes          baselines.py  torch's attention, the fastest way to call it
data.py     K and V: made up, or captured from a model oracle.py     float64 attention over the same values
decode.py, prefill.py, seal.py, model.py  the four suites; report.py and commands.py (typer, rich)
errors.py, divergence.py  what rounding does to attention, and to the answers of a model
"""
