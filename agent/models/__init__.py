"""Models small enough for tests and demonstrations on a CPU, and the loading of a given one."""
