"""Prometheus metrics, OpenTelemetry spans, and figures of each pack."""
