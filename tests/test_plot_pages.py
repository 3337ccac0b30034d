"""Pictures of the pages show what the records and plans of today say."""

import subprocess
import sys

from PIL import Image  # comes with matplotlib

from support.paths import ROOT, environment

PLOTS = ROOT / "experiments" / "results" / "plots"
PAGES = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def contents(folder):
    """What each picture shows, as the script wrote it into the file, by the picture's name."""
    paths = {str(x.relative_to(folder)): x for x in folder.glob("*/*.png")}
    return {name: Image.open(path).text["Description"] for name, path in paths.items()}


def test_pictures_are_up_to_date_and_shown(tmp_path):
    """If this fails after a change that was meant, run experiments/plot_pages.py again."""
    script = ROOT / "experiments" / "plot_pages.py"
    subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path)], env=environment(), check=True
    )
    drawn = contents(tmp_path)
    assert len(drawn) == 4 and all(drawn.values())
    assert drawn == contents(PLOTS)
    for name in drawn:
        assert f"](../experiments/results/plots/{name})" in PAGES
        assert (PLOTS / name).stat().st_size < 150_000
