"""Causal attention and a GPT block stack: what the study `attention` compiles, runs and compares.

`spellings.py` and `gpt.py` hold the programs, `peers.py` the other libraries, `cases.py` which comparisons there are,
`measuring.py` how one is made, `memory.py` what may be run at all, `report.py` the table and the chart.
"""
