"""Records and replays rollouts of other trainers, through their public extension points.

Each module serves one trainer, and imports it only where its functions are called. Import modules by their own names.
"""
