"""Watching rollouts: Prometheus metrics and their server, OpenTelemetry spans, figures of packs."""
