"""The parts of bench_step.py: model, rows, check, trace, budget and chart."""
