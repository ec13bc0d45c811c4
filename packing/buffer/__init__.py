"""Turns in, one copy to the device, one packed batch out.

`TrajectoryBuffer` validates trajectories (`chains`), stores each token once in pinned staging
memory (`staging`), maintains the run table (`tables`) and launches the kernels that write a batch
(`writing`). `StaticBatch` keeps fixed capacities for CUDA graphs; `pack_resident` packs tokens that
are on the device already.
"""
