"""Says what pytest wrote by --junitxml: skips by their reasons, and slow tests without the mark.

Usage: report.py FILE. The slowest tests are listed by pytest itself (--durations).
"""

import collections
import re
import sys
import xml.etree.ElementTree as ElementTree

LIMIT = 10  # seconds, with the fixtures that a test is the first to ask for


def is_marked(case):
    """Whether tests/conftest.py saw the mark slow."""
    return any(x.get("name") == "marked" for x in case.iter("property"))


def reason(skipped):
    """The message of a skipped test, or what skipped its whole file."""
    whole_file = re.search(r"""(['"])Skipped: (.*)\1""", skipped.text or "")
    return whole_file[2] if whole_file else skipped.get("message")


def main():
    """Prints both."""
    cases = list(ElementTree.parse(sys.argv[1]).iter("testcase"))
    skipped = [case.find("skipped") for case in cases]
    reasons = collections.Counter(reason(x) for x in skipped if x is not None)
    print(f"{len(cases) - reasons.total()} tests ran, {reasons.total()} were skipped:")
    for why, count in reasons.most_common():
        print(f"{count:6}  {why}")

    slow = [(float(x.get("time")), x) for x in cases if not is_marked(x)]
    slow = sorted(((s, x) for s, x in slow if s > LIMIT), key=lambda row: -row[0])
    if slow:
        print(f"\n!!! {len(slow)} tests take over {LIMIT} s and are not marked slow:")
    else:
        print(f"no test takes over {LIMIT} s without being marked slow")
    for seconds, case in slow:
        print(f"!!! {seconds:5.1f} s  {case.get('classname')}::{case.get('name')}")


if __name__ == "__main__":
    main()
