"""Mistakes that attention kernels have: a right kernel whose steps can be replaced, the wrong steps, and what to look
for in the result of a kernel that failed.
"""
