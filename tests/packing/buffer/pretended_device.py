"""A model of a CUDA device without one: its work is queued, and done only when it is waited for.

It models what the guards of host memory rest on. A copy reads host memory late, and in two
steps. A graph that captured a copy reads the host memory at every replay. An event is an error in a
capture, since nothing outside the graph may wait for it. Kernels are not modelled.
"""

from collections import deque
from contextlib import contextmanager, nullcontext

import torch


class PretendedEvent:
    def __init__(self, device):
        self.device = device
        self.pending, self.queue = 0, device.queue

    def record(self, stream):
        assert stream is self.device, "events are recorded on the current stream"
        assert self.device.graph is None, "an event of a capture cannot be waited for outside"
        self.queue = self.device.queue
        self.device.launch([self])

    def query(self):
        return not self.pending

    def synchronize(self):
        assert self.device.graph is None, "a wait would end the capture"
        while self.pending:
            self.device.advance(queue=self.queue)


class PretendedGraph:
    def __init__(self, device):
        self.device, self.steps = device, []

    def replay(self):
        self.device.launch(self.steps)


class PretendedDevice:
    """Two streams of a device; patches the parts of torch that enqueue work or wait for it."""

    def __init__(self, patch):
        self.queue, self.side = deque(), deque()
        self.graph = None
        self.copy, self.empty = torch.Tensor.copy_, torch.empty

        def copy_(target, source, non_blocking=False):
            return self.sent(target, source, non_blocking)

        def to(words, _, non_blocking):
            return self.sent(torch.zeros_like(words), words, non_blocking)

        def empty(*size, pin_memory=False, **options):
            return self.empty(*size, **options)

        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.cuda, "Event", lambda: PretendedEvent(self))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.graph is not None)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())

    @contextmanager
    def capturing(self):
        """Capture what is sent and recorded into the graph that it yields."""
        self.graph = PretendedGraph(self)
        try:
            yield self.graph
        finally:
            self.graph = None

    @contextmanager
    def beside(self):
        """Make the other stream the current one."""
        self.queue, self.side = self.side, self.queue
        try:
            yield
        finally:
            self.queue, self.side = self.side, self.queue

    def sent(self, target, source, non_blocking):
        if not non_blocking:
            return self.copy(target, source)
        half = len(source) // 2
        steps = [
            lambda: self.copy(target[:half], source[:half]),
            lambda: self.copy(target[half:], source[half:]),
        ]
        if self.graph is None:
            self.launch(steps)
        else:
            self.graph.steps += steps
        return target

    def launch(self, steps):
        for step in steps:
            if isinstance(step, PretendedEvent):
                step.pending += 1
            self.queue.append(step)

    def advance(self, num_steps=1, queue=None):
        """Do the next pieces of work of a stream, the current one without."""
        for _ in range(num_steps):
            step = (self.queue if queue is None else queue).popleft()
            if isinstance(step, PretendedEvent):
                step.pending -= 1
            else:
                step()

    def finish(self):
        self.advance(len(self.queue))
        self.advance(len(self.side), self.side)
