"""What looks at a step from outside: plan, audit, bench, diagnostics."""
