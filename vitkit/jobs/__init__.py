"""Rooms joined: what a command does when it needs several rooms.

What does not belong here: anything one room can do alone, and anything about argv or HTTP.
"""
