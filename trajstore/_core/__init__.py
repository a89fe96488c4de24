"""A store on one disk: what a buffer writes, reads, samples and feeds. Imports nothing that surrounds it."""
