"""libawqd.so.1 lies beside this file; awqd loads it."""
