"""Tools that inspect a step from outside: plan, audit, bench, diagnostics."""
