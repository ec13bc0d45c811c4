"""What trajpack costs, beside what others cost for the same job, in one run.

A package, so that `benchmarks` never means a folder of that name that another project installs.
"""
