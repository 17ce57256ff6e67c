"""The same work on many machines: a plan of shards, a folder of results with its manifest, and Ray, which runs it.

What does not belong here: another way to decode, to compute or to measure; actors call the same rooms as one machine.
Only `on_ray.py` imports Ray, and only jobs import this room.
"""
