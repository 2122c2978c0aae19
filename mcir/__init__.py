"""Memory-Centric IR: tiles, streams, online reductions, rematerialization, buffer lifetimes.

Reserved for the second milestone (see docs/design); it holds no code yet.
"""
