"""`kvtier demo`: long documents that no longer fit into GPU memory come back from host memory.

`workload` says what is asked, `modes` runs it on the small engine, `witness` compares bytes, `report` shows figures.
"""
