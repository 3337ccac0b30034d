"""Headers of checkpoints, changed on purpose."""

import hashlib
import json


def rewrite_header(path, change):
    """Changes a header, and makes its own checksum fit."""
    parsed = json.loads(path.read_text())
    change(parsed["header"])
    text = json.dumps(parsed["header"], sort_keys=True, separators=(",", ":"))
    parsed["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(parsed))
