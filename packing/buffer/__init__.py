"""`TrajectoryBuffer`: trajectories in, one copy to the device, one packed batch out.

The buffer validates trajectories (`chains`; `breaks` says why one begins) and stores each token
once in pinned memory (`staging`). `pack` makes the tables of a batch (`tables`) and launches the
kernels (`buffer`): a batch has all its columns. `pack_resident` packs tensors of the device.
"""
