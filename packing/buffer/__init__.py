"""`TrajectoryBuffer`: trajectories in, one copy to the device, one packed batch out.

The buffer validates trajectories (`chains`; `breaks` says why one begins), stores each token once
in pinned memory (`staging`), maintains the tables of a batch (`tables`) and launches the kernels
that write it (`buffer`). `pack_resident` packs tensors that are on the device.
"""
